"""What each process of test_history.py's schedules runs: steps of every schedule, the collector off, looked at by the tool.

    python leak_ranks.py RANK WORLD FOLDER STEPS SCHEDULE ...

Writes, for each of these schedules, what every step left behind to FOLDER/NAME.RANK, as JSON.
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.blocks import MICROBATCHES, SCHEDULES, batch, blocks, loss_function, stages_of
from support.ranks import join
from torch.distributed.pipelining import PipelineStage, schedules

import zbpipe
from zbpipe.leaks import Growth, check_tensor_leak

LOOK_EVERY = 5  # steps, through all objects
WARMUP = 3  # steps in which buffers, gradients and the optimizer's state come to be


class Training:
    def __init__(self, name, rank, world):
        per_rank, shape = SCHEDULES[name]
        count = world * per_rank
        self.mine = stages_of(rank, world, per_rank, shape)
        parts = blocks(count)
        self.modules = [parts[i] for i in self.mine]
        stages = self.stages = [PipelineStage(parts[i], i, count, torch.device("cpu")) for i in self.mine]
        kind = getattr(schedules, name)
        one = per_rank == 1
        self.schedule = kind(stages[0] if one else stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
        self.is_last = count - 1 in self.mine
        self.optimizer = torch.optim.Adam([w for m in self.modules for w in m.parameters()], lr=1e-3)
        self.x, self.target = batch(0)

    def step(self):
        losses = []
        given = {"target": self.target, "losses": losses} if self.is_last else {}
        self.schedule.step(*([self.x] if 0 in self.mine else []), **given)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def let_go(self):
        """Of the outputs of the last stage, which torch's stage keeps until its next step, for its user."""
        for stage in self.stages:
            stage.clear_runtime_states()


def tensors_in_garbage():
    """How many tensors only the collector can free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    count = sum(issubclass(type(thing), torch.Tensor) for thing in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    return count


def tensors_alive():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def run(name, rank, world, steps):
    with zbpipe.memory.record(max_events=0) as memory:  # around all: it counts the freeing of its own blocks alone
        training = Training(name, rank, world)
        for _ in range(WARMUP):
            training.step()
        dist.barrier()
        gc.collect()
        gc.disable()
        tensors, live, reports = [], [], []
        with Growth() as growth:
            for number in range(steps):
                with check_tensor_leak(action="record", allow=[*training.modules, training.optimizer]) as check:
                    training.step()
                    training.let_go()
                reports.append(str(check.report) if check.report else "")
                growth.step()
                live.append(memory.live)
                if number % LOOK_EVERY == 0:
                    tensors.append(tensors_alive())
            grown = growth.table() if growth.grown() else ""
        garbage = tensors_in_garbage()
    gc.enable()
    return {
        "tensors": tensors,
        "live": live,
        "reports": reports,
        "counts": growth.counts,
        "bytes": growth.bytes,
        "grown": grown,
        "garbage": garbage,
    }


def main(rank, world, folder, steps, names):
    join(rank, world, folder)
    with zbpipe.patch():
        for name in names:
            result = run(name, rank, world, steps)
            (folder / f"{name}.{rank}").write_text(json.dumps(result))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
