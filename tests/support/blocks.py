"""A model of blocks and torch's schedules for it: what the ranks of several tests train."""

import torch
from torch import nn

MICROBATCHES = 8
BATCH, WIDTH = 16, 8
STEPS = 2
f64 = torch.float64

# name: number of stages of each rank, and whether the last ranks' stages come back (the V shape)
SCHEDULES = {
    "ScheduleGPipe": (1, "loop"),
    "Schedule1F1B": (1, "loop"),
    "ScheduleLoopedBFS": (2, "loop"),
    "ScheduleInterleaved1F1B": (2, "loop"),
    "ScheduleInterleavedZeroBubble": (2, "loop"),
    "ScheduleZBVZeroBubble": (2, "v"),
    "ScheduleDualPipeV": (2, "v"),
}
ZERO_BUBBLE = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Block(nn.Module):
    """A residual block whose second product takes the sum of two weights."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=f64)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=f64)
        self.down = nn.Parameter(torch.randn(2 * WIDTH, WIDTH, dtype=f64) / 4)
        self.extra = nn.Parameter(torch.randn(2 * WIDTH, WIDTH, dtype=f64) / 4)

    def forward(self, x):
        return x + self.up(self.norm(x)).tanh() @ (self.down + self.extra)


class Linears(nn.Module):
    """A residual block of two linear layers. W needs neither its input nor its output, nor the output's gradient."""

    def __init__(self, width=WIDTH, dtype=f64):
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.up, self.down = nn.Linear(width, 2 * width, dtype=dtype), nn.Linear(2 * width, width, dtype=dtype)

    def forward(self, x):
        return x + 2 * self.down(self.up(self.norm(x)).tanh())


def blocks(count, kind=Block):
    torch.manual_seed(1)
    return [kind() for _ in range(count)]


def batch(step):
    torch.manual_seed(100 + step)
    return torch.randn(BATCH, WIDTH, dtype=f64), torch.randn(BATCH, WIDTH, dtype=f64)


def loss_function(out, target):
    return (out - target).pow(2).sum()


def stages_of(rank, world, per_rank, shape):
    if shape == "v":
        return [rank, 2 * world - 1 - rank]
    return [rank + world * i for i in range(per_rank)]
