"""The host time of a whole schedule step on deep tiny stages: torch's own module beside the patch.

Each rank has two stages, chains of blocks of width 8; a single rank sends nothing. The sides take turns of two steps,
each on its own stages, and the second step counts. A step takes as long as its slowest rank. The figures are medians of
the runs, and their ratios to torch's.

    python benchmarks/step_overhead.py --ranks 1 2 --blocks 16 64 --json step_overhead.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench.results import add_argument, now, spread, write
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import zbpipe
from zbpipe._formatting import table

WIDTH, ROWS, MICROBATCHES, ROUNDS = 8, 4, 4, 7
INTERLEAVED = "ScheduleInterleavedZeroBubble"
SCHEDULES = (INTERLEAVED, "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Side:
    """A schedule on its own stages, run under the patch or not."""

    def __init__(self, name: str, blocks: int, patched: bool, device: str) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        places = (rank, rank + world) if name == INTERLEAVED else (rank, 2 * world - 1 - rank)
        self.device, self.x = device, torch.ones(ROWS * MICROBATCHES, WIDTH, device=device)
        stages = [
            PipelineStage(
                nn.Sequential(*(Block() for _ in range(blocks))).to(device), place, 2 * world, torch.device(device)
            )
            for place in places
        ]
        self.weights = [w for stage in stages for w in stage.submod.parameters()]
        self.is_first, self.is_last = 0 in places, 2 * world - 1 in places
        kind: Any = getattr(schedules, name)
        self.schedule = kind(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss, scale_grads=False)
        self.patched = patched
        self.times: list[float] = []

    def step(self, is_timed: bool) -> None:
        with zbpipe.patch() if self.patched else contextlib.nullcontext():
            self.run()  # patch() and the other side have changed the processor's caches, and Python's
            took = torch.tensor(self.run())
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if is_timed:
            self.times.append(took.item())

    def run(self) -> float:
        given = (self.x,) if self.is_first else ()
        target = {"target": self.x} if self.is_last else {}
        for weight in self.weights:
            weight.grad = None
        dist.barrier()
        begin = now(self.device)
        self.schedule.step(*given, **target)
        return now(self.device) - begin


def measure(name: str, blocks: int, device: str) -> dict[str, Any]:
    sides = {"torch": Side(name, blocks, False, device), "zbpipe": Side(name, blocks, True, device)}
    for is_timed in [False, *[True] * ROUNDS]:
        for side in sides.values():
            gc.collect()
            side.step(is_timed)
    times = {key: [1e3 * seconds for seconds in side.times] for key, side in sides.items()}
    return {"schedule": name, "ranks": dist.get_world_size(), "blocks": blocks, **times}


def run_rank(rank: int, world: int, blocks: list[int], folder: str, device: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{world}", world), rank=rank, world_size=world)
    rows = [measure(name, count, device) for name in SCHEDULES for count in blocks]
    if rank == 0:
        Path(folder, f"rows{world}").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help=f"at most {MICROBATCHES // 2}")
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 64], help="blocks per stage")
    parser.add_argument("--device", default="cpu", help="where the stages are: cpu (default), or cuda with one rank")
    add_argument(parser)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for world in given.ranks:
            mp.spawn(run_rank, (world, given.blocks, folder, given.device), nprocs=world)
            rows += json.loads(Path(folder, f"rows{world}").read_text())
    for row in rows:
        row["ratio"] = spread(ours / theirs for ours, theirs in zip(row["zbpipe"], row["torch"], strict=True))
        row["torch_ms"], row["zbpipe_ms"] = spread(row.pop("torch")), spread(row.pop("zbpipe"))
    columns = ("schedule", "ranks", "blocks per stage", "torch ms", "zbpipe ms", "zbpipe to torch")
    print(
        table(
            columns,
            [
                [
                    row["schedule"],
                    str(row["ranks"]),
                    str(row["blocks"]),
                    f"{row['torch_ms'].median:.1f}",
                    f"{row['zbpipe_ms'].median:.1f}",
                    f"{row['ratio'].median:.2f}x",
                ]
                for row in rows
            ],
        )
    )
    write(given.json, "step_overhead", rows, given.device)


if __name__ == "__main__":
    main()
