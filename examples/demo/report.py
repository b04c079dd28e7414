"""The tables, and the verdict on zbpipe."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from demo.config import SCHEDULES, Config
from demo.measure import StepMemory
from demo.train import Difference, Run, Step

GRADIENT_TOLERANCE = 1e-5
"""Largest relative difference of zbpipe's gradients: float32 sums in another order stay well below it."""

LOSS_TOLERANCE = 1e-3
"""Largest difference of losses, nats per byte: training carries differences of rounding on from step to step."""

DEFINITIONS = """\
step time    forward, I, W and the optimizer, on the slowest rank; median over
             the steps
CPU time     of the same, all ranks and threads together: depends less on what
             else the machine does
gradients    of the first step, on the same weights: the largest difference in
             one parameter over that parameter's largest gradient
memory       counted from the allocator's events in one extra step, exact
             bytes, on the rank with the most: storages allocated since the
             step began (gradients, not weights), and tensors in receive
             buffers when it began, until they are freed"""


@dataclass
class Result:
    """One run, over all ranks. ``memory`` has an item per rank; ``error`` is the first one in time."""

    schedule: str
    side: str
    steps: list[Step] = field(default_factory=list)
    from_ordinary: Difference | None = None
    from_torch: Difference | None = None
    memory: list[StepMemory] = field(default_factory=list)
    error: str | None = None

    @property
    def losses(self) -> list[float]:
        """Nats per byte, an item per step."""
        return [step.loss for step in self.steps]

    @property
    def seconds(self) -> float:
        """Wall time of a step: the median."""
        return statistics.median(step.seconds for step in self.steps)

    @property
    def cpu_seconds(self) -> float:
        """CPU time of a step, all ranks together: the median."""
        return statistics.median(step.cpu_seconds for step in self.steps)

    @property
    def peak(self) -> int:
        """Bytes, on the rank with the most."""
        return max(memory.peak for memory in self.memory)


def combine(ranks: Sequence[Run]) -> Result:
    """Joins what the ranks know about one run."""
    first = ranks[0]
    result = Result(first.schedule, first.side, first.steps)
    failed = [run for run in ranks if run.error is not None]
    if failed:
        earliest = min(failed, key=lambda run: run.failed_at)
        result.error = f"rank {ranks.index(earliest)}: {earliest.error}"
    result.from_ordinary = _worst([run.from_ordinary for run in ranks])
    result.from_torch = _worst([run.from_torch for run in ranks])
    result.memory = [run.memory for run in ranks if run.memory is not None]
    return result


def _worst(differences: Sequence[Difference | None]) -> Difference | None:
    known = [d for d in differences if d is not None]
    if len(known) < len(differences):
        return None
    return Difference(max(d.absolute for d in known), max(d.relative for d in known))


def loss_difference(ours: Result, theirs: Result) -> float:
    """The largest difference of any step's loss, nats per byte."""
    apart = [abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True)]
    return math.inf if any(math.isnan(a) for a in apart) else max(apart)


def pairs(results: Sequence[Result]) -> list[tuple[Result, Result]]:
    """The results as ``(torch, zbpipe)``, one pair per schedule."""
    by_key = {(r.schedule, r.side): r for r in results}
    return [(by_key[name, "torch"], by_key[name, "zbpipe"]) for name in dict.fromkeys(r.schedule for r in results)]


def all_faults(results: Sequence[Result]) -> list[str]:
    """The faults of zbpipe's side, a sentence each."""
    return [fault for pair in pairs(results) for fault in find_faults(*pair)]


def show(results: Sequence[Result], config: Config) -> int:
    """Prints all tables and the verdict. Returns the exit status: 0 if zbpipe is right everywhere, else 1."""
    where = f"{config.ranks} processes, {config.num_stages} stages, {config.microbatches} microbatches"
    print(f"\ntorch {torch.__version__}, {config.device}: {where},")
    print(f"{config.blocks_per_stage} blocks of width {config.width} per stage, ", end="")
    print(f"{config.batch_size} x {config.context} bytes of text per step,")
    print(f"a head of width {config.head_width} on the last stage")
    for pair in pairs(results):
        print("\n" + table(*pair))
    print("\n" + in_short(results))
    print("\n" + DEFINITIONS)
    faults = all_faults(results)
    print()
    for fault in faults:
        print(f"WRONG  {fault}")
    if not faults:
        print(
            f"RIGHT  zbpipe's gradients within {GRADIENT_TOLERANCE:g} (relative) of torch's and of\n"
            f"       an ordinary backward, losses within {LOSS_TOLERANCE:g}"
        )
    return 1 if faults else 0


