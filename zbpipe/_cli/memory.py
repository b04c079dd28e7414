"""python -m zbpipe memory script.py ...: the memory of one step of a training script, phase by phase.

What a step is and how its end is seen is as for `python -m zbpipe leaks`. The phases of a pipeline schedule's step are
those of its stages; of any other step they are seen from outside, by where backwards and optimizers begin and end.
"""

import argparse
import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zbpipe import memory
from zbpipe._cli import memory_report, ranks
from zbpipe._cli.arguments import add_script, natural, refuse_files, refuse_script, refuse_without_matplotlib, run_given
from zbpipe._cli.progress import Progress
from zbpipe._cli.steps import KINDS, OF_SCHEDULE, Steps
from zbpipe._torch.pipelining import stages_of
from zbpipe._version import __version__
from zbpipe.memory._out_of_memory import bytes_of_tensors

DESCRIPTION = """\
Run a training script up to the end of one step that is recorded, and print its
peak and the bytes of each phase.

The first step is warm-up: it allocates what later ones find (optimizer state,
buffers). The next one is recorded, and then the script is ended. A step is a
call of zbpipe.leaks.step() in the script; without any, a call of the step() of
a schedule of torch.distributed.pipelining; without any, an optimizer's: from
one end to the next. (A script whose optimizer steps twice before it says
zbpipe.leaks.step() is not seen to say it: give --warmup 2 then.)

Phases are forward, I, W and B of each stage of a schedule; in other scripts
forward (up to the first backward), backward, between and optimizer; and what
the script itself marks with zbpipe.memory.phase(). Bytes are those that were
handed out in the step; how much was there before it is said. Options come
before the script:

    python -m zbpipe memory train.py --lr 1e-3
    python -m zbpipe memory --out step.png --json step.json train.py
    torchrun --nproc-per-node 2 -m zbpipe memory --out step.png train.py
    python -m zbpipe memory --warmup 0 --on-out-of-memory oom train.py

Under torchrun there is one report over all ranks, and a picture per rank.
--out draws (.png, .svg, .pdf) or exports for Perfetto (.json, .json.gz), by
its ending. --on-out-of-memory leaves what lived when memory ran out, by phase
and by holder, in that folder.
"""
EPILOG = """\
exit status:
  0  a step was recorded
  2  the command line is wrong
  4  the script ended before a step could be recorded
  else the script's own: 1 if it failed
"""
SCHEMA = 3  # of --json
NO_STEP = 4  # exit status
PICTURES, EXPORTS = (".png", ".svg", ".pdf"), (".json", ".json.gz")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "--warmup", type=natural, default=1, metavar="N", help="steps before the recorded one (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw the step, or export it: see above")
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
    """Run the script, then report. Returns the exit status; the script's exceptions pass, after the report."""
    refuse_script(given)
    _refuse(given)
    steps = _OneStep(given)
    try:
        with steps.seen_from_outside():
            status = run_given(given)
    except BaseException as error:
        steps.fail(error)
        raise
    finally:
        judged = _report(steps, given)
    return status or judged


def _refuse(given: argparse.Namespace) -> None:
    """Exit if what is asked for cannot be; the script may change the working directory."""
    error = given.parser.error
    if given.device is not None:
        try:
            kind = torch.device(given.device).type
        except RuntimeError:
            kind = ""
        if kind not in ("cpu", "cuda"):
            error(f"--device {given.device}: memory can be recorded on cpu and cuda")
        if kind == "cuda" and not torch.cuda.is_available():
            error(f"--device {given.device}: torch sees no CUDA device here")
    if given.out and not given.out.name.endswith((*PICTURES, *EXPORTS)):
        error(f"--out {given.out}: its name must end in one of {', '.join((*PICTURES, *EXPORTS))}")
    if given.out and given.out.name.endswith(PICTURES):
        refuse_without_matplotlib(given, "out", ".json.gz")
    refuse_files(given, "json", "out")
    if given.on_out_of_memory is not None:
        given.on_out_of_memory = given.on_out_of_memory.absolute()


