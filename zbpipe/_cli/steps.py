"""The ends of a script's steps, seen from outside."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from zbpipe._torch.pipelining import has_backward
from zbpipe.leaks import _listeners

# A later one is what the script means by a step.
KINDS = ("Optimizer.step", "Schedule.step", "zbpipe.leaks.step()", "--step-at")
OF_OPTIMIZER, OF_SCHEDULE, OF_MARKER, OF_LINE = range(4)  # places in KINDS


class Steps:
    """Counts a script's steps, and has :meth:`begin` called when the warm-up is over, :meth:`ended` after each later
    step. What these do is a subclass's. ``line`` of a file is one where each visit ends a step."""

    def __init__(self, warmup: int, steps: int | None, line: tuple[str, int] | None = None) -> None:
        self.warmup = warmup
        self.steps = steps
        self.kind = -1
        self.stepper: weakref.ref[Any] | None = None  # the schedule or optimizer that counts
        self.steppers = 0  # that have stepped
        self._times: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # since the one's that counts
        self._line = line
        self._is_file: dict[str, bool] = {}  # by the names of files, whether it is the line's
        self._is_over = False
        self._process = os.getpid()
        self._inside = threading.local()
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """Begin to count; what was counted before was no step."""
        self.seen = 0
        if self.warmup == 0:
            self.begin()

    def begin(self) -> None:
        raise NotImplementedError

    def ended(self, is_last: bool) -> None:
        raise NotImplementedError

    @property
    def watched(self) -> int:
        """Steps since the warm-up."""
        return max(self.seen - self.warmup, 0)

    @contextlib.contextmanager
    def seen_from_outside(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._end(OF_OPTIMIZER, optimizer))
            undo.callback(hook.remove)
            for owner in _classes_that_step():
                undo.callback(setattr, owner, "step", owner.step)
                owner.step = self._and_tell(owner.step)
            marked = functools.partial(self._end, OF_MARKER, None)
            _listeners.append(marked)
            undo.callback(_listeners.remove, marked)
            for module in (sys, threading) if self._line is not None else ():
                undo.callback(module.settrace, module.gettrace())
                module.settrace(self._at_call)
            yield

    def _at_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        """For sys.settrace: only the lines of the file are looked at."""
        name = frame.f_code.co_filename
        if name not in self._is_file:
            self._is_file[name] = self._line is not None and os.path.realpath(name) == self._line[0]
        return self._at_line if self._is_file[name] else None

    def _at_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        """A step ends whenever the line is about to run."""
        if event == "line" and self._line is not None and frame.f_lineno == self._line[1]:
            self._end(OF_LINE, None)
        return self._at_line

    def _and_tell(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def step_and_tell(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = not getattr(self._inside, "schedule", False)
            self._inside.schedule = True
            try:
                result = step(schedule, *args, **kwargs)
            finally:
                if outermost:
                    self._inside.schedule = False
            if outermost and has_backward(schedule):  # eval() calls step() too
                self._end(OF_SCHEDULE, schedule)
            return result

        return step_and_tell

    def _end(self, kind: int, stepper: Any) -> None:
        """A step of this kind has ended. Ends the script after the last one that is asked for, once: no ``except
        Exception`` stops that, and ``finally`` and ``with`` blocks run."""
        with self._lock:
            if kind < self.kind or self._is_over or os.getpid() != self._process:
                return
            if kind > self.kind:
                self.kind, self.stepper = kind, None
                self.restart()
            if stepper is not None and not self._counts(stepper):
                return
            self.seen += 1
            if self.seen <= self.warmup:
                if self.seen == self.warmup:
                    self.begin()
                return
            self._is_over = self.steps is not None and self.seen >= self.warmup + self.steps
            self.ended(self._is_over)
        if self._is_over:
            raise SystemExit(0)

    def _counts(self, stepper: Any) -> bool:
        """Whether its steps count: those of the first, until that is gone or another has stepped twice meanwhile."""
        self.steppers += stepper not in self._times
        self._times[stepper] = self._times.get(stepper, 0) + 1
        if self.stepper is None or self.stepper() is None or self._times[stepper] > 1:
            self.stepper = weakref.ref(stepper)
        if self.stepper() is not stepper:
            return False
        for other in self._times:
            self._times[other] = 0
        return True

    @property
    def whose(self) -> str:
        """Which of several optimizers' or schedules' steps were counted, in words."""
        if self.steppers < 2 or self.kind not in (OF_OPTIMIZER, OF_SCHEDULE):
            return ""
        what = "optimizers" if self.kind == OF_OPTIMIZER else "schedules"
        return f"; {self.steppers} {what} have stepped, and one's steps count"


def _classes_that_step() -> list[Any]:
    """Schedules that have a step() of their own. Those that a script defines call one of these."""
    if not dist.is_available():
        return []
    from torch.distributed.pipelining import schedules

    return [c for c in vars(schedules).values() if isinstance(c, type) and "step" in vars(c)]