def as_dict(results: Sequence[Result], config: Config) -> dict[str, Any]:
    """The figures as plain data.

    ``runs`` has an item per schedule and side: ``losses`` (nats per byte, per step), ``seconds`` and ``cpu_seconds`` (a
    step's median), ``peak`` (bytes, of the rank with the most), ``from_ordinary`` and ``from_torch`` (the largest
    relative difference of a gradient, null where it was not compared or is not finite) and ``error``. A value that a
    failed run does not have is null. ``wrong`` lists the faults of zbpipe's side, a sentence each. ``schema`` is 4:
    another number means other keys.
    """
    return {
        "benchmark": "demo",
        "schema": 4,
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__.partition("+")[0],
        "device": config.device,
        "ranks": config.ranks,
        "stages": config.num_stages,
        "microbatches": config.microbatches,
        "runs": [_run(result) for result in results],
        "wrong": all_faults(results),
    }


def _run(result: Result) -> dict[str, Any]:
    whole = result.error is None
    return {
        "schedule": SCHEDULES[result.schedule].label,
        "side": result.side,
        "losses": result.losses,
        "seconds": result.seconds if whole else None,
        "cpu_seconds": result.cpu_seconds if whole else None,
        "peak": result.peak if whole else None,
        "from_ordinary": _relative(result.from_ordinary),
        "from_torch": _relative(result.from_torch),
        "error": result.error,
    }


def _relative(difference: Difference | None) -> float | None:
    return difference.relative if difference is not None and math.isfinite(difference.relative) else None


def find_faults(theirs: Result, ours: Result) -> list[str]:
    """The faults of zbpipe's side of one schedule, a sentence each. torch's own failures are no faults."""
    label = SCHEDULES[ours.schedule].label
    if ours.error is not None:
        return [f"{label}: zbpipe failed: {ours.error}"]
    faults = []
    for name, apart in (("torch's", ours.from_torch), ("an ordinary backward's", ours.from_ordinary)):
        if apart is not None and not apart.relative <= GRADIENT_TOLERANCE:
            faults.append(f"{label}: zbpipe's gradients are {apart.relative:.1e} (relative) from {name}")
    if theirs.error is None and not loss_difference(ours, theirs) <= LOSS_TOLERANCE:
        faults.append(f"{label}: zbpipe's losses are {loss_difference(ours, theirs):.1e} from torch's")
    if not ours.losses[-1] < ours.losses[0]:
        faults.append(f"{label}: the loss did not fall")
    return faults


def table(theirs: Result, ours: Result) -> str:
    """One schedule, torch's own module beside zbpipe, as lines of text."""
    kind = SCHEDULES[ours.schedule]
    both = theirs.error is None and ours.error is None

    def row(name: str, cell: Callable[[Result], str], number: Callable[[Result], float] | None = None) -> list[str]:
        cells = [cell(r) if r.error is None else "failed" for r in (theirs, ours)]
        ratio = f"{number(ours) / number(theirs):.2f}x" if number is not None and both and number(theirs) else ""
        return [name, *cells, ratio]

    rows = [
        ["", "torch", "zbpipe", "ratio"],
        row("loss of the first step, nats per byte", lambda r: f"{r.losses[0]:.4f}"),
        row("loss of the last step", lambda r: f"{r.losses[-1]:.4f}"),
        ["losses: largest difference", "", f"{loss_difference(ours, theirs):.1e}" if both else "-", ""],
        ["gradients: from torch's own", "", _apart(ours.from_torch), ""],
        row("gradients: from an ordinary backward", lambda r: _apart(r.from_ordinary)),
        row("step time", lambda r: f"{r.seconds * 1e3:.0f} ms", lambda r: r.seconds),
        row("CPU time of a step, all ranks", lambda r: f"{r.cpu_seconds * 1e3:.0f} ms", lambda r: r.cpu_seconds),
        row("memory, peak of the step", lambda r: _megabytes(r.peak), lambda r: r.peak),
    ]
    lines = [f"{name:<38}{torch_cell:>10}{zbpipe_cell:>12}{ratio:>8}" for name, torch_cell, zbpipe_cell, ratio in rows]
    lines = [f"{kind.label} ({kind.class_name})", lines[0], "-" * len(lines[0]), *lines[1:]]
    lines += [f"{r.side} failed: {r.error}" for r in (theirs, ours) if r.error is not None]
    return "\n".join(line.rstrip() for line in lines)


def in_short(results: Sequence[Result]) -> str:
    """A row per schedule: step times and peaks, torch's own module beside zbpipe, as lines of text."""

    def cells(couple: Sequence[Result], number: Callable[[Result], float], digits: int) -> str:
        of = [f"{number(r):.{digits}f}" if r.error is None else "failed" for r in couple]
        return f"{of[0]:>10}{of[1]:>10}"

    lines = [f"{'in short':<26}{'step time, ms':>20}{'peak, MB':>20}", f"{'':<26}" + f"{'torch':>10}{'zbpipe':>10}" * 2]
    for couple in pairs(results):
        times, peaks = cells(couple, lambda r: r.seconds * 1e3, 0), cells(couple, lambda r: r.peak / 1e6, 1)
        lines.append(f"{SCHEDULES[couple[0].schedule].label:<26}{times}{peaks}")
    return "\n".join([*lines[:2], "-" * len(lines[1]), *lines[2:]])


def _apart(difference: Difference | None) -> str:
    return "-" if difference is None else f"{difference.relative:.1e}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
