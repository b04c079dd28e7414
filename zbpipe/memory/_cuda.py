"""What feeds a recording of a CUDA device: torch's own history of its caching allocator, played again.

The history's clock and ours differ by more than an allocation takes. But the allocator counts what it hands out and
takes back, one by one, and the history has one entry for each: a mark is the sum of the two counts at that moment, and
so a place in the history. ``free_requested`` is when a tensor gave its block back, and what counts here as free; that
another stream may still use the block (``free_completed``) is the allocator's business.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch

from zbpipe._torch import allocator
from zbpipe.memory._log import ALLOC, EVENT, FREE, FREE_OLDER


class Replay:
    """What ``_C.Recorder`` says, of a history that is over. ``places`` are the marks': counts of entries and times."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self._marks, self._events = list[Any](), bytearray()
        self._counters = dict.fromkeys(("live", "older_frees", "older_freed", "dropped", "untracked"), 0)

    def play(self, history: Iterable[tuple[int, int, int]]) -> None:
        """Times, which are made to rise, addresses, and bytes: negative for a block that is taken back."""
        rest, last, blocks = iter(history), 0, dict[int, tuple[int, int]]()  # by address: bytes and serial
        for (begin, at), end in zip(self.places, [*self.places[1:], None], strict=True):
            last, live = max(last, at), self._counters["live"]
            mark = [last, len(self._events) // EVENT.size, live, live, 0, 0, 0, 0, 0]
            self._marks.append(mark)
            for time_ns, address, change in islice(rest, None if end is None else end[0] - begin):
                last, size, serial, kind = max(last, time_ns), abs(change), len(self._events), FREE_OLDER
                if change > 0:
                    blocks[address], kind = (size, serial), ALLOC
                elif address in blocks:
                    (size, serial), kind = blocks.pop(address), FREE
                self._events += EVENT.pack(last, address, size, serial, 0, kind)
                if kind == FREE_OLDER:
                    self._counters["older_frees"] += 1
                    self._counters["older_freed"] += size
                    continue
                self._counters["live"] += size if kind == ALLOC else -size
                mark[3] = max(mark[3], self._counters["live"])
                mark[4 + kind] += size
                mark[6 + kind] += 1

    def counters(self) -> dict[str, int]:
        return self._counters

    def marks(self) -> list[Any]:
        return self._marks

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

    def start(self, objects: object) -> None:
        self._is_ours = not allocator.is_recording()  # else it is read, and left on
        if self._is_ours:
            allocator.begin_history(2 * self._max_events)  # a block may leave four entries, two of which count
        self.mark()

    def mark(self) -> int:
        self.places.append((allocator.event_count(self.device.index), time.monotonic_ns()))
        return len(self.places) - 1

    def stop(self) -> bool:
        index = self.device.index
        for _ in range(100):
            end, entries = allocator.event_count(index), allocator.history()[index]
            if allocator.event_count(index) == end:
                break
        else:
            raise RuntimeError(f"{self.device} allocates while its history is read; end the recording when it rests")
        # Ours keeps no stacks: where there are some, somebody else has switched his on meanwhile.
        if self._is_ours and not any(entry.get("frames") for entry in entries):
            allocator.end_history()
        signs, shift = {"alloc": 1, "free_requested": -1}, time.time_ns() - time.monotonic_ns()
        entries = [entry for entry in entries if entry["action"] in signs]
        wanted = end - self.places[0][0]
        if len(entries) < wanted:
            self.unreadable = (
                f"the history of {self.device} has lost {wanted - len(entries)} of the recording's events, of at most "
                f"max_events={self._max_events}; record with a larger one, and leave torch's own history alone"
            )
            return False
        self.unreadable = ""
        own = entries[len(entries) - wanted :]
        self.play((e["time_us"] * 1000 - shift, e["addr"], signs[e["action"]] * e["size"]) for e in own)
        return False
