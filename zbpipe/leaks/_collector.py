"""Python's garbage collector: off as long as anybody here needs it off, and what its runs free."""

from __future__ import annotations

import contextlib
import gc
import os
import struct
import threading

from zbpipe import _C

_EVENT, _OLDER = struct.Struct("QQQQQII"), 2  # as _C.Recorder.events() gives them


class Collector:
    """Off within each ``with collector``, by its first threshold, so that gc.isenabled() and gc.enable() work as ever.
    The last block to end, on any thread, restores the thresholds, unless somebody set others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: tuple[int, int, int] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = gc.get_threshold()
                gc.set_threshold(0, *self._before[1:])
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users = max(self._users - 1, 0)  # 0 in a child of a fork
            if self._users == 0:
                self._restore()

    def forget(self) -> None:
        """In a child process, where none of its users goes on."""
        self._lock, self._users = threading.Lock(), 0
        self._restore()

    def _restore(self) -> None:
        if self._before is not None and gc.get_threshold()[0] == 0:
            gc.set_threshold(*self._before)
        self._before = None


collector = Collector()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=collector.forget)


class Collections:
    """The CPU blocks that runs of the collector free inside: not those that other threads or gc.callbacks free then."""

    def __init__(self) -> None:
        self.freed: dict[int, int] = {}  # bytes by serials
        self._log: _C.Recorder | None = None  # of the run that goes on

    def __enter__(self) -> Collections:
        # Last of the callbacks before a run and first after it, so that none of theirs is within.
        gc.callbacks.append(self._begins)
        gc.callbacks.insert(0, self._ends)
        return self

    def __exit__(self, *error: object) -> None:
        for callback in (self._begins, self._ends):
            with contextlib.suppress(ValueError):  # somebody emptied the list
                gc.callbacks.remove(callback)
        self._log = None

    def _begins(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._log = _C.Recorder(1 << 62)
            self._log.start()

    def _ends(self, phase: str, info: dict[str, int]) -> None:
        log, self._log = self._log, None
        if phase == "stop" and log is not None:
            log.stop()
            mine = log.marks()[0][8]
            for _, _, size, serial, _, thread, kind in _EVENT.iter_unpack(log.events()):
                if thread == mine and kind == _OLDER:
                    self.freed[serial] = size


def collect() -> set[int]:
    """Run the collector. Returns the serials of the CPU blocks that it freed."""
    with Collections() as collections:
        gc.collect()
    return {*collections.freed}
