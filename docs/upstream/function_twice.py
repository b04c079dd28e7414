"""An autograd.Function that adds to a weight's buffer itself, as fused kernels do, adds twice.

    python function_twice.py

Megatron's fused linear, among others, adds the weight's gradient to main_grad inside its backward. I runs that backward
for the input's gradient, W runs it again for the weight's. Silent.

The minimal patch: as in hooks.py, no node runs twice.
"""

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        weight.main_grad += x.mT @ grad
        return grad @ weight.mT, torch.zeros_like(weight)


def main_grad(split):
    weight = torch.ones(4, 4, requires_grad=True)
    weight.main_grad = torch.zeros(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    out = Fused.apply(x, weight)
    if split:
        _, groups = stage_backward_input([out.sum()], None, [x], iter([weight]))
        stage_backward_weight(iter([weight]), groups)
    else:
        out.sum().backward()
    return weight.main_grad[0, 0].item()


if __name__ == "__main__":
    print(f"torch {torch.__version__}: main_grad: right {main_grad(False)}, torch's module {main_grad(True)}")
