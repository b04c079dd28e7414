"""Python's garbage collector, off as long as anybody here needs it off."""

from __future__ import annotations

import gc
import os
import threading


class Collector:
    """What it was before is restored when the last one is through, on whichever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._was_enabled = False

    def switch_off(self) -> None:
        with self._lock:
            if self._users == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._users += 1

    def give_back(self) -> None:
        with self._lock:
            self._users = max(self._users - 1, 0)  # 0 in a child of a fork
            if self._users == 0 and self._was_enabled:
                gc.enable()

    def forget(self) -> None:
        """In a child process, where none of its users goes on."""
        self._lock = threading.Lock()
        if self._users and self._was_enabled:
            gc.enable()
        self._users = 0


collector = Collector()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=collector.forget)
