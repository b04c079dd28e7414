"""What each process of test_compile.py runs: schedules that split the backward, on stages compiled by zbpipe.

    python compile_ranks.py RANK WORLD FOLDER

For each schedule it writes the losses, gradients and weights of two steps with an optimizer between them, how often W
ran a compiled half, and what zbpipe logged.
"""

import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.blocks import MICROBATCHES, SCHEDULES, STEPS, batch, blocks, loss_function, stages_of
from support.ranks import join
from torch.distributed.pipelining import PipelineStage, schedules

import zbpipe
from zbpipe._compile import backend

SPLIT = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def optimizer_of(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def reference(count):
    """Losses per microbatch, gradients and weights of each step, of the same model in one piece, not compiled."""
    net = torch.nn.Sequential(*blocks(count))
    optimizer = optimizer_of(net.parameters())
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, target = batch(step)
        losses = []
        for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            loss = loss_function(net(part), goal)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        steps.append((losses, state(net.named_parameters())))
    return steps


def state(named):
    return {name: (w.grad.clone(), w.detach().clone()) for name, w in named}


def run(name, rank, world, inner):
    per_rank, shape = SCHEDULES[name]
    count = world * per_rank
    mine = stages_of(rank, world, per_rank, shape)
    parts = blocks(count)
    stages = [
        PipelineStage(zbpipe.compile(parts[i], backend=inner, dynamic=False), i, count, torch.device("cpu"))
        for i in mine
    ]
    schedule = getattr(schedules, name)(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    optimizer = optimizer_of([w for i in mine for w in parts[i].parameters()])
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, target = batch(step)
        losses = []
        given = {"target": target, "losses": losses} if count - 1 in mine else {}
        schedule.step(*([x] if 0 in mine else []), **given)
        optimizer.step()
        named = [(f"{i}.{n}", w) for i in mine for n, w in parts[i].named_parameters()]
        steps.append(([loss.detach() for loss in losses], state(named)))
    return steps


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def main(rank, world, folder):
    join(rank, world, folder, seconds=120)
    lines = Lines()
    logging.getLogger("zbpipe").addHandler(lines)
    calls = []
    call = backend._WeightWork.__call__
    backend._WeightWork.__call__ = lambda self, *values: calls.append(1) or call(self, *values)
    with zbpipe.patch():
        for name in SPLIT:
            calls.clear()
            result = run(name, rank, world, "aot_eager")
            torch.save((result, len(calls), lines.lines), folder / f"{name}.{rank}")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
