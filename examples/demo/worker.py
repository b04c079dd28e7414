"""What one rank does, from start to end: all runs, then (on rank 0) the report."""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store
from tqdm import tqdm

import zbpipe
from demo import plot, report
from demo.config import SCHEDULES, SIDES, Config
from demo.model import build_stages
from demo.text import load_text
from demo.train import Gradients, Run, Step, Trainer, difference, ordinary_gradients, train

RUN_TIMEOUT = timedelta(seconds=60)
"""How long a rank waits for another inside a run before the run counts as failed."""

REPORT_TIMEOUT = timedelta(minutes=10)
"""How long the ranks wait for each other between runs."""


def work(rank: int, store: Store, config: Config) -> int:
    """Trains with every schedule on every side. Returns the exit status of the whole demo, the same on all ranks.

    ``store`` connects the ranks. Each run has its own process group, so that a failed run does not disturb the next.
    """
    torch.set_num_threads(1)
    if zbpipe.is_patched():  # by ZBPIPE_PATCH=1; one side must be torch's own
        zbpipe.unpatch()
    text = load_text()
    models = build_stages(config)
    ordinary = ordinary_gradients(models, text, config)

    results: list[report.Result] = []
    for name in config.schedules:
        torch_gradients: Gradients | None = None
        for side in SIDES:
            run = Run(name, side)
            with zbpipe.patch() if side == "zbpipe" else contextlib.nullcontext():
                seen = _one_run(rank, store, config, run, models, text)
            if seen is not None:
                run.from_ordinary = difference(seen, ordinary)
                if side == "torch":
                    torch_gradients = seen
                elif torch_gradients is not None:
                    run.from_torch = difference(seen, torch_gradients)
            everyone = _gather(rank, store, config, run)
            if everyone is not None:
                results.append(report.combine(everyone))

    if rank == 0:
        status = report.show(results, config)
        if config.json is not None:
            config.json.write_text(json.dumps(report.as_dict(results, config), indent=1) + "\n")
        plot.draw(results, config)
        print(f"picture: {config.out}", flush=True)
        store.set("status", str(status))
    store.wait(["status"], REPORT_TIMEOUT)
    status = int(store.get("status"))
    store.set(f"done/{rank}", "")
    if rank == 0:  # under torchrun this process may hold the store, and must end last
        store.wait([f"done/{other}" for other in range(config.ranks)], REPORT_TIMEOUT)
    return status


def _one_run(
    rank: int, store: Store, config: Config, run: Run, models: Sequence[nn.Sequential], text: torch.Tensor
) -> Gradients | None:
    """Trains once and fills ``run``. Returns the gradients of the first step, or None if that failed.

    An exception becomes ``run.error`` and destroys the process group, which ends the other ranks' waits.
    """
    kind = SCHEDULES[run.schedule]
    seen: list[Gradients] = []
    bar = tqdm(total=config.steps, desc=f"{kind.label:<24}{run.side:<7}", unit="step", disable=rank != 0)

    def on_step(step: Step) -> None:
        bar.set_postfix_str(f"loss {step.loss:.3f}", refresh=False)
        bar.update()

    try:
        dist.init_process_group(
            "nccl" if config.device == "cuda" else "gloo",
            store=PrefixStore(f"run/{run.schedule}/{run.side}", store),
            rank=rank,
            world_size=config.ranks,
            timeout=RUN_TIMEOUT,
        )
        train(Trainer(rank, kind, models, config), text, run, seen.append, on_step)
    except Exception as error:  # any error is a result for the table
        run.error = _reason(error)
        run.failed_at = time.time()
    finally:
        bar.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return seen[0] if seen else None


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause: torch wraps errors in long ones that print every shape."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"


def _gather(rank: int, store: Store, config: Config, run: Run) -> list[Run] | None:
    """Brings all ranks' ``run`` to rank 0, in the order of ranks; the others get None."""
    key = f"result/{run.schedule}/{run.side}"
    store.set(f"{key}/{rank}", pickle.dumps(run))  # type: ignore[arg-type]  # torch takes bytes too
    if rank != 0:
        return None
    keys = [f"{key}/{other}" for other in range(config.ranks)]
    store.wait(keys, REPORT_TIMEOUT)
    return [pickle.loads(store.get(k)) for k in keys]
