"""How long is a step? A model of it, from F, I and W of one stage, beside a measured step of torch's schedules.

    python benchmarks/bubbles.py --ranks 2 --json bubbles.json

Each rank has two stages of transformer blocks, and a core. F, I and W are medians of the stage alone, on all ranks at
once. A step is measured under zbpipe.patch(): the median of the slowest rank's times. In the model sends take no time.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench.results import add_argument, now, spread, write
from bench.stages import Stage, transformer
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import zbpipe
from zbpipe._formatting import table

BLOCKS, WIDTH, TOKENS, ROUNDS, IN_FLIGHT = 2, 256, 256, 7, 4
SCHEDULES = {  # which stages a rank has
    "ScheduleInterleaved1F1B": "loop",
    "ScheduleInterleavedZeroBubble": "loop",
    "ScheduleZBVZeroBubble": "v",
}


def bubble(schedule: str, forward: float, input_: float, weight: float, ranks: int) -> float:
    """The time that a rank waits in a step, if each stage takes as long; two stages per rank."""
    each = {
        "ScheduleInterleaved1F1B": forward + input_ + weight,
        "ScheduleInterleavedZeroBubble": max(forward, input_, forward + input_ - weight),
        "ScheduleZBVZeroBubble": max(forward, input_, 2 * (input_ - weight)),
    }
    return (ranks - 1) * each[schedule]


def model(schedule: str, costs: tuple[float, float, float], ranks: int, microbatches: int) -> float:
    """The length of a step, in the unit of its costs."""
    return 2 * microbatches * sum(costs) + bubble(schedule, *costs, ranks)


def costs_of(stage: Stage) -> tuple[float, float, float]:
    """Milliseconds of F, I and W, with as many microbatches in flight as a schedule has."""
    grad, rows = torch.ones(stage.shape), []
    for _ in range(2 + ROUNDS):
        inputs = [torch.randn(stage.shape, requires_grad=True) for _ in range(IN_FLIGHT)]
        times = [now("cpu")]
        outs = [stage(x) for x in inputs]
        times.append(now("cpu"))
        waiting = [zbpipe.stage_backward_input([outs.pop(0)], [grad], [x], None)[1] for x in inputs]
        times.append(now("cpu"))
        while waiting:
            zbpipe.stage_backward_weight(None, waiting.pop(0))
        times.append(now("cpu"))
        rows.append([1e3 * (end - begin) / IN_FLIGHT for begin, end in itertools.pairwise(times)])
    forward, input_, weight = (statistics.median(column) for column in zip(*rows[2:], strict=True))
    return forward, input_, weight


def steps_of(name: str, microbatches: int, checkpointed: bool) -> list[float]:
    """Milliseconds of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    places = (rank, rank + ranks if SCHEDULES[name] == "loop" else 2 * ranks - 1 - rank)
    stages = [
        PipelineStage(transformer(BLOCKS, WIDTH, TOKENS, checkpointed=checkpointed), i, 2 * ranks, torch.device("cpu"))
        for i in places
    ]
    kind: Any = getattr(schedules, name)
    schedule = kind(stages, microbatches, loss_fn=nn.functional.mse_loss, scale_grads=False)
    x = torch.ones(microbatches, TOKENS, WIDTH)
    given = (x,) if rank == 0 else ()
    target = {"target": x} if 2 * ranks - 1 in places else {}
    taken = []
    with zbpipe.patch():
        for _ in range(2 + ROUNDS):
            for stage in stages:
                stage.clear_runtime_states()
            gc.collect()
            dist.barrier()
            begin = now("cpu")
            schedule.step(*given, **target)
            taken.append(1e3 * (now("cpu") - begin))
    return taken[2:]


def run_rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    rows, microbatches = [], 4 * ranks
    for checkpointed in (False, True):
        dist.barrier()
        box = torch.tensor(costs_of(transformer(BLOCKS, WIDTH, TOKENS, checkpointed=checkpointed)))
        dist.all_reduce(box)
        forward, input_, weight = (box / ranks).tolist()
        for name in SCHEDULES:
            taken = torch.tensor(steps_of(name, microbatches, checkpointed))
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            modelled = model(name, (forward, input_, weight), ranks, microbatches)
            rows.append(
                {
                    "schedule": name,
                    "checkpointed": checkpointed,
                    "ranks": ranks,
                    "microbatches": microbatches,
                    "costs": [forward, input_, weight],
                    "model": modelled,
                    "waits": bubble(name, forward, input_, weight, ranks) / modelled,
                    "measured": spread(taken.tolist())._asdict(),
                }
            )
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def waits_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The modelled share of a step in which a rank waits, of more ranks with four microbatches for each."""
    found = []
    for row in rows:
        of = {}
        for ranks in (2, 4, 8, 16):
            costs = row["costs"]
            of[ranks] = bubble(row["schedule"], *costs, ranks) / model(row["schedule"], costs, ranks, 4 * ranks)
        found.append({"schedule": row["schedule"], "checkpointed": row["checkpointed"], "ranks": of})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=2, help="(2); each needs a core of its own")
    add_argument(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (given.ranks, folder), nprocs=given.ranks)
        rows = json.loads(Path(folder, "rows").read_text())
    printed = [
        [
            row["schedule"],
            "checkpointed" if row["checkpointed"] else "",
            " : ".join(f"{cost:.1f}" for cost in row["costs"]),
            f"{row['waits']:.1%}",
            f"{row['model']:.0f}",
            f"{row['measured']['median']:.0f}",
            f"{row['measured']['median'] / row['model']:.2f}x",
        ]
        for row in rows
    ]
    print(table(["schedule", "", "F : I : W, ms", "waits", "model, ms", "measured", ""], printed))
    write(given.json, "bubbles", {"rows": rows, "waits": waits_of(rows)})


if __name__ == "__main__":
    main()
