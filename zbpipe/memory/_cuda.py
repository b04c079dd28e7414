"""What feeds a recording of a CUDA device: torch's own history of its caching allocator, played again.

The history's clock and ours differ by more than an allocation takes. But the allocator counts what it hands out and
takes back, one by one, and the history has one entry for each. So a mark, the sum of the two counts at that moment, is
a place in the history. A block counts as free when its tensor gave it back (``free_requested``), even if another stream
still uses it (until ``free_completed``).
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import torch

from zbpipe._torch import allocator
from zbpipe.memory._log import ALLOC, EVENT, FREE, FREE_OLDER


class CudaLog:
    """As ``_C.Recorder``, but to be read when it has stopped. ``unreadable`` says why it cannot be."""

    unreadable = "on CUDA a recording can be read when it is over; leave its with block first"

    def __init__(self, device: torch.device, max_events: int, trace: bool) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(f"memory cannot be recorded on {device}: torch sees no CUDA device; record the cpu")
        if max_events == 0:
            raise ValueError("max_events is 0; a recording on CUDA is made from its log: expected 1 or more")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._max_events, self._is_traced = max_events, trace
        self._traces: dict[tuple[tuple[str, str, int], ...], int] = {(): 0}  # their numbers
        self._places: list[tuple[int, int]] = []  # of the marks: entries before them, and times
        self._marks, self._events, self._live = list[list[int]](), bytearray(), 0

    def start(self, objects: object) -> None:
        if allocator.is_recording():
            raise RuntimeError(
                f"memory cannot be recorded on {self.device}: torch keeps the allocator's history already, for another "
                "recording or torch.cuda.memory._record_memory_history(); end that first"
            )
        # A block may leave four entries, two of which count.
        allocator.begin_history(2 * self._max_events, self._is_traced)
        self.mark()

    def mark(self) -> int:
        self._places.append((allocator.event_count(self.device.index), time.monotonic_ns()))
        return len(self._places) - 1

    def stop(self) -> bool:
        index = self.device.index
        for _ in range(100):
            end, entries = allocator.event_count(index), allocator.history(index)
            if is_at_rest := allocator.event_count(index) == end:
                break
        allocator.end_history()
        entries = [entry for entry in entries if entry["action"] in ("alloc", "free_requested")]
        lost = end - self._places[0][0] - len(entries)
        if not is_at_rest:
            self.unreadable = f"{self.device} has allocated while its history was read; end the recording when it rests"
        elif lost > 0:
            self.unreadable = (
                f"the history of {self.device} has lost {lost} of the recording's events, of at most "
                f"max_events={self._max_events}; record with a larger one, and leave torch's own history alone"
            )
        else:
            self.unreadable = ""
            self._play(entries[-lost:])
        return False

    def _play(self, entries: list[dict[str, Any]]) -> None:
        rest, last, shift = iter(entries), 0, time.time_ns() - time.monotonic_ns()
        blocks: dict[int, int] = {}  # bytes by address
        for (begin, at), end in zip(self._places, [*self._places[1:], None], strict=True):
            last = max(last, at)  # times are made to rise
            # As Marks has them.
            mark = [last, len(self._events) // EVENT.size, self._live, self._live, 0, 0, 0, 0, 0]
            self._marks.append(mark)
            for entry in islice(rest, None if end is None else end[0] - begin):
                last, address, size = max(last, entry["time_us"] * 1000 - shift), entry["addr"], entry["size"]
                if entry["action"] == "alloc":
                    kind, blocks[address] = ALLOC, size
                else:
                    kind, size = (FREE, blocks.pop(address)) if address in blocks else (FREE_OLDER, size)
                frames = entry.get("frames", []) if kind == ALLOC else []
                stack = tuple((frame["filename"], frame["name"], frame["line"]) for frame in frames)
                trace = self._traces.setdefault(stack, len(self._traces))
                self._events += EVENT.pack(last, address, size, 0, trace, 0, kind)
                if kind != FREE_OLDER:
                    self._live += size if kind == ALLOC else -size
                    mark[3] = max(mark[3], self._live)
                    mark[4 + kind] += size
                    mark[6 + kind] += 1

    def trace_of(self, trace: int) -> tuple[tuple[str, str, int], ...]:
        return [*self._traces][trace]

    def counters(self) -> dict[str, int]:
        return {"live": self._live, "dropped": 0, "untracked": 0}

    def marks(self) -> list[list[int]]:
        return self._marks

    def events(self) -> bytes:
        return bytes(self._events)
