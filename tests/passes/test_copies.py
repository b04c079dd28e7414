"""I and W copy nothing that nobody else has: they allocate what an ordinary backward allocates, to the byte.

A copy, by whatever operation, is memory that torch's allocator hands out: so the bytes of I and W are compared with
those of an ordinary backward of a copy, over two microbatches in flight. A difference is named where there is one.
"""

import copy

import pytest
import torch
from support.oracle import close, needs_zbpipe
from support.small_blocks import GPT2, T5, TOKENS, WIDTH, Experts, Llama, ResNet
from torch import nn

import zbpipe
from zbpipe import memory

pytestmark = needs_zbpipe

MICROBATCHES = 2
ROWS = (TOKENS, WIDTH)
BATCH = (2, TOKENS, WIDTH)
PICTURE = (2, WIDTH, 4, 4)


class Given(nn.Module):
    """What a function makes of x and this module's weights `w`, `u`, and its vector `v`."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.w, self.u = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))
        self.v = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.function(self, x)


class Copies(torch.autograd.Function):
    """Of tensor parallel: the identity, whose gradient is all-reduced in place and handed through."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(1)


class Reduces(torch.autograd.Function):
    """Of tensor parallel: an all-reduce, whose gradient is handed through."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def observed(m, x):
    """Its gradient goes through hooks of each kind, which return what they were given."""
    h = x @ m.w
    h.register_hook(lambda grad: grad)
    h.grad_fn.register_prehook(lambda grads: grads)
    h.grad_fn.register_hook(lambda grads, _: grads)
    x.register_hook(lambda grad: grad)
    return h.tanh() @ m.u


def module_hooked(m, x):
    if not hasattr(m, "net"):
        m.net = [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        for part in m.net:
            part.register_full_backward_pre_hook(lambda part, grads: None)
            part.register_full_backward_hook(lambda part, before, after: None)
    return m.net[1](m.net[0](x @ m.w)) @ m.u


def measured(module, shape, backward):
    """(bytes, blocks) that the backwards of the microbatches allocate."""
    torch.manual_seed(1)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(MICROBATCHES)]
    outputs = [module(x) for x in inputs]
    grads = [torch.randn_like(y) for y in outputs]
    with memory.record(max_events=0) as rec:
        backward(module, inputs, outputs, grads)
    return rec.allocated, rec.allocations, [x.grad for x in inputs], [p.grad for p in module.parameters()]


def whole(module, inputs, outputs, grads):
    while outputs:
        outputs.pop(0).backward(grads.pop(0))


def split(module, inputs, outputs, grads):
    groups = []
    for x in inputs:
        groups.append(zbpipe.stage_backward_input([outputs.pop(0)], [grads.pop(0)], [x], module.parameters())[1])
    while groups:
        zbpipe.stage_backward_weight(module.parameters(), groups.pop(0))


def more(make, shape):
    """Bytes and blocks that I and W take more than an ordinary backward."""
    torch.manual_seed(0)
    module = make()
    results = [measured(copy.deepcopy(module), shape, backward) for backward in (split, whole)]
    (ours, blocks, *gradients), (theirs, their_blocks, *expected) = results
    close(gradients, expected, "gradients")
    return ours - theirs, blocks - their_blocks


def of(function):
    return lambda: Given(function)


CASES = {
    "Llama": (Llama, BATCH),
    "GPT-2": (GPT2, BATCH),
    "Mixtral": (lambda: Llama(Experts), BATCH),
    "T5": (T5, BATCH),
    "ResNet": (ResNet, PICTURE),
    "three blocks": (lambda: nn.Sequential(*(Llama() for _ in range(3))), BATCH),
    "linear of three dimensions first": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), BATCH),
    "einsum": (of(lambda m, x: torch.einsum("bi,oi->bo", x, m.w).relu() @ m.u), ROWS),
    "einsum of three dimensions": (of(lambda m, x: torch.einsum("bti,oi->bto", x, m.w).relu() @ m.u), BATCH),
    "weight.view": (of(lambda m, x: (x @ m.w.view(WIDTH, WIDTH)).relu() @ m.u), ROWS),
    "added positions at batch 1": (of(lambda m, x: (x + m.w[:TOKENS]) @ m.u + m.v), (1, *ROWS)),
    "added weight at batch 1": (of(lambda m, x: (x.view(1, WIDTH) + m.v) @ m.u), (1, WIDTH)),
    "chunk": (of(lambda m, x: torch.cat([(x @ m.w).chunk(2, -1)[i].tanh() for i in (1, 0)], -1) @ m.u), ROWS),
    "cat": (of(lambda m, x: torch.cat([x @ m.w, x @ m.u], -1)), ROWS),
    "unbind": (of(lambda m, x: torch.stack([row * m.v for row in (x @ m.w).unbind(0)]) @ m.u), ROWS),
    "one gradient for two weights": (of(lambda m, x: x @ m.w + (m.v + m.u[0])), ROWS),
    "module hooks": (of(module_hooked), ROWS),
    "hooks that return their argument": (of(observed), ROWS),
    "handed through": (of(lambda m, x: Reduces.apply(Copies.apply(x @ m.w).tanh() @ m.u)), ROWS),
    "handed through first": (of(lambda m, x: Reduces.apply(Copies.apply(x) @ m.w)), ROWS),
    "handed to a weight": (of(lambda m, x: x @ Copies.apply(m.w) + Reduces.apply(m.v)), ROWS),
}


@pytest.mark.parametrize("name", CASES)
def test_i_and_w_allocate_what_an_ordinary_backward_allocates(name):
    assert more(*CASES[name]) == (0, 0)
