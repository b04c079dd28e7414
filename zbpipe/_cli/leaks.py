"""python -m zbpipe leaks script.py ...: what a training script leaves behind step by step, and who holds it.

The script runs as if Python had been given it. The end of each of its steps is seen from outside: a call of a pipeline
schedule's `step`, of an optimizer's, or of :func:`zbpipe.leaks.step`. During the steps that are watched the garbage
collector is off, so that what only it would free counts as growth.
"""

import argparse
import contextlib
import functools
import gc
import importlib.util
import json
import os
import runpy
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from zbpipe._torch.pipelining import has_backward
from zbpipe.leaks import Growth, _marker
from zbpipe.leaks._growth import Grown, describe, report_of

DESCRIPTION = """\
Run a training script, and show the tensors and bytes that live after each of its steps, what grew, and who holds it.

A step is a call of zbpipe.leaks.step() in the script; without any, a call of the step() of a schedule of
torch.distributed.pipelining; without any, an optimizer's. Where there are several schedules or optimizers, the first
that steps counts. The garbage collector is off while steps are watched. Options come before the script:

    python -m zbpipe leaks --steps 20 train.py --lr 1e-3
    torchrun --nproc-per-node 2 -m zbpipe leaks --error train.py      one report per rank
"""
TOO_FEW = 2  # exit status when there were too few steps to tell
ENOUGH = 4  # steps: what the first and the last one leave may be gone after the next, and one between is no growth
KINDS = ("Optimizer.step", "Schedule.step", "zbpipe.leaks.step()")  # a later one is what the script means by a step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=_steps_to_watch, metavar="N", help="watch N steps, then end the script (default: all)"
    )
    parser.add_argument(
        "--warmup", type=_natural, default=2, metavar="N", help="steps that are not watched (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers and holders to FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw who holds what grew: .png, .svg or .html")
    parser.add_argument("--error", action="store_true", help="exit with status 1 if anything grew")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    parser.set_defaults(run=run, parser=parser)


def run(given: argparse.Namespace) -> int:
    """Run the script, then report. Returns the exit status; the script's exceptions pass, after the report."""
    if not given.module and not Path(given.script).is_file():
        given.parser.error(f"there is no file {given.script}; options of the script come after its name")
    _refuse_files(given)
    steps = _Steps(given.warmup, given.steps)
    status: Any = 0
    try:
        with steps.watched():
            _run_script(given.script, given.module, given.args)
    except _EnoughSteps:
        pass
    except SystemExit as ended:
        status = ended.code
        if status is not None and not isinstance(status, int):  # as Python itself has it
            print(status, file=sys.stderr)
            status = 1
    finally:
        judged = _report(steps, given)
    return int(status or 0) or judged


def _refuse_files(given: argparse.Namespace) -> None:
    """Exit if a file that is asked for cannot be written; the script may change the working directory."""
    if given.picture and given.picture.suffix not in (".png", ".svg", ".html"):
        given.parser.error(f"--picture {given.picture}: its name must end in .png, .svg or .html")
    if given.picture and given.picture.suffix != ".html" and importlib.util.find_spec("matplotlib") is None:
        given.parser.error(f"--picture {given.picture}: only matplotlib can draw it; install that, or end it in .html")
    for option in ("json", "picture"):
        path = getattr(given, option)
        if path is None:
            continue
        if path.is_dir():
            given.parser.error(f"--{option} {path} is a folder; name a file in it")
        if not path.absolute().parent.is_dir():
            given.parser.error(f"--{option} {path}: there is no folder {path.parent}; make it first")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            given.parser.error(f"--{option} {path}: it may not be written; name another file")
        setattr(given, option, path.absolute())


def _steps_to_watch(text: str) -> int:
    if (number := _natural(text)) < ENOUGH:
        raise argparse.ArgumentTypeError(f"it must be {ENOUGH} or more to tell what grows")
    return number


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps")
    return int(text)


def _run_script(script: str, module: bool, arguments: list[str]) -> None:
    sys.argv[:] = [script, *arguments]
    if module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


class _EnoughSteps(SystemExit):
    """Ends the script: no `except Exception` stops it, and `finally` and `with` blocks run."""


