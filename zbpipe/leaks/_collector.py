"""Python's garbage collector, off as long as anybody here needs it off."""

from __future__ import annotations

import gc
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
            self._users -= 1
            if self._users == 0 and self._was_enabled:
                gc.enable()


collector = Collector()
