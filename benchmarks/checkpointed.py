"""Whole schedule steps of checkpointed stages: torch's own module beside the patch, with every policy for checkpoints.

Two, four and eight ranks have two stages each, of checkpointed transformer blocks. The sides take turns, each on its
own stages. A step takes as long as its slowest rank; the figures are medians of the runs, and their ratios to torch's.
The peak is that of the rank with the most, of all blocks since the step began (by zbpipe.memory.record, or by torch's
counters for a GPU), in a step that is not timed. The weights' gradients exist before each step.

    python benchmarks/checkpointed.py --ranks 2 4 8 --json checkpointed.json
    python benchmarks/checkpointed.py --ranks 1 --device cuda --blocks 4 --width 1024 --tokens 1024

There are twice as many microbatches as ranks, four with one rank. Bytes and recomputations are exact. If processes
share cores, the times show how much is computed, and not how long a rank waits.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench.memory import recorded
from bench.results import add_argument, now, spread, write
from bench.stages import Stage, transformer
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import zbpipe
from zbpipe._formatting import table

ROUNDS = 3
INTERLEAVED = "ScheduleInterleavedZeroBubble"
SCHEDULES = (INTERLEAVED, "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SIDES = {"torch": None, "keep": "keep", "recompute": "recompute", "input_pass": "input_pass"}  # policies


class Sizes(NamedTuple):
    blocks: int  # of each stage
    width: int
    tokens: int


class Side:
    """A schedule on its own stages, run on torch's module, or under the patch with a policy."""

    def __init__(self, name: str, microbatches: int, policy: str | None, sizes: Sizes, device: str) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        places = (rank, rank + ranks) if name == INTERLEAVED else (rank, 2 * ranks - 1 - rank)
        self.device = device
        self.modules = [transformer(*sizes, checkpointed=True).to(device) for _ in places]
        self.stages = [
            PipelineStage(module, place, 2 * ranks, torch.device(device))
            for module, place in zip(self.modules, places, strict=True)
        ]
        self.x = torch.ones(microbatches, sizes.tokens, sizes.width, device=device)
        self.is_first, self.is_last = 0 in places, 2 * ranks - 1 in places
        kind: Any = getattr(schedules, name)
        self.schedule = kind(self.stages, microbatches, loss_fn=nn.functional.mse_loss, scale_grads=False)
        self.policy = policy
        self.forwards = len(places) * sizes.blocks * microbatches
        self.seconds: list[float] = []
        self.peak = 0
        self.computed = 0.0

    def step(self, is_timed: bool) -> None:
        given = (self.x,) if self.is_first else ()
        target = {"target": self.x} if self.is_last else {}
        before = computed_by(self.modules)
        for stage in self.stages:
            stage.clear_runtime_states()  # torch keeps the last step's outputs, which would go within this one
        gc.collect()
        with contextlib.ExitStack() as stack:
            if self.policy is not None:
                stack.enter_context(zbpipe.patch())
                stack.enter_context(zbpipe.policy(checkpoint=self.policy))  # type: ignore[arg-type]
            dist.barrier()
            recording = None if is_timed else stack.enter_context(recorded(self.device))
            begin = now(self.device)
            self.schedule.step(*given, **target)
            took = now(self.device) - begin
        if recording is None:
            self.seconds.append(slowest(took))
        else:
            self.peak = int(slowest(recording.peak))
            self.computed = slowest((computed_by(self.modules) - before) / self.forwards - 1)


def computed_by(modules: list[Stage]) -> int:
    return sum(module.computed for module in modules)


def slowest(number: float) -> float:
    """The largest number of all ranks."""
    box = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return box.item()


def measure(name: str, microbatches: int, *given: Any) -> dict[str, Any]:
    sides = {word: Side(name, microbatches, policy, *given) for word, policy in SIDES.items()}
    for is_timed in [False, False, *[True] * ROUNDS]:  # the first step makes the gradients
        for side in sides.values():
            side.step(is_timed)
    return {
        "schedule": name,
        "ranks": dist.get_world_size(),
        "microbatches": microbatches,
        "sides": {
            word: {"seconds": side.seconds, "peak": side.peak, "computed": side.computed}
            for word, side in sides.items()
        },
    }


def run_rank(rank: int, ranks: int, folder: str, *given: Any) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # so that the collections between steps are short
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    rows = [measure(name, 2 * max(2, ranks), *given) for name in SCHEDULES]
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--device", default="cpu", help="where the stages are: cpu (default), or cuda with one rank")
    for name, size in Sizes(blocks=2, width=64, tokens=128)._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"of a stage ({size})")
    add_argument(parser)
    given = parser.parse_args()
    sizes, rows = Sizes(given.blocks, given.width, given.tokens), []
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (ranks, folder, sizes, given.device), nprocs=ranks)
            rows += json.loads(Path(folder, "rows").read_text())
    printed = []
    for row in rows:
        theirs = row["sides"]["torch"]
        for side in row["sides"].values():
            side["step"] = spread(ours / other for ours, other in zip(side["seconds"], theirs["seconds"], strict=True))
        for side in row["sides"].values():
            side["ms"] = spread(1e3 * seconds for seconds in side.pop("seconds"))
        for word, side in row["sides"].items():
            printed.append(
                [
                    row["schedule"],
                    str(row["ranks"]),
                    str(row["microbatches"]),
                    word,
                    f"{side['peak'] / 1e6:.1f}",
                    f"{side['peak'] / theirs['peak']:.2f}",
                    f"{side['computed']:.2f}",
                    f"{side['ms'].median:.0f}",
                    f"{side['step'].median:.2f}",
                ]
            )
    columns = (
        "schedule",
        "ranks",
        "microbatches",
        "side",
        "peak, MB",
        "to torch's",
        "computed again",
        "step, ms",
        "to torch's",
    )
    print(table(columns, printed))
    write(given.json, "checkpointed", {**sizes._asdict(), "rows": rows}, given.device)


if __name__ == "__main__":
    main()
