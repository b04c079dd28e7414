"""What each process of test_schedules.py runs: torch's pipeline schedules on the module under test.

    python schedule_ranks.py RANK WORLD FOLDER

For each schedule it writes the losses and the weights' gradients of two steps to FOLDER.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.blocks import MICROBATCHES, SCHEDULES, STEPS, batch, blocks, loss_function, stages_of
from support.ranks import UNDER_TEST, join, on
from torch.distributed.pipelining import PipelineStage, schedules


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


def main(rank, world, folder):
    join(rank, world, folder)
    with on(UNDER_TEST):
        for name in SCHEDULES:
            torch.save(run(name, rank, world), folder / f"{name}.{rank}")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
