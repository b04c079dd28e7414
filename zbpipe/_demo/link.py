"""What a schedule's messages cost: a slow link between the ranks, and a clock on what the schedule waits for."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zbpipe import _waits, memory
from zbpipe._stage.works import wait_for
from zbpipe._torch import pipelining

Work: Any = dist.Work


@contextlib.contextmanager
def slow_link(seconds: float) -> Iterator[None]:
    """What this process's schedules send within is handed to the backend so many seconds later, in the same order.

    Receives are not touched. zbpipe is to be patched in within. Sends that are still to be handed over when it ends are
    handed over first. On the CPU alone: a device's sends are ordered by its streams.
    """
    if seconds == 0:
        yield
        return
    schedules = pipelining.schedules_module()
    original = getattr(schedules, pipelining.BATCH_P2P)
    line = _Line(original, seconds)

    def batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:
        sends = [op for op in p2p_ops if op.op is dist.isend]
        works = [line.put(op) for op in sends]
        return [*works, *original([op for op in p2p_ops if op.op is not dist.isend], desc)]

    setattr(schedules, pipelining.BATCH_P2P, batch_p2p)
    try:
        yield
    finally:
        setattr(schedules, pipelining.BATCH_P2P, original)
        line.end()


class _Line:
    """One thread that hands over what was put in, in order, when its time has come."""

    def __init__(self, post: Callable[..., Sequence[Any]], seconds: float) -> None:
        self._post, self._seconds = post, seconds
        self._waiting: queue.SimpleQueue[_Later | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="demo link", daemon=True)
        self._thread.start()

    def put(self, op: Any) -> _Later:
        later = _Later(op, time.perf_counter() + self._seconds)
        self._waiting.put(later)
        return later

    def end(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (later := self._waiting.get()) is not None:
            time.sleep(max(0.0, later.due - time.perf_counter()))
            later.post(self._post)
            del later


class _Later(Work):  # type: ignore[misc]
    """The work of a send that has not been handed over yet."""

    def __init__(self, op: Any, due: float) -> None:
        super().__init__()
        self.due = due
        self._op: Any = op
        self._works: Sequence[Any] = ()
        self._error: Exception | None = None
        self._posted = threading.Event()

    def post(self, post: Callable[..., Sequence[Any]]) -> None:
        try:
            self._works = post([self._op])
        except Exception as error:  # the schedule's, when it waits
            self._error = error
        finally:
            self._op = None
            self._posted.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._posted.wait()
        if self._error is not None:
            raise self._error
        return all(wait_for(work, timeout) for work in self._works)

    def is_completed(self) -> bool:
        return self._posted.is_set() and all(work.is_completed() for work in self._works)


class Clock:
    """Seconds that this process's schedules have waited for messages while :meth:`running`, with nothing to run.

    ``recording``: where each wait is marked as a phase "wait", if not None.
    """

    def __init__(self) -> None:
        self._waited = 0.0
        self.recording: memory.Recording | None = None

    @property
    def seconds(self) -> float:
        """Of all waits that are over."""
        return self._waited - _waits.waited.filled

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """zbpipe is patched in before, or not at all: what it runs in a wait is a part of the wait."""
        schedules = pipelining.schedules_module()
        original = getattr(schedules, pipelining.WAIT_P2P)

        def wait_batch_p2p(work: list[Any]) -> None:
            phase = self.recording.phase("wait") if self.recording is not None else contextlib.nullcontext()
            begin = time.perf_counter()
            with phase:
                original(work)
            self._waited += time.perf_counter() - begin

        setattr(schedules, pipelining.WAIT_P2P, wait_batch_p2p)
        try:
            yield
        finally:
            setattr(schedules, pipelining.WAIT_P2P, original)
