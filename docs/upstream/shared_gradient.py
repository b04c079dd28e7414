"""Two weights that are added before a product get one tensor as their .grad; the second microbatch is counted twice.

    python shared_gradient.py

x @ (a + b): the gradient of a + b is that of a and of b. stage_backward_weight stores the very tensor that the engine
returns in both .grads; the next microbatch adds to each in place, so to both. Silent.

The minimal patch: accumulate as AccumulateGrad does, with a tensor of its own for each weight:

    weight.grad = grad.clone() if weight.grad is None else weight.grad + grad
"""

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


def gradients(split):
    torch.manual_seed(0)
    a, b = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    for _ in range(2):  # microbatches
        x = torch.ones(2, 4, requires_grad=True)
        out = x @ (a + b)
        if split:
            _, groups = stage_backward_input([out.sum()], None, [x], iter([a, b]))
            stage_backward_weight(iter([a, b]), groups)
        else:
            out.sum().backward()
    return a.grad[0, 0].item(), b.grad[0, 0].item()


if __name__ == "__main__":
    print(f"torch {torch.__version__}: a.grad, b.grad: right {gradients(False)}, torch's module {gradients(True)}")
