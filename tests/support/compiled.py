"""Stages to compile, and the oracle for them: a compiled copy in halves against an eager copy's ordinary backward."""

import itertools
import logging

import torch
from torch import nn

import zbpipe
from support.oracle import Stage, at_once, check, last_microbatch_first, late
from zbpipe._compile import backend  # to count what W computes of compiled backwards

ORDERS = (at_once, late, last_microbatch_first)
INEXACT = {"inexact_inputs": True, "rtol": 1e-4, "atol": 1e-5}
"""For inductor, whose kernels are not those of eager code."""
HEADS = 2


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width=16, dtype=torch.float32):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, dtype=dtype)
        self.qkv = nn.Linear(width, 3 * width, dtype=dtype)
        self.out = nn.Linear(width, width, dtype=dtype)
        self.norm2 = nn.LayerNorm(width, dtype=dtype)
        self.up = nn.Linear(width, 4 * width, dtype=dtype)
        self.down = nn.Linear(4 * width, width, dtype=dtype)

    def forward(self, x):
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def mlp(width=8):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))


def call(net, *inputs):
    return net(*inputs)


def check_compiled(net, *inputs, forward=call, backend="aot_eager", orders=ORDERS, setup=None, options=None, **given):
    """Hold I and W of `forward(net, *inputs)`, compiled by zbpipe, against an ordinary eager backward of a copy."""
    compiled = zbpipe.compile(forward, backend=backend, **(options or {"dynamic": False}))
    versions = itertools.cycle([compiled, forward])  # the oracle makes the split copy first

    def prepare(stage):
        stage.version = next(versions)
        if setup:
            setup(stage)

    if backend == "inductor":
        given = {**INEXACT, **given}
    stage = Stage(lambda m, *values: m.version(m.net, *values), net=net)
    check(stage, *inputs, orders=orders, setup=prepare, **given)


def run_input(stage, x, forward=None):
    """Forward and I: the groups."""
    out = (stage if forward is None else forward)(x)
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], stage.parameters())
    return groups


def bytes_held(groups):
    return sum(group.bytes_held for group in groups)


def not_split(caplog):
    return [record.getMessage() for record in caplog.records if "is not split" in record.getMessage()]


class Watch(logging.Handler):
    """Counts what W computes of compiled backwards, and keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.calls, self.lines = 0, []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        torch._dynamo.reset()  # what another case compiled would be used again, and not log again
        self.original = backend._run_weight_half

        def counted(*args):
            self.calls += 1
            return self.original(*args)

        backend._run_weight_half = counted
        logging.getLogger("zbpipe").addHandler(self)
        return self

    def __exit__(self, *error):
        backend._run_weight_half = self.original
        logging.getLogger("zbpipe").removeHandler(self)

    @property
    def not_split(self):
        return [line for line in self.lines if "is not split" in line]
