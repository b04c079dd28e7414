"""What each process of test_checkpointed.py runs: schedules of checkpointed stages, on zbpipe and on torch's module.

    python checkpoint_ranks.py RANK WORLD FOLDER

For each schedule and module it writes to FOLDER the peak of the second step's memory, in bytes, how often its blocks
were computed, and the weights' gradients.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from bench.stages import transformer
from support.ranks import MODULES, join, on
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from zbpipe import memory

MICROBATCHES, BLOCKS, WIDTH, TOKENS = 6, 2, 32, 64
ZERO_BUBBLE = {
    "ScheduleInterleavedZeroBubble": lambda rank, world: (rank, rank + world),
    "ScheduleZBVZeroBubble": lambda rank, world: (rank, 2 * world - 1 - rank),
    "ScheduleDualPipeV": lambda rank, world: (rank, 2 * world - 1 - rank),
}


def modules(count):
    torch.manual_seed(1)
    return [transformer(BLOCKS, WIDTH, TOKENS, checkpointed=True) for _ in range(count)]


def data():
    torch.manual_seed(2)
    return torch.randn(MICROBATCHES, TOKENS, WIDTH), torch.randn(MICROBATCHES, TOKENS, WIDTH)


def run(name, rank, world):
    places, parts = ZERO_BUBBLE[name](rank, world), modules(2 * world)
    stages = [PipelineStage(parts[i], i, 2 * world, torch.device("cpu")) for i in places]
    schedule = getattr(schedules, name)(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss, scale_grads=False)
    x, target = data()

    def step():
        schedule.step(*([x] if 0 in places else []), **({"target": target} if 2 * world - 1 in places else {}))

    step()
    for i in places:
        parts[i].computed = 0
    with memory.record(max_events=0) as recording:
        step()
    grads = {f"{i}.{name}": weight.grad for i in places for name, weight in parts[i].named_parameters()}
    return {"peak": recording.peak, "computed": sum(parts[i].computed for i in places), "grads": grads}


def main(rank, world, folder):
    join(rank, world, folder)
    for name in ZERO_BUBBLE:
        for module in MODULES:
            with on(module):
                torch.save(run(name, rank, world), folder / f"{name}.{module}.{rank}")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
