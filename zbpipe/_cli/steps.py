"""The ends of a script's steps, seen from outside."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from zbpipe._torch.pipelining import has_backward
from zbpipe.leaks import _marker

KINDS = ("Optimizer.step", "Schedule.step", "zbpipe.leaks.step()")  # a later one is what the script means by a step
OF_OPTIMIZER, OF_SCHEDULE, OF_MARKER = range(3)  # places in KINDS


class EnoughSteps(SystemExit):
    """Ends the script: no `except Exception` stops it, and `finally` and `with` blocks run."""


class Steps:
    """Counts a script's steps, and has :meth:`begin` called when the warm-up is over, :meth:`ended` after each later
    step. What these do is a subclass's."""

    def __init__(self, warmup: int, steps: int | None) -> None:
        self.warmup = warmup
        self.steps = steps
        self.kind = -1
        self.stepper: weakref.ref[Any] | None = None  # the schedule or optimizer that counts
        self._inside = threading.local()
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """Begin to count; what was counted before was no step."""
        self.seen = 0
        self.has_begun = False
        if self.warmup == 0:
            self._begin()

    def begin(self) -> None:
        raise NotImplementedError

    def ended(self, is_last: bool) -> None:
        raise NotImplementedError

    def _begin(self) -> None:
        self.has_begun = True
        self.begin()

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
            _marker._listeners.append(self._marked)
            undo.callback(_marker._listeners.remove, self._marked)
            yield

    def _marked(self) -> None:
        self._end(OF_MARKER, None)

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
        """A step of this kind has ended. Raises EnoughSteps after the last one that is asked for."""
        with self._lock:
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
            is_last = self.steps is not None and self.seen >= self.warmup + self.steps
            if not self.has_begun:
                if self.seen == self.warmup:
                    self._begin()
                return
            self.ended(is_last)
        if is_last:
            raise EnoughSteps(0)


def _classes_that_step() -> list[Any]:
    """Schedules that have a step() of their own. Those that a script defines call one of these."""
    if not dist.is_available():
        return []
    from torch.distributed.pipelining import schedules

    return [c for c in vars(schedules).values() if isinstance(c, type) and "step" in vars(c)]
