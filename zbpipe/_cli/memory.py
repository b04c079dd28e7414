"""python -m zbpipe memory script.py ...: the memory of one step of a training script, phase by phase.

What a step is and how its end is seen is as for `python -m zbpipe leaks`. The phases of a pipeline schedule's step are
those of its stages; of any other step they are seen from outside, by where backwards and optimizers begin and end.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zbpipe import memory
from zbpipe._cli import ranks
from zbpipe._cli.arguments import add_script, natural, refuse_files, refuse_script, run_given
from zbpipe._cli.steps import KINDS, OF_SCHEDULE, Steps
from zbpipe._formatting import Unit, in_words, table
from zbpipe._torch.pipelining import stages_of
from zbpipe._version import __version__
from zbpipe.memory._export import phase_table, short
from zbpipe.memory._out_of_memory import bytes_of_tensors

DESCRIPTION = """\
Run a training script up to the end of one step that is recorded, and print its
peak and the bytes of each phase.

The first step is warm-up: it allocates what later ones find (optimizer state,
buffers). The next one is recorded, and then the script is ended. A step is a
call of zbpipe.leaks.step() in the script; without any, a call of the step() of
a schedule of torch.distributed.pipelining; without any, an optimizer's. (If an
optimizer steps twice before the script says zbpipe.leaks.step(): --warmup 2.)

Phases are forward, I, W and B of each stage of a schedule; in other scripts
forward (up to the first backward), backward, between and optimizer; and what
the script itself marks with zbpipe.memory.phase(). Options come before the
script:

    python -m zbpipe memory train.py --lr 1e-3
    python -m zbpipe memory --out step.png --json step.json train.py
    torchrun --nproc-per-node 2 -m zbpipe memory --out step.png train.py
    python -m zbpipe memory --warmup 0 --on-out-of-memory oom train.py

Under torchrun there is one report over all ranks, and a picture per rank.

