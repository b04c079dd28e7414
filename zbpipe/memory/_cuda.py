"""What feeds a recording of a CUDA device: torch's own history of its caching allocator, played again.

The history's clock and ours differ by more than an allocation takes. But the allocator counts what it hands out and
takes back, one by one, and the history has one entry for each: a mark is the sum of the two counts at that moment, and
so a place in the history. ``free_requested`` is when a tensor gave its block back, and what counts here as free; that
another stream may still use the block (``free_completed``) is the allocator's business.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from zbpipe._torch import allocator
from zbpipe.memory._log import ALLOC, EVENT, FREE, FREE_OLDER


class Replay:
    """What ``_C.Recorder`` says, of events that are given by hand. Times only ever rise."""

    def __init__(self) -> None:
        self._counters = dict.fromkeys(("live", "older_frees", "older_freed", "dropped", "untracked"), 0)
        self._blocks: dict[int, tuple[int, int]] = {}  # by address: bytes, serial
        self._events = bytearray()
        self._marks: list[list[int]] = []

    def add_mark(self, time_ns: int) -> int:
        live = self._counters["live"]
        self._marks.append([time_ns, len(self._events) // EVENT.size, live, live, 0, 0, 0, 0, 0])
        return len(self._marks) - 1

    def add(self, time_ns: int, address: int, change: int) -> None:
        """A block is handed out, or taken back: one that was never handed out is older."""
        size, serial, kind = abs(change), len(self._events), ALLOC if change > 0 else FREE_OLDER
        if kind == ALLOC:
            self._blocks[address] = size, serial
        elif address in self._blocks:
            (size, serial), kind = self._blocks.pop(address), FREE
        self._events += EVENT.pack(time_ns, address, size, serial, 0, kind)
        if kind == FREE_OLDER:
            self._counters["older_frees"] += 1
            self._counters["older_freed"] += size
            return
        mark = self._marks[-1]
        self._counters["live"] += size if kind == ALLOC else -size
        mark[3] = max(mark[3], self._counters["live"])
        mark[4 + kind] += size
        mark[6 + kind] += 1

    def counters(self) -> dict[str, int]:
        return self._counters

    def marks(self) -> list[Any]:
        return [tuple(mark) for mark in self._marks]

    def events(self) -> bytes:
        return bytes(self._events)


class CudaLog(Replay):
    """See above. ``unreadable`` is empty when all is known, or says why it is not."""

    unreadable = "on CUDA a recording can be read when it is over; leave its with block first"

    def __init__(self, device: torch.device, max_events: int) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(f"memory cannot be recorded on {device}: torch sees no CUDA device")
        if max_events == 0:
            raise ValueError("max_events is 0; a recording on CUDA is made from its log and needs one")
        super().__init__()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._max_events = max_events
        self._places: list[tuple[int, int]] = []  # of the marks: counts and times

    def start(self, objects: object) -> None:
        self._is_ours = not allocator.is_recording()  # else it is read, and left on
        if self._is_ours:
            allocator.begin_history(2 * self._max_events)  # a block may leave four entries, two of which count
        self.mark()

    def mark(self) -> int:
        self._places.append((allocator.event_count(self.device.index), time.monotonic_ns()))
        return len(self._places) - 1

    def stop(self) -> bool:
        end, entries = self._read()
        # Ours keeps no stacks: where there are some, somebody else has switched his on meanwhile.
        if self._is_ours and not any(entry.get("frames") for entry in entries):
            allocator.end_history()
        entries = [entry for entry in entries if entry["action"] in ("alloc", "free_requested")]
        first, (begin, _) = end - len(entries), self._places[0]
        lost = f"the history of {self.device} has lost {first - begin} of the recording's events, of at most "
        lost += f"max_events={self._max_events}; record with a larger one, and leave torch's own history alone"
        self.unreadable = "" if first <= begin else lost
        shift, last = time.time_ns() - time.monotonic_ns(), 0
        for (begin, at), (until, _) in zip(self._places, [*self._places[1:], (end, 0)], strict=True):
            last = max(last, at)
            self.add_mark(last)
            for entry in entries[max(begin - first, 0) : max(until - first, 0)]:
                last = max(last, entry["time_us"] * 1000 - shift)
                self.add(last, entry["addr"], entry["size"] if entry["action"] == "alloc" else -entry["size"])
        return False

    def _read(self) -> tuple[int, list[dict[str, Any]]]:
        """The count at the history's end, and the history: read while no other thread allocates."""
        for _ in range(100):
            before, entries = allocator.event_count(self.device.index), allocator.history()[self.device.index]
            if allocator.event_count(self.device.index) == before:
                return before, entries
        raise RuntimeError(f"{self.device} allocates while its history is read; end the recording when it is at rest")