class _OneStep(Steps):
    """Sees the ends of a script's steps, and records the one after the warm-up."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.step: _Step | None = None
        self.has_failed = False
        self.progress = Progress("memory")
        super().__init__(given.warmup, 1)

    def restart(self) -> None:
        # Without warm-up the step has begun with the script, and the first end that is seen is its own.
        if self.warmup > 0 or self.step is None:
            if self.step is not None:
                self.step.close()
                self.step = None
            super().restart()

    def begin(self) -> None:
        self.progress(f"recording step {self.warmup + 1}")
        schedule = self.stepper() if self.kind == OF_SCHEDULE and self.stepper is not None else None
        self.step = _Step(self.given, schedule)

    def ended(self, is_last: bool) -> None:
        assert self.step is not None
        self.step.end()

    def fail(self, error: BaseException) -> None:
        self.has_failed = True
        if self.step is not None:
            self.step.close(error)

    @contextlib.contextmanager
    def seen_from_outside(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            # Before watched(): the step may end with an optimizer's, which is in it.
            undo.callback(register_optimizer_step_pre_hook(lambda *_: self._turn("optimizer")).remove)
            undo.callback(register_optimizer_step_post_hook(lambda *_: self._turn("between")).remove)
            undo.callback(setattr, torch.autograd, "backward", torch.autograd.backward)
            torch.autograd.backward = self._marked_backward(torch.autograd.backward)
            undo.enter_context(super().seen_from_outside())
            yield

    def _turn(self, kind: str) -> None:
        if self.step is not None:
            self.step.turn(kind)

    def _marked_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with contextlib.nullcontext() if self.step is None else self.step.backward():
                return backward(*args, **kwargs)

        return marked


class _Step:
    """The recording of one step."""

    def __init__(self, given: argparse.Namespace, schedule: Any) -> None:
        uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.device(given.device or ("cuda" if uses_cuda else "cpu"))
        self.before = bytes_of_tensors(device)
        self.recording = memory.record(device, on_out_of_memory=given.on_out_of_memory)
        self.is_whole = self.has_failed = False
        self._is_open = True
        self._thread = threading.get_ident()
        self._is_in_backward = False
        self._has_stages = schedule is not None and bool(stages_of(schedule))
        self._phase: contextlib.AbstractContextManager[None] | None = None
        self.recording.__enter__()
        if self._has_stages:
            self.recording.watch(schedule)
        else:
            self.turn("forward")

    def turn(self, kind: str, error: BaseException | None = None) -> None:
        """From now on it is another phase; among stages' own only the optimizer's. ``error`` ends the one before."""
        if not self._is_open or threading.get_ident() != self._thread:
            return
        if self._phase is not None:
            self._phase.__exit__(None if error is None else type(error), error, None)
            self._phase = None
        if not self._has_stages or kind == "optimizer":
            self._phase = self.recording.phase(kind)
            self._phase.__enter__()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """A phase, if it is the outermost on the step's thread: a reentrant checkpoint has one within."""
        if self._is_in_backward or threading.get_ident() != self._thread or self._has_stages:
            yield
            return
        self._is_in_backward = True
        self.turn("backward")
        try:
            yield
        except BaseException as error:
            self.turn("between", error)
            raise
        else:
            self.turn("between")
        finally:
            self._is_in_backward = False

    def end(self) -> None:
        """The step is over."""
        if self._is_open:
            self.is_whole = True
            self.close()

    def close(self, error: BaseException | None = None) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self.has_failed = error is not None
        raised = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        if self._phase is not None and error is not None:
            self._phase.__exit__(*raised)
        self.recording.__exit__(*raised)


def _report(steps: _OneStep, given: argparse.Namespace) -> int:
    """Print, and write what files were asked for. Returns the exit status that the step deserves."""
    step = steps.step
    if step is not None:
        step.close()
    if step is None or not (step.is_whole or step.has_failed):
        what = f"the ends of {steps.seen} steps ({KINDS[steps.kind]})" if steps.seen else "no step's end"
        text = (
            f"{what} seen, and to record one after {steps.warmup} of warm-up takes {steps.warmup + 1}. "
            "A step is a call of a pipeline schedule's step() or an optimizer's; for any other, call "
            "zbpipe.leaks.step() at its end. --warmup 0 records from the script's beginning."
        )
        _say(memory_report.without_step(text), steps.has_failed)
        return NO_STEP
    recording = step.recording
    which = f"step {steps.warmup + 1} ({KINDS[steps.kind]})" if step.is_whole else "up to where the script failed"
    if given.json:
        ranks.file_of(given.json).write_text(json.dumps(_data(steps, step, given), indent=1) + "\n")
    if given.out:
        path = _out(given.out)
        steps.progress(f"writing {path}")
        (recording.plot if path.name.endswith(PICTURES) else recording.export)(path)
    _say(memory_report.of_rank(which, recording, step.before), steps.has_failed)
    return 0 if step.is_whole else NO_STEP


def _say(report: dict[str, Any], has_failed: bool) -> None:
    """Once for all ranks, if they can be reached."""
    ranks.say_together(report, functools.partial(memory_report.text_of, world=ranks.count()), has_failed)


def _out(path: Path) -> Path:
    """The rank comes before the whole ending, .json.gz too."""
    ending = next(ending for ending in reversed((*PICTURES, *EXPORTS)) if path.name.endswith(ending))
    named = ranks.file_of(path.with_name(f"{path.name.removesuffix(ending)}.x"))
    return named.with_name(named.name.removesuffix(".x") + ending)


def _data(steps: _OneStep, step: _Step, given: argparse.Namespace) -> dict[str, Any]:
    recording = step.recording
    return {
        "schema": SCHEMA,
        "zbpipe": __version__,
        "script": [given.script, *given.args],
        "rank": ranks.rank(),
        "kind": KINDS[steps.kind],
        "warmup": steps.warmup,
        "whole": step.is_whole,
        "device": str(recording.device),
        "before": step.before,
        **{name: getattr(recording, name) for name in ("peak", "live", "allocated", "freed", "allocations")},
        "incomplete": recording.incomplete,
        "phases": [{"label": phase.label, **asdict(phase)} for phase in recording.phases],
        "held": [] if recording.incomplete else [asdict(held) for held in recording.held],
    }
