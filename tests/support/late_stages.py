"""Kinds of stages for the device that runs late; the same on the CPU."""

import torch
from torch import nn

from support.functions import Asks, Handing

ROWS, WIDTH = 6, 8


def mlp():
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )


def normed():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return torch.tanh(x @ self.w * self.scale) @ self.w.t()


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(2, 3, 3, padding=1)
        self.out = nn.Linear(12, WIDTH)

    def forward(self, x):
        return self.out(torch.relu(self.convolution(x.view(ROWS, 2, 4))).flatten(1))


class Batched(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 4, 5))
        self.out = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        h = torch.bmm(x.view(ROWS, 2, 4).transpose(0, 1), self.experts)
        return torch.einsum("ebi,io->beo", h.sigmoid(), self.out).reshape(ROWS, WIDTH)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.out = mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False))


class DropsOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(torch.nn.functional.dropout(self.inner(x), 0.5))


class Handed(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x):
        return Handing.apply(torch.tanh(Handing.apply(x, self.w)), self.v)


def at_once(x, w, grad):
    return x.mT @ grad, None


class Multiplied(Handed):
    """Functions that say nothing."""

    def forward(self, x):
        return Asks.apply(torch.tanh(Asks.apply(x, self.w, None, at_once)), self.v, None, at_once)


class HandedComputed(Handed):
    """Between the task and the weight there is a node: W takes the engine, and makes the call before it."""

    def forward(self, x):
        return Handing.apply(torch.tanh(Handing.apply(x, self.w.sin())), self.v)


class Root(nn.Module):
    """Its second output depends on a parameter alone: W starts there."""

    def __init__(self):
        super().__init__()
        self.inner, self.w = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return self.inner(x), (self.w * self.w).sum(0)


class Branches(nn.Module):
    """Two branches, each on a stream of its own, share a matrix and a scale."""

    def __init__(self):
        super().__init__()
        self.w, self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH))
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def branch(self, x):
        return torch.tanh(x @ self.w * self.scale) * self.scale + self.shift

    def forward(self, x):
        if x.device.type == "cpu":
            return self.branch(x) + self.branch(x.sin())
        made, main = [], torch.accelerator.current_stream()
        for change in (lambda x: x, torch.sin):
            side = torch.Stream(device=x.device)
            side.wait_stream(main)
            x.record_stream(side)
            with side:
                made.append(self.branch(change(x)))
            main.wait_stream(side)
            made[-1].record_stream(main)
        return made[0] + made[1]


STAGES = {
    "mlp": mlp,
    "normed": normed,
    "tied": Tied,
    "convolved": Convolved,
    "batched": Batched,
    "checkpointed": Checkpointed,
    "dropout": DropsOut,
    "handed over": Handed,
    "handed over, computed": HandedComputed,
    "multiplied": Multiplied,
    "weight root": Root,
    "branches": Branches,
}
