"""A Function written for a WeightGradStore, as those of Megatron-LM and TransformerEngine.

By zbpipe.defer the functions that its backward puts into the store run in the weight pass.

    python examples/weight_grad_store.py
"""

import torch
from torch import nn

import zbpipe

MICROBATCHES, TOKENS, WIDTH = 4, 32, 64


class WeightGradStore:
    """Keeps nothing: the parameter group keeps a function until W, and an ordinary backward runs it at once."""

    def put(self, tensors, function):
        # None: the function adds the gradients of all weights by itself
        zbpipe.defer(function, weights=None, saved=tuple(tensors))


STORE = WeightGradStore()


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.mT

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        STORE.put((x, grad, weight), add_to_main_grad)
        return grad @ weight, None


def add_to_main_grad(x, grad, weight):
    weight.main_grad += grad.mT @ x


def main():
    torch.manual_seed(0)
    weight, plain = (nn.Parameter(torch.eye(WIDTH)) for _ in range(2))
    weight.main_grad = torch.zeros(WIDTH, WIDTH)
    groups = []
    for _ in range(MICROBATCHES):
        x = torch.randn(TOKENS, WIDTH, requires_grad=True)
        (x @ plain.mT).sigmoid().sum().backward()
        loss = LinearFunction.apply(x, weight).sigmoid().sum()
        groups += zbpipe.stage_backward_input([loss], None, [x], [weight])[1]
    assert not weight.main_grad.any(), "an input pass has added a weight gradient"
    for group in groups:
        zbpipe.stage_backward_weight([weight], [group])
    assert torch.equal(weight.main_grad, plain.grad)
    print(f"main_grad of {MICROBATCHES} microbatches equals an ordinary backward's gradient, bit for bit")


if __name__ == "__main__":
    main()
