"""What each process of test_news.py runs: zero-bubble schedules with what torch 2.15 has new in them.

    python news_ranks.py RANK WORLD FOLDER

For each schedule it writes the losses and the weights' gradients of two steps to FOLDER.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.blocks import MICROBATCHES, STEPS, batch, blocks, loss_function, stages_of
from support.ranks import UNDER_TEST, join, on
from torch.distributed.pipelining import PipelineStage, schedules

SENDS = 3  # two are too few for these orders of actions, torch says
ZERO_BUBBLE = {"ScheduleInterleavedZeroBubble": "loop", "ScheduleZBVZeroBubble": "v", "ScheduleDualPipeV": "v"}


def run(name, rank, world):
    """Microbatches that the caller has split, sends of which a few are under way, reductions that are waited for later."""
    count = 2 * world
    mine = stages_of(rank, world, 2, ZERO_BUBBLE[name])
    parts = blocks(count)
    stages = [PipelineStage(parts[i], i, count, torch.device("cpu")) for i in mine]
    schedule = getattr(schedules, name)(
        stages,
        MICROBATCHES,
        loss_fn=loss_function,
        scale_grads=False,
        defer_reduce_grad_wait=True,
        max_outstanding_sends=SENDS,
    )
    actions = [str(action) for action in schedule.pipeline_order_with_comms[rank]]
    steps = []
    for step in range(STEPS):
        x, target = batch(step)
        losses = []
        given = {"target_mbs": list(target.chunk(MICROBATCHES)), "losses": losses} if count - 1 in mine else {}
        if 0 in mine:
            given["arg_mbs"] = [(part,) for part in x.chunk(MICROBATCHES)]
        schedule.step(**given)
        grads = {f"{i}.{n}": w.grad.clone() for i in mine for n, w in parts[i].named_parameters()}
        steps.append(([loss.detach() for loss in losses], grads))
    return {"steps": steps, "actions": actions}


def main(rank, world, folder):
    join(rank, world, folder)
    with on(UNDER_TEST):
        for name in ZERO_BUBBLE:
            torch.save(run(name, rank, world), folder / f"{name}.{rank}")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
