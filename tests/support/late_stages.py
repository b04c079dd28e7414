"""Kinds of stages for the device that runs late; the same on the CPU."""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.functions import Asks, Handing
from support.oracle import Stage
from support.program_names import keep_products

ROWS, WIDTH = 6, 8
SQUARE = (WIDTH, WIDTH)
again = functools.partial(checkpoint, use_reentrant=False)


def linear(**options):
    return nn.Linear(WIDTH, WIDTH, **options)


def mlp():
    return nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear())


def normed():
    return nn.Sequential(linear(), nn.LayerNorm(WIDTH), nn.GELU(), linear(bias=False))


def of(forward, **parts):
    """Makes stages of a forward; parts are shapes of parameters, or make modules."""

    def make():
        made = {name: part() if callable(part) else nn.Parameter(torch.randn(part) / 4) for name, part in parts.items()}
        return Stage(forward, **made)

    return make


def batched(m, x):
    h = torch.bmm(x.view(ROWS, 2, 4).transpose(0, 1), m.experts)
    return torch.einsum("ebi,io->beo", h.sigmoid(), m.inner).reshape(ROWS, WIDTH)


def at_once(x, w, grad):
    return x.mT @ grad, None


def multiplied(m, x):
    """Functions that say nothing."""
    return Asks.apply(torch.tanh(Asks.apply(x, m.w, None, at_once)), m.v, None, at_once)


def used_here(tensor):
    """What runs for the CPU, and what it unpacks, is on the caller's stream."""
    if tensor.device.type == "late":
        tensor.record_stream(torch.accelerator.current_stream())
    return tensor


class ToHost(torch.autograd.Function):
    """A scaled sum of the rows, on the CPU."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.empty(x.shape[1]).copy_((x * w).sum(0), non_blocking=True)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        used_here(x)
        grad = grad.to(x.device, non_blocking=True)
        return (grad * w).expand_as(x).contiguous(), (grad * x).sum(0)


def grouped(m, x):
    """Rows of two experts, whose ends are on the device."""
    ends = torch.tensor([ROWS // 2, ROWS], dtype=torch.int32).to(x.device)
    return torch._grouped_mm(torch._grouped_mm(x, m.up, offs=ends).relu(), m.down.mT, offs=ends)


def branches(m, x):
    """Two branches, each on a stream of its own, share a matrix and a scale."""

    def branch(x):
        return torch.tanh(x @ m.w * m.scale) * m.scale + m.shift

    if x.device.type == "cpu":
        return branch(x) + branch(x.sin())
    made, main = [], torch.accelerator.current_stream()
    for change in (lambda x: x, torch.sin):
        side = torch.Stream(device=x.device)
        side.wait_stream(main)
        x.record_stream(side)
        with side:
            made.append(branch(change(x)))
        main.wait_stream(side)
        made[-1].record_stream(main)
    return made[0] + made[1]


STAGES = {
    "mlp": mlp,
    "normed": normed,
    "tied": of(lambda m, x: torch.tanh(x @ m.w * m.scale) @ m.w.t(), w=SQUARE, scale=(WIDTH,)),
    "convolved": of(
        lambda m, x: m.out(torch.relu(m.convolution(x.view(ROWS, 2, 4))).flatten(1)),
        convolution=lambda: nn.Conv1d(2, 3, 3, padding=1),
        out=lambda: nn.Linear(12, WIDTH),
    ),
    "grouped": of(grouped, up=(2, WIDTH, 2 * WIDTH), down=(2, WIDTH, 2 * WIDTH)),
    "batched": of(batched, experts=(2, 4, 5), inner=(5, 4)),
    "checkpointed": of(lambda m, x: m.out(again(m.block, x)), block=mlp, out=linear),
    "dropout": of(lambda m, x: m.out(nn.functional.dropout(m.inner(x), 0.5)), inner=linear, out=linear),
    "handed over": of(lambda m, x: Handing.apply(torch.tanh(Handing.apply(x, m.w)), m.v), w=SQUARE, v=SQUARE),
    # Between the task and the weight there is a node: W takes the engine, and makes the call before it.
    "handed over, computed": of(
        lambda m, x: Handing.apply(torch.tanh(Handing.apply(x, m.w.sin())), m.v), w=SQUARE, v=SQUARE
    ),
    "multiplied": of(multiplied, w=SQUARE, v=SQUARE),
    # Its second output depends on a parameter alone: W starts there.
    "weight root": of(lambda m, x: (m.inner(x), (m.w * m.w).sum(0)), inner=linear, w=SQUARE),
    "branches": of(branches, w=SQUARE, scale=(WIDTH,), shift=(WIDTH,)),
}


selectively = functools.partial(again, context_fn=keep_products)


def nested(m, x):
    return m.out(again(lambda x: m.second(again(m.first, x)), x))


def offloaded(m, x):
    with torch.autograd.graph.save_on_cpu():
        h = m.block(x)
    return m.out(h)


def drops_out_again(m, x):
    return m.out(again(lambda x: nn.functional.dropout(torch.tanh(m.inner(x)), 0.5), x))


# For policies.
PACKED = {
    "nested": of(nested, first=mlp, second=mlp, out=linear),
    "selective": of(lambda m, x: m.out(selectively(m.block, x)), block=mlp, out=linear),
    "offloaded": of(offloaded, block=mlp, out=linear),
    "dropout again": of(drops_out_again, inner=linear, out=linear),
}
