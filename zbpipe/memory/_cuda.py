"""What feeds a recording of a CUDA device: torch's own history of its caching allocator.

Note [How the history and the phases come together]

The history's clock and ours differ by more than an allocation takes. But the allocator counts what it hands out and
takes back, one by one, and the history has one entry for each: a mark is the sum of the two counts at that moment, and
so a place in the history.

``free_requested`` is when a tensor gave its block back, and what counts here as free; that another stream may still use
the block (``free_completed``) is the allocator's business.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zbpipe import _C
from zbpipe._torch import allocator

_ATTEMPTS = 100


class _History:
    """torch's history, on as long as one of our recordings needs it. It is one for all devices, and for all who use it:
    one that is on already is read and left alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._is_ours = False

    def acquire(self, entries: int) -> bool:
        """Whether it is ours, with so many entries."""
        with self._lock:
            if self._users == 0:
                self._is_ours = not allocator.is_recording()
                if self._is_ours:
                    allocator.begin_history(entries)
            self._users += 1
            return self._is_ours

    def release(self, is_anothers: bool) -> None:
        """``is_anothers``: somebody else has switched it on as well meanwhile."""
        with self._lock:
            self._users -= 1
            self._is_ours = self._is_ours and not is_anothers
            if self._users == 0 and self._is_ours:
                allocator.end_history()


_history = _History()


class CudaSource:
    """See the note above. All that it has seen is known when it has stopped."""

    def __init__(self, device: torch.device, max_events: int) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(f"memory cannot be recorded on {device}: torch sees no CUDA device")
        if max_events == 0:
            raise ValueError("max_events is 0; a recording on CUDA is made from its log and needs one")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._max_events = max_events
        self._marks: list[tuple[int, int]] = []
        self._log: _C.Recorder | None = None
        self._missing = 0
        self._is_ours = True

    def start(self) -> None:
        if torch.cuda.get_allocator_backend() != "native":
            raise RuntimeError(
                f"memory cannot be recorded with the CUDA allocator {torch.cuda.get_allocator_backend()}, which keeps "
                "no history; use the native one"
            )
        self._is_ours = _history.acquire(2 * self._max_events)  # a block may leave four entries, two of which count
        self._begin = (self._position(), time.monotonic_ns())

    def mark(self) -> int | None:
        self._marks.append((self._position(), time.monotonic_ns()))
        return len(self._marks)  # mark 0 is the beginning

    def stop(self) -> bool:
        trace: list[dict[str, Any]] = []
        try:
            end, trace = self._read()
        finally:
            # Ours keeps no stacks: where there are some, somebody else's is on.
            _history.release(any(entry.get("frames") for entry in trace))
        self._log, self._missing = self._replayed(end, trace)
        return False

    def _replayed(self, end: int, trace: list[dict[str, Any]]) -> tuple[_C.Recorder, int]:
        begin, begin_ns = self._begin
        shift = time.time_ns() - time.monotonic_ns()
        return replay(trace, begin, end, begin_ns, self._marks, self._max_events, shift)

    def so_far(self) -> CudaSource:
        """What would be known if it stopped now; it goes on."""
        now = copy.copy(self)
        now._log, now._missing = self._replayed(*self._read())
        return now

    @property
    def log(self) -> _C.Recorder:
        if self._log is None:
            raise RuntimeError("on CUDA a recording can be read when it is over; leave its with block first")
        if self._missing:
            lacks = f"the history of {self.device} has lost {self._missing} of the recording's events"
            raise RuntimeError(
                f"{lacks}, which were more than max_events={self._max_events}; record with a larger one (or it was "
                "switched off meanwhile)"
                if self._is_ours
                else f"{lacks}: it is that of torch.cuda.memory._record_memory_history, which was on before, with too "
                'few max_entries, as "state" or with skip_actions; give it "all" and more, or switch it off meanwhile'
            )
        return self._log

    def counters(self) -> dict[str, int]:
        return self.log.counters()

    def _position(self) -> int:
        return allocator.event_count(self.device.index)

    def _read(self) -> tuple[int, list[dict[str, Any]]]:
        """The history, and the position of its end: read while no other thread allocates."""
        for _ in range(_ATTEMPTS):
            before = self._position()
            traces = allocator.history()
            if self._position() == before:
                return before, traces[self.device.index]
        raise RuntimeError(
            f"the history of {self.device} could not be read: other threads allocate all the time; end the recording "
            "when they are done"
        )


def replay(
    trace: Iterable[dict[str, Any]],
    begin: int,
    end: int,
    begin_ns: int,
    marks: Sequence[tuple[int, int]],
    max_events: int,
    unix_minus_monotonic_ns: int,
) -> tuple[_C.Recorder, int]:
    """Makes a log of a device's history between the positions ``begin`` and ``end``, at which the history ends.

    ``marks`` are positions and monotonic times. Returns the log and the number of events that the history has lost;
    the log is of use only if that is 0.
    """
    entries = [e for e in trace if e["action"] in ("alloc", "free_requested")]
    missing = max(end - begin - len(entries), 0)
    entries = entries[len(entries) - (end - begin - missing) :]
    log = _C.Recorder(max_events)
    log.replay_begin(begin_ns)
    last = begin_ns
    waiting = list(reversed(marks))
    for position, entry in enumerate(entries, start=begin + missing):
        while waiting and waiting[-1][0] <= position:
            last = max(last, waiting.pop()[1])
            log.replay_mark(last)
        last = max(last, entry["time_us"] * 1000 - unix_minus_monotonic_ns)
        put = log.replay_alloc if entry["action"] == "alloc" else log.replay_free
        put(last, entry["addr"], entry["size"])
    for _, when in reversed(waiting):
        last = max(last, when)
        log.replay_mark(last)
    return log, missing
