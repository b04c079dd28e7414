"""The ends of a script's steps, seen from outside, and what lives after each."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from zbpipe._torch.pipelining import has_backward, schedules_module
from zbpipe.leaks import Growth
from zbpipe.leaks._grown import Grown
from zbpipe.leaks._growth import PASSING
from zbpipe.leaks._judge import living
from zbpipe.leaks._verdict import FEWEST, Verdict

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
OPTIMIZER, SCHEDULE, LINE = "Optimizer.step", "Schedule.step", "--step-at"


class Steps:
    """Counts a script's steps, as ``zbpipe leaks --help`` says, and looks at what lives after the warm-up."""

    def __init__(self, warmup: int, most: int | None, line: tuple[str, int] | None) -> None:
        self.warmup, self._most = warmup, most
        self._file, self._line = line or ("", 0)
        self._real_path = functools.cache(os.path.realpath)
        self._has_line = functools.cache(lambda code: self._line in {line for *_, line in code.co_lines()})
        self._is_over = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self.growth: Growth | None = None
        self._begin_to_count("")

    def _begin_to_count(self, kind: str) -> None:
        """What was counted before was no step."""
        if self.growth is not None:
            self.growth.close()
        self.kind, self.seen, self.growth = kind, 0, None
        self.found: list[Grown] = []  # what grew at the last look
        self.looked_at = 0
        self.steppers = 0  # schedules or optimizers that have stepped
        self._known, self._meanwhile = weakref.WeakSet[Any](), weakref.WeakSet[Any]()  # and since the one that counts
        self._counted: Callable[[], Any] = lambda: None  # a weak reference to that
        if self.warmup == 0:
            self._begin_to_watch()

    def _begin_to_watch(self) -> None:
        gc.collect()
        self.growth = Growth()

    @contextlib.contextmanager
    def seen_from_outside(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            if self._file:
                for module in (sys, threading):
                    undo.callback(module.settrace, module.gettrace())
                    module.settrace(self._trace)
            else:
                hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._end(OPTIMIZER, optimizer))
                undo.callback(hook.remove)
                schedules = vars(schedules_module()).values() if dist.is_available() else ()
                owners: list[Any] = [owner for owner in schedules if isinstance(owner, type) and "step" in vars(owner)]
                for owner in owners:  # those that a script defines call one of these
                    undo.callback(setattr, owner, "step", owner.step)
                    owner.step = self._and_tell(owner.step)
            yield

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """For sys.settrace: a step ends whenever the line of the file is about to run."""
        if self._real_path(frame.f_code.co_filename) != self._file or not self._has_line(frame.f_code):
            return None
        last = -1

        def trace_lines(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line" and frame.f_lineno == self._line:
                before, last = last, frame.f_lasti
                if before < 0 or last <= before:  # else a statement of several lines comes back to its first
                    self._end(LINE)
            return trace_lines

        return trace_lines

    def _and_tell(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def step_and_tell(schedule: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = step(schedule, *args, **kwargs)
            if has_backward(schedule):  # eval() calls step() too
                self._end(SCHEDULE, schedule)
            return result

        return step_and_tell

    def _end(self, kind: str, stepper: Any = None) -> None:
        """Counts a step. After the last one SystemExit ends the script, which no ``except Exception`` stops. On another
        thread it would end that thread alone."""
        with self._lock:
            is_of_a_part = kind == OPTIMIZER and self.kind == SCHEDULE
            if is_of_a_part or self._is_over or os.getpid() != self._process:
                return
            if kind != self.kind:
                self._begin_to_count(kind)
            if stepper is not None and not self._counts(stepper):
                return
            self.seen += 1
            if self.seen == self.warmup:
                self._begin_to_watch()
            elif self.growth is not None:
                self._is_over = self.seen - self.warmup == self._most
                self._look(self.growth)
            if not self._is_over:
                return
        if threading.current_thread() is not threading.main_thread():
            for file in living(_WRITERS):  # as the end of the interpreter does
                with contextlib.suppress(Exception):
                    file.flush()
            os._exit(0)  # which reports first
        raise SystemExit(0)

    def _counts(self, stepper: Any) -> bool:
        """Whether its steps count: those of the first, until that is gone or another has stepped twice meanwhile."""
        self.steppers += stepper not in self._known
        self._known.add(stepper)
        if self._counted() is None or stepper in self._meanwhile:
            self._counted = weakref.ref(stepper)
        if self._counted() is not stepper:
            self._meanwhile.add(stepper)
            return False
        self._meanwhile.clear()
        return True

    def _look(self, growth: Growth) -> None:
        growth.step()
        watched = len(growth.counts)
        # While the script's variables are there to be named.
        if self._is_over or growth.looked_at == watched >= max(FEWEST, growth.search_from):
            self.found, self.looked_at = growth.grown(), watched

    def judged(self) -> Growth | None:
        """The counts, closed, when what was found is what still grows; None if there were too few steps to tell."""
        growth = self.growth
        if growth is None:
            return None
        watched = len(growth.counts)
        if self.looked_at < watched:
            self._judge_again(growth)
            if watched >= FEWEST and not (self.found or growth.filling):
                self.found, self.looked_at = growth.grown(), watched
        growth.close()
        return growth if watched >= FEWEST else None

    def _judge_again(self, growth: Growth) -> None:
        """By the steps since the last look."""
        is_rising = bool(growth.rising())
        found, self.found = self.found, []
        for grown in found:
            judged = growth.verdict_now(grown) if grown.keys else Verdict(leaks=is_rising)
            if judged.leaks:
                self.found.append(grown)
            elif judged.passes:
                growth.filling.append(replace(grown, known=PASSING))
        if not self.found:
            growth.cycles = []
        if not is_rising:
            growth.filling = []