class _Steps:
    """Sees the ends of a script's steps, and looks at what lives then, once the warm-up is over."""

    def __init__(self, warmup: int, steps: int | None) -> None:
        self.warmup = warmup
        self.steps = steps
        self.kind = -1
        self.stepper: weakref.ref[Any] | None = None  # the schedule or optimizer that counts
        self.inside = threading.local()
        self.lock = threading.Lock()
        self.growth: Growth | None = None
        self.restart()

    def restart(self) -> None:
        """Begin to count; what was counted before was no step."""
        if self.growth is not None:
            self.growth.close()
        self.seen = 0
        self.growth = None
        self.found: list[Grown] = []  # what grew at the last look
        self.looked_at = 0
        if self.warmup == 0:
            self.begin()

    def begin(self) -> None:
        gc.collect()
        self.growth = Growth()

    @property
    def watched_steps(self) -> int:
        return max(self.seen - self.warmup, 0)

    def look(self) -> None:
        """Look who holds what grew: a search through all that lives."""
        assert self.growth is not None
        self.looked_at = self.watched_steps
        self.found = self.growth.grown()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within, steps are seen."""
        with contextlib.ExitStack() as undo:
            handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self.end(0, optimizer))
            undo.callback(handle.remove)
            for owner in _classes_that_step():
                undo.callback(setattr, owner, "step", owner.step)
                owner.step = self._and_tell(owner.step)
            _marker._listeners.append(self._marked)
            undo.callback(_marker._listeners.remove, self._marked)
            yield

    def _marked(self) -> None:
        self.end(2, None)

    def _and_tell(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def step_and_tell(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = not getattr(self.inside, "schedule", False)
            self.inside.schedule = True
            try:
                result = step(schedule, *args, **kwargs)
            finally:
                if outermost:
                    self.inside.schedule = False
            if outermost and has_backward(schedule):  # eval() calls step() too
                self.end(1, schedule)
            return result

        return step_and_tell

    def end(self, kind: int, stepper: Any) -> None:
        """A step of this kind has ended. Raises _EnoughSteps after the last one that is asked for."""
        with self.lock:
            if kind < self.kind:
                return
            if kind > self.kind:
                self.kind, self.stepper = kind, None
                self.restart()
            if stepper is not None:
                if self.stepper is None or self.stepper() is None:
                    self.stepper = weakref.ref(stepper)
                if self.stepper() is not stepper:
                    return
            self.seen += 1
            enough = self.steps is not None and self.seen >= self.warmup + self.steps
            if self.growth is None:
                if self.seen == self.warmup:
                    self.begin()
                return
            self.growth.step()
            # While the script's variables are there to be named; ever less often, for a search takes its time.
            if self.watched_steps >= ENOUGH and (enough or self.watched_steps >= 1.25 * self.looked_at):
                self.look()
        if enough:
            raise _EnoughSteps(0)


def _classes_that_step() -> list[Any]:
    """Schedules that have a step() of their own. Those that a script defines call one of these."""
    if not dist.is_available():
        return []
    from torch.distributed.pipelining import schedules

    return [c for c in vars(schedules).values() if isinstance(c, type) and "step" in vars(c)]


def _report(steps: _Steps, given: argparse.Namespace) -> int:
    """Print, and write what files were asked for. Returns the exit status that the steps deserve."""
    growth = steps.growth
    if growth is not None:
        steps.found = growth.still_grown(steps.found)
        if not steps.found and steps.looked_at < steps.watched_steps >= ENOUGH:
            steps.look()
        growth.close()
    if growth is None or steps.watched_steps < ENOUGH:
        what = f"{steps.seen} steps ({KINDS[steps.kind]}) were seen" if steps.seen else "no step was seen"
        _say(
            f"zbpipe leaks: {what}, and to tell what grows {steps.warmup} of warm-up and {ENOUGH} more are needed. A "
            "step is a call of a pipeline schedule's step() or an optimizer's; for any other, call zbpipe.leaks.step() "
            "at its end."
        )
        return TOO_FEW
    head = f"zbpipe leaks: {steps.watched_steps} steps ({KINDS[steps.kind]}) after {steps.warmup} of warm-up"
    grew = f"{describe(steps.found)}\n(as of step {steps.looked_at})" if steps.found else "nothing grew"
    _say(f"{head}\n{growth.table()}\n\n{grew}")
    if given.json:
        rows = zip(growth.counts, growth.bytes, strict=True)
        data = {
            "kind": KINDS[steps.kind],
            "warmup": steps.warmup,
            "steps": [{"tensors": count, "bytes": size} for count, size in rows],
            "grown": report_of(steps.found).as_dict(),
        }
        _of_rank(given.json).write_text(json.dumps(data, indent=1) + "\n")
    if given.picture and steps.found:
        report_of(steps.found).draw(_of_rank(given.picture))
    return int(bool(given.error and steps.found))


def _say(text: str) -> None:
    """Print at once, so that ranks do not interleave; each line says its rank if there are several."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        text = "\n".join(f"[rank {os.environ.get('RANK', '?')}] {line}" for line in text.split("\n"))
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _of_rank(path: Path) -> Path:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return path.with_name(f"{path.stem}.rank{os.environ.get('RANK', '?')}{path.suffix}")
    return path
