"""What a command is at when it takes long: a line on standard error, for somebody who sits before a terminal."""

from __future__ import annotations

import contextlib
import sys
import time

from zbpipe._cli import ranks

SELDOM = 2.0  # seconds without a line


class Progress:
    def __init__(self, command: str) -> None:
        self._command = command
        self._said = time.monotonic()

    def __call__(self, what: str) -> None:
        """Say it, on the first rank, if the last line, or the command's beginning, is two seconds ago."""
        now = time.monotonic()
        if now - self._said < SELDOM or ranks.rank() != 0:
            return
        with contextlib.suppress(OSError, ValueError):  # a script may have closed it
            if sys.stderr is not None and sys.stderr.isatty():
                print(f"zbpipe {self._command}: {what}", file=sys.stderr, flush=True)
        self._said = now