Exit status: the script's own if that is not 0; 4 if it ended before a step
could be recorded; 2 for a wrong command line; else 0.
"""
SCHEMA = 3  # of --json
NO_STEP = 4  # exit status
PICTURES, EXPORTS = (".png", ".svg", ".pdf"), (".json", ".json.gz")
SHOWN = 16  # ranks at most in a table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--warmup", type=natural, default=1, metavar="N", help="steps before the recorded one (default: %(default)s)"
    )
    out = f"draw the step ({', '.join(PICTURES)}), or export it for Perfetto ({', '.join(EXPORTS)})"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    parser.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:1 (default: cuda once the script uses it, else cpu)"
    )
    parser.add_argument(
        "--on-out-of-memory", type=Path, metavar="FOLDER", help="if the recorded step runs out of memory, say there why"
    )
    add_script(parser)
    parser.set_defaults(run=run, parser=parser)


def run(given: argparse.Namespace) -> int:
    refuse_script(given)
    _refuse(given)
    return run_given(given, _OneStep(given), _report)


def _refuse(given: argparse.Namespace) -> None:
    """Exit if what is asked for cannot be; the script may change the working directory."""
    error = given.parser.error
    if given.device is not None:
        kind = ""
        with contextlib.suppress(RuntimeError):  # it may be the name of no device
            kind = torch.device(given.device).type
        if kind not in ("cpu", "cuda"):
            error(f"--device {given.device}: memory can be recorded on cpu and cuda")
        if kind == "cuda" and not torch.cuda.is_available():
            error(f"--device {given.device}: torch sees no CUDA device here")
    if given.out and not given.out.name.endswith((*PICTURES, *EXPORTS)):
        error(f"--out {given.out}: its name must end in one of {', '.join((*PICTURES, *EXPORTS))}")
    if given.out and given.out.name.endswith(PICTURES) and importlib.util.find_spec("matplotlib") is None:
        error(f"--out {given.out}: only matplotlib can draw it; install that, or end it in .json.gz")
    refuse_files(given, "json", "out")
    if given.on_out_of_memory is not None:
        given.on_out_of_memory = given.on_out_of_memory.absolute()


class _OneStep(Steps):
    """Sees the ends of a script's steps, and records the one after the warm-up."""

    recording: memory.Recording | None = None
    is_whole = has_failed = _is_open = _is_in_backward = _has_stages = False
    _phase: Any = None  # of the recording, that runs
    _thread: int | None = None  # on which the recording began

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        super().__init__(given.warmup, 1)

    def restart(self) -> None:
        # Without warm-up the step has begun with the script, and the first end that is seen is its own.
        if self.warmup > 0 or self.recording is None:
            self.close()
            self.recording = None
            super().restart()

    def begin(self) -> None:
        schedule = self.stepper() if self.kind == OF_SCHEDULE and self.stepper is not None else None
        self._has_stages = schedule is not None and bool(stages_of(schedule))
        uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.device(self.given.device or ("cuda" if uses_cuda else "cpu"))
        self.before = bytes_of_tensors(device)
        self.recording = memory.record(device, on_out_of_memory=self.given.on_out_of_memory)
        self.recording.__enter__()
        self._is_open, self._thread = True, threading.get_ident()
        if self._has_stages:
            self.recording.watch(schedule)
        self._turn("forward")

    def ended(self, is_last: bool) -> None:
        self.is_whole = True
        self.close()

    def fail(self, error: BaseException) -> None:
        self.has_failed = True
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        if self.recording is not None and self._is_open:
            if self._phase is not None and error is not None:
                self._phase.__exit__(type(error), error, None)
            self._is_open, self._phase = False, None
            self.recording.__exit__(None if error is None else type(error), error, None)

    @contextlib.contextmanager
    def seen_from_outside(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            # Before the ends of steps: one may end with an optimizer's, which is in it.
            undo.callback(register_optimizer_step_pre_hook(lambda *_: self._turn("optimizer")).remove)
            undo.callback(register_optimizer_step_post_hook(lambda *_: self._turn("between")).remove)
            undo.callback(setattr, torch.autograd, "backward", torch.autograd.backward)
            torch.autograd.backward = self._marked_backward(torch.autograd.backward)
            undo.enter_context(super().seen_from_outside())
            yield

    def _turn(self, kind: str, error: BaseException | None = None) -> None:
        """From now on it is another phase; among stages' own only the optimizer's. ``error`` ends the one before."""
        if self.recording is None or not self._is_open or threading.get_ident() != self._thread:
            return
        if self._phase is not None:
            self._phase.__exit__(None, error, None)
            self._phase = None
        if not self._has_stages or kind == "optimizer":
            self._phase = self.recording.phase(kind)
            self._phase.__enter__()

    def _marked_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def marked(*args: Any, **kwargs: Any) -> Any:
            # One within another is no phase: a reentrant checkpoint's.
            if self._is_in_backward or self._has_stages or threading.get_ident() != self._thread:
                return backward(*args, **kwargs)
            self._is_in_backward = True
            self._turn("backward")
            try:
                result = backward(*args, **kwargs)
            except BaseException as error:
                self._turn("between", error)
                raise
            finally:
                self._is_in_backward = False
            self._turn("between")
            return result

        return marked


def _report(steps: _OneStep, given: argparse.Namespace) -> int:
    """Print, and write what files were asked for. Returns the exit status that the step deserves."""
    recording = steps.recording
    steps.close()
    if recording is None or not (steps.is_whole or steps.has_failed):
        what = f"the ends of {steps.seen} steps ({KINDS[steps.kind]})" if steps.seen else "no step's end"
        head = (
            f"{what} seen, and to record one after {steps.warmup} of warm-up takes {steps.warmup + 1}. "
            "A step is a call of a pipeline schedule's step() or an optimizer's; for any other, call "
            "zbpipe.leaks.step() at its end. --warmup 0 records from the script's beginning."
        )
        _say({"head": head}, steps)
        return NO_STEP
    which = f"step {steps.warmup + 1} ({KINDS[steps.kind]})" if steps.is_whole else "up to where the script failed"
    if given.json:
        ranks.file_of(given.json).write_text(json.dumps(_data(steps, recording, given), indent=1) + "\n")
    if given.out:
        (recording.plot if given.out.name.endswith(PICTURES) else recording.export)(ranks.file_of(given.out))
    _say(of_rank(which, recording, steps.before), steps)
    return 0 if steps.is_whole else NO_STEP


def _say(report: dict[str, Any], steps: _OneStep) -> None:
    ranks.say_together(report, functools.partial(text_of, world=ranks.count()), steps.has_failed)


def _data(steps: _OneStep, recording: memory.Recording, given: argparse.Namespace) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "zbpipe": __version__,
        "script": [given.script, *given.args],
        "rank": ranks.rank(),
        "kind": KINDS[steps.kind],
        "warmup": steps.warmup,
        "whole": steps.is_whole,
        "device": str(recording.device),
        "before": steps.before,
        **_numbers(recording),
        "phases": [{"label": phase.label, **asdict(phase)} for phase in recording.phases],
        "held": [] if recording.incomplete else [asdict(held) for held in recording.held],
    }


