"""What each process of test_schedules.py runs: torch's pipeline schedules on the module under test.

    python ranks.py RANK WORLD FOLDER

For each schedule it writes the losses and the weights' gradients of two steps to FOLDER.
"""

import contextlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

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


def blocks(count):
    torch.manual_seed(1)
    return [Block() for _ in range(count)]


def batch(step):
    torch.manual_seed(100 + step)
    return torch.randn(BATCH, WIDTH, dtype=f64), torch.randn(BATCH, WIDTH, dtype=f64)


def loss_function(out, target):
    return (out - target).pow(2).sum()


def reference(count):
    """Losses per microbatch and the weights' gradients after each step, of the same model unpipelined."""
    net = nn.Sequential(*blocks(count))
    steps = []
    for step in range(STEPS):
        x, target = batch(step)
        losses = []
        for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            loss = loss_function(net(part), goal)
            loss.backward()
            losses.append(loss.detach())
        grads = {name: w.grad.clone() for name, w in net.named_parameters()}
        steps.append((losses, grads))
    return steps


def stages_of(rank, world, per_rank, shape):
    if shape == "v":
        return [rank, 2 * world - 1 - rank]
    return [rank + world * i for i in range(per_rank)]


def run(name, rank, world):
    per_rank, shape = SCHEDULES[name]
    count = world * per_rank
    mine = stages_of(rank, world, per_rank, shape)
    parts = blocks(count)
    stages = [PipelineStage(parts[i], i, count, torch.device("cpu")) for i in mine]
    kind = getattr(schedules, name)
    one = per_rank == 1
    schedule = kind(stages[0] if one else stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    steps = []
    for step in range(STEPS):
        x, target = batch(step)
        losses = []
        given = {"target": target, "losses": losses} if count - 1 in mine else {}
        schedule.step(*([x] if 0 in mine else []), **given)
        grads = {f"{i}.{n}": w.grad.clone() for i in mine for n, w in parts[i].named_parameters()}
        steps.append(([loss.detach() for loss in losses], grads))
    return steps


def under_test():
    if os.environ.get("ZBPIPE_TEST_MODULE") == "torch":
        return contextlib.nullcontext()
    import zbpipe

    return zbpipe.patched()


def main(rank, world, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    with under_test():
        for name in SCHEDULES:
            try:
                result = run(name, rank, world)
            except Exception as error:  # the other rank may wait for us: stop here, keep what we have
                torch.save(f"{type(error).__name__}: {error}", folder / f"{name}.{rank}.failed")
                raise
            torch.save(result, folder / f"{name}.{rank}")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
