"""The host time of a whole schedule step on deep tiny stages: torch's own module beside the patch.

One rank, a V of two stages, so that nothing is sent; stages are chains of blocks of width 8. Each side runs on stages
of its own, in turns; medians of the runs, and their ratio to torch's.

    python benchmarks/step_overhead.py --blocks 16 64 --json step_overhead.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import zbpipe
from zbpipe.memory._format import table

WIDTH, ROWS, MICROBATCHES, ROUNDS = 8, 4, 4, 7
SCHEDULES = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Side:
    """A schedule on stages of its own, run under the patch or not."""

    def __init__(self, name: str, blocks: int, patched: bool) -> None:
        torch.manual_seed(0)
        stages = [
            PipelineStage(nn.Sequential(*(Block() for _ in range(blocks))), i, 2, torch.device("cpu")) for i in (0, 1)
        ]
        self.weights = [w for stage in stages for w in stage.submod.parameters()]
        kind: Any = getattr(schedules, name)
        self.schedule = kind(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss, scale_grads=False)
        self.patched = patched
        self.times: list[float] = []

    def step(self, is_timed: bool) -> None:
        x = torch.ones(ROWS * MICROBATCHES, WIDTH)
        with zbpipe.patched() if self.patched else contextlib.nullcontext():
            begin = time.perf_counter()
            self.schedule.step(x, target=x)
            if is_timed:
                self.times.append(time.perf_counter() - begin)
        for weight in self.weights:
            weight.grad = None


def measure(name: str, blocks: int) -> dict[str, Any]:
    sides = {"torch": Side(name, blocks, False), "zbpipe": Side(name, blocks, True)}
    for is_timed in [False, *[True] * ROUNDS]:
        for side in sides.values():
            gc.collect()
            side.step(is_timed)
    medians = {key: 1e3 * statistics.median(side.times) for key, side in sides.items()}
    return {"schedule": name, "blocks": blocks, **medians, "ratio": medians["zbpipe"] / medians["torch"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 16, 64], help="blocks per stage")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        rows = [measure(name, blocks) for name in SCHEDULES for blocks in given.blocks]
        dist.destroy_process_group()
    cells = [
        [row["schedule"], str(row["blocks"]), f"{row['torch']:.1f}", f"{row['zbpipe']:.1f}", f"{row['ratio']:.2f}x"]
        for row in rows
    ]
    print(table(["schedule", "blocks per stage", "torch ms", "zbpipe ms", "zbpipe to torch"], cells))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
