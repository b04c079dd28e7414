"""What each process of test_filled_waits.py runs: zero-bubble schedules with waits filled and not, W late in their order.

    python fill_ranks.py RANK WORLD FOLDER

For each schedule, and with waits filled or not, it writes the losses and the gradients of four steps, how many groups
ran in waits, and what was recorded, to FOLDER. From the second step on every wait is expected to be long.
"""

import contextlib
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from support.blocks import MICROBATCHES, SCHEDULES, ZERO_BUBBLE, batch, blocks, loss_function, stages_of
from support.ranks import join
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import zbpipe
from zbpipe import _waits as waits
from zbpipe import memory

STEPS = 4
LATEST = 10  # seconds


class Slow(nn.Module):
    """Its rank's messages come late."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        time.sleep(0.002)
        return self.module(x)


@contextlib.contextmanager
def messages_after_groups():
    """A message that groups run beside is not there before one of them has run."""
    begin, finish = waits.Arrival.__init__, waits.Arrival.finish

    def count_and_begin(arrival, works):
        arrival.before = waits.waited.groups
        begin(arrival, works)

    def finish_late(arrival, timeout=None):
        end = time.monotonic() + LATEST
        while waits.waited.groups == arrival.before and time.monotonic() < end:
            time.sleep(0.0005)
        finish(arrival, timeout)

    waits.Arrival.__init__, waits.Arrival.finish = count_and_begin, finish_late
    try:
        yield
    finally:
        waits.Arrival.__init__, waits.Arrival.finish = begin, finish


def put_weight_passes_last(schedule):
    """So that groups wait for W whenever the rank waits for a message."""
    actions = schedule.pipeline_order_with_comms[schedule.rank]
    late = [action for action in actions if action.computation_type == schedules.BACKWARD_WEIGHT]
    ends = [action for action in actions if action.computation_type in (schedules.REDUCE_GRAD, schedules.RESHARD)]
    first = [action for action in actions if action not in late and action not in ends]
    schedule.pipeline_order_with_comms[schedule.rank] = [*first, *late, *ends]


def run(name, rank, world, fill):
    count = 2 * world
    mine = stages_of(rank, world, *SCHEDULES[name])
    parts = blocks(count)
    if rank == world - 1:
        parts = [Slow(part) if i in mine else part for i, part in enumerate(parts)]
    stages = [PipelineStage(parts[i], i, count, torch.device("cpu")) for i in mine]
    schedule = getattr(schedules, name)(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    put_weight_passes_last(schedule)
    steps, phases = [], []
    with zbpipe.patched(fill_waits=fill), messages_after_groups():
        for step in range(STEPS):
            x, target = batch(step)
            losses = []
            with memory.record() as recording:
                schedule.step(
                    *([x] if 0 in mine else []), **({"target": target, "losses": losses} if count - 1 in mine else {})
                )
            phases.append([(phase.kind, phase.begin_ns, phase.end_ns) for phase in recording.phases])
            grads = {f"{i}.{n}": w.grad.clone() for i in mine for n, w in stages_module(parts[i]).named_parameters()}
            steps.append(([loss.detach() for loss in losses], grads))
            if fill:  # however long the waits were
                learned = waits._learned[schedule]
                learned.waits = [1.0] * len(learned.waits)
        counted = waits.waited
    return {"steps": steps, "groups": counted.groups, "seconds": counted.seconds, "phases": phases}


def stages_module(part):
    return part.module if isinstance(part, Slow) else part


def main(rank, world, folder):
    join(rank, world, folder)
    for name in ZERO_BUBBLE:
        for fill in (False, True):
            torch.save(run(name, rank, world, fill), folder / f"{name}.{fill}.{rank}")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