def _numbers(recording: memory.Recording) -> dict[str, Any]:
    names = ("peak", "live", "allocated", "freed", "allocations", "incomplete")
    return {name: getattr(recording, name) for name in names}


def of_rank(which: str, recording: memory.Recording, before: int) -> dict[str, Any]:
    """For json.dumps: ``which`` step it was, its numbers in bytes, and its phases as a table."""
    phases = [p for p in recording.phases if p.kind != "between" or p.allocations or p.frees]
    highest = (short(p.label, 31) for p in phases if p.peak == recording.peak)
    return {
        "head": f"{which} on {recording.device}",
        "before": before,
        "highest": next(highest, "none of its phases"),
        **_numbers(recording),
        "phases": phase_table(phases) if phases else "",
    }


def text_of(reports: dict[int, dict[str, Any]], missing: list[int], world: int) -> str:
    """The reports of some of `world` ranks; of those that are missing it says so."""
    measured = [(rank, report) for rank, report in reports.items() if "peak" in report]
    measured.sort(key=lambda entry: (-entry[1]["before"] - entry[1]["peak"], entry[0]))
    if world == 1:
        (report,) = reports.values()
        lines = [f"zbpipe memory: {report['head']}", *(_lines_of(report) if measured else [])]
    else:
        lines = ranks.heading("memory", {rank: report["head"] for rank, report in reports.items()}, world)
        lines += [ranks.told_by_themselves(missing)] if missing else []
        lines += ["", *_lines_of_ranks(measured)] if measured else []
    if measured and measured[0][1]["phases"]:
        whose = f"rank {measured[0][0]}{', which has most in use at once' * (len(measured) > 1)}, by phase:"
        lines += ["", *([whose] if world > 1 else []), measured[0][1]["phases"]]
    return "\n".join(lines)


def _lines_of(report: dict[str, Any]) -> list[str]:
    peak, before, allocated, live = (in_words(report[name]) for name in ("peak", "before", "allocated", "live"))
    return [
        f"peak {peak} in {report['highest']}",
        f"above the {before} that were there before",
        f"{allocated} in {report['allocations']} allocations, of which {live} live at its end",
        *([f"incomplete: {report['incomplete']}"] if report["incomplete"] else []),
    ]


def _lines_of_ranks(measured: list[tuple[int, dict[str, Any]]]) -> list[str]:
    """Of very many ranks those that have most in use."""
    columns = ("peak", "before", "live")
    unit = Unit.of(max(report[name] for _, report in measured for name in columns))
    rows = [
        (str(rank), report["highest"], *(unit(report[name]) for name in columns), str(report["allocations"]))
        for rank, report in measured[:SHOWN]
    ]
    header = ("rank", "peak in", *(f"{name}, {unit.name}" for name in columns), "blocks")
    less = [f"and {len(measured) - SHOWN} ranks with less in use"] if len(measured) > SHOWN else []
    incomplete = [f"incomplete on rank {r}: {why}" for r, report in sorted(measured) if (why := report["incomplete"])]
    return [table(header, rows, left=2), *less, *incomplete]
