"""What feeds a recording of a CUDA device: torch's own history of its caching allocator, played again.

Note [How the history and the phases come together]

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

_ATTEMPTS = 100


class Replay:
    """What ``_C.Recorder`` says, of events that are given by hand. Times only ever rise."""

    def __init__(self, begin_ns: int) -> None:
        self._counters = dict.fromkeys(("live", "older_frees", "older_freed", "dropped", "untracked"), 0)
        self._blocks: dict[int, tuple[int, int]] = {}  # by address: bytes, serial
        self._events = bytearray()
        self._serial = 0
        self._marks: list[list[int]] = []
        self.add_mark(begin_ns)

    def add_mark(self, time_ns: int) -> int:
        live = self._counters["live"]
        self._marks.append([time_ns, len(self._events) // EVENT.size, live, live, 0, 0, 0, 0, 0])
        return len(self._marks) - 1

    def alloc(self, time_ns: int, address: int, size: int) -> None:
        self._blocks[address] = size, self._serial
        self._count(time_ns, address, size, self._serial, ALLOC)
        self._serial += 1

    def free(self, time_ns: int, address: int, size: int) -> None:
        """A block that was never handed out here is older: it counts with ``size``."""
        if address in self._blocks:
            self._count(time_ns, address, *self._blocks.pop(address), FREE)
            return
        self._counters["older_frees"] += 1
        self._counters["older_freed"] += size
        self._events += EVENT.pack(time_ns, address, size, 0, 0, FREE_OLDER)

    def _count(self, time_ns: int, address: int, size: int, serial: int, kind: int) -> None:
        mark = self._marks[-1]
        self._counters["live"] += size if kind == ALLOC else -size
        mark[3] = max(mark[3], self._counters["live"])
        mark[4 + kind] += size
        mark[6 + kind] += 1
        self._events += EVENT.pack(time_ns, address, size, serial, 0, kind)

    def counters(self) -> dict[str, int]:
        return self._counters

    def marks(self) -> list[Any]:
        return [tuple(mark) for mark in self._marks]

    def events(self) -> bytes:
        return bytes(self._events)


class CudaLog:
    """See the note above. All that it has seen is known when it has stopped."""

    def __init__(self, device: torch.device, max_events: int) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(f"memory cannot be recorded on {device}: torch sees no CUDA device")
        if max_events == 0:
            raise ValueError("max_events is 0; a recording on CUDA is made from its log and needs one")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._max_events = max_events
        self._places: list[tuple[int, int]] = []  # of the marks: counts and times
        self._replay: Replay | None = None
        self._missing = 0

    def start(self, objects: object) -> None:
        if torch.cuda.get_allocator_backend() != "native":
            raise RuntimeError(
                f"memory cannot be recorded with the CUDA allocator {torch.cuda.get_allocator_backend()}, which keeps "
                "no history; use the native one"
            )
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
        begin, last = self._places[0]
        entries = [entry for entry in entries if entry["action"] in ("alloc", "free_requested")]
        self._missing = max(end - begin - len(entries), 0)
        entries = entries[len(entries) - (end - begin - self._missing) :]
        shift = time.time_ns() - time.monotonic_ns()
        replay, waiting = Replay(last), self._places[:0:-1]
        for place, entry in enumerate(entries, start=begin + self._missing):
            while waiting and waiting[-1][0] <= place:
                last = max(last, waiting.pop()[1])
                replay.add_mark(last)
            last = max(last, entry["time_us"] * 1000 - shift)
            put = replay.alloc if entry["action"] == "alloc" else replay.free
            put(last, entry["addr"], entry["size"])
        for _, when in reversed(waiting):
            last = max(last, when)
            replay.add_mark(last)
        self._replay = replay
        return False

    def _read(self) -> tuple[int, list[dict[str, Any]]]:
        """The count at the history's end, and the history: read while no other thread allocates."""
        for _ in range(_ATTEMPTS):
            before = allocator.event_count(self.device.index)
            entries = allocator.history()[self.device.index]
            if allocator.event_count(self.device.index) == before:
                return before, entries
        raise RuntimeError(
            f"the history of {self.device} could not be read: other threads allocate all the time; end the recording "
            "when they are done"
        )

    def _played(self) -> Replay:
        if self._replay is None:
            raise RuntimeError("on CUDA a recording can be read when it is over; leave its with block first")
        if self._missing:
            raise RuntimeError(
                f"the history of {self.device} has lost {self._missing} of the recording's events, of at most "
                f"max_events={self._max_events}; record with a larger one, and leave "
                'torch.cuda.memory._record_memory_history alone or at "all" with as many max_entries'
            )
        return self._replay

    def counters(self) -> dict[str, int]:
        return self._played().counters()

    def marks(self) -> list[Any]:
        return self._played().marks()

    def events(self) -> bytes:
        return self._played().events()
