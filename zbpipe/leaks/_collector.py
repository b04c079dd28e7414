"""Python's garbage collector: off as long as anybody here needs it off, and what its runs free."""

from __future__ import annotations

import contextlib
import gc
import os
import struct
import threading
from collections.abc import Callable

from zbpipe import _C

Block = tuple[int, int, int]

_EVENT, _OLDER = struct.Struct("QQQQII"), 2  # as _C.Recorder.events() gives them


class Collector:
    """Off by its first threshold: whoever asks or tells it to be enabled finds and gets what they expect. What the
    thresholds were is restored when the last one is through, on whichever thread, unless somebody set others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: tuple[int, int, int] | None = None

    def switch_off(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = gc.get_threshold()
                gc.set_threshold(0, *self._before[1:])
            self._users += 1

    def give_back(self) -> None:
        with self._lock:
            self._users = max(self._users - 1, 0)  # 0 in a child of a fork
            if self._users == 0:
                self._restore()

    def _restore(self) -> None:
        if self._before is not None and gc.get_threshold()[0] == 0:
            gc.set_threshold(*self._before)
        self._before = None

    def forget(self) -> None:
        """In a child process, where none of its users goes on."""
        self._lock = threading.Lock()
        self._restore()
        self._users = 0


collector = Collector()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=collector.forget)


class Collections:
    """Says what runs of the collector free, of CPU memory: the blocks that the thread frees on which it runs. Other
    threads' own, and what callbacks of others in gc.callbacks let go of, is not among it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Callable[[list[Block]], None]] = []
        self._log: _C.Recorder | None = None  # of the run that goes on

    def listen(self, listener: Callable[[list[Block]], None]) -> None:
        """Call it after each run, on whichever thread, with the blocks that went: address, bytes, serial."""
        with self._lock:
            self._listeners.append(listener)
            self._stand_around()

    def forget(self, listener: Callable[[list[Block]], None]) -> None:
        with self._lock:
            self._listeners.remove(listener)
            if not self._listeners:
                self._remove()
                self._log = None

    def _stand_around(self) -> None:
        """Last of the callbacks before a run and first after it, so that none of theirs is within."""
        self._remove()
        gc.callbacks.append(self._begins)
        gc.callbacks.insert(0, self._ends)

    def _remove(self) -> None:
        for callback in (self._begins, self._ends):
            with contextlib.suppress(ValueError):  # somebody emptied the list
                gc.callbacks.remove(callback)

    def _begins(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            log = _C.Recorder(1 << 62)
            log.start()
            self._log = log

    def _ends(self, phase: str, info: dict[str, int]) -> None:
        log, self._log = self._log, None
        if phase != "stop" or log is None:
            return
        log.stop()
        mine = log.marks()[0][8]
        events = _EVENT.iter_unpack(log.events())
        freed = [tuple(block) for _, *block, thread, kind in events if thread == mine and kind == _OLDER]
        for listener in list(self._listeners) if freed else ():
            listener(freed)


collections = Collections()


def collect() -> set[int]:
    """Run the collector. Returns the serials of the CPU blocks that it freed."""
    freed: set[int] = set()

    def note(blocks: list[Block]) -> None:
        freed.update(serial for _, _, serial in blocks)

    collections.listen(note)
    try:
        gc.collect()
    finally:
        collections.forget(note)
    return freed
