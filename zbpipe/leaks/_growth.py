"""Growth from step to step: what lives after each, and who holds what came on top.

The memory of torch's CPU allocator is counted block by block, seen or not. Of other memory (CUDA's) the storages of the
tensors that can be seen are counted, once CUDA is in use.
"""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from zbpipe import _C
from zbpipe.leaks import _cuda
from zbpipe.leaks._collector import collector
from zbpipe.leaks._report import Holder, Leak, Report, held_by
from zbpipe.leaks._search import Found, Scope, search, storages_now
from zbpipe.memory._format import table

SHOWN_HOLDERS = 10


@dataclass
class Grown:
    """Leaks that are held alike: by the same holders, but for places in lists and how often one holds its like (a
    linked list, a chain of nodes). ``steps`` are those in which they were born; ``held_by`` is said of the largest."""

    leaks: list[Leak] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(leak.bytes for leak in self.leaks)

    @property
    def held_by(self) -> list[str]:
        return held_by(max(self.leaks, key=lambda leak: leak.bytes))


class _OtherMemory:
    """Storages on memory that is not the CPU allocator's, with the steps after which they were first seen.

    A weak reference to a storage keeps its identity from being given to another one.
    """

    def __init__(self) -> None:
        self.older = self._last = storages_now()
        self._born = dict.fromkeys(self._living(self.older), 0)

    def see(self, step: int) -> None:
        now = storages_now()
        self._born = {storage: self._born.get(storage, step) for storage in self._living(now)}
        self._last = now

    def alive(self) -> list[int]:
        """The bytes of each that was not there at the beginning."""
        return [size for storage, size in self._living(self._last).items() if self._born[storage]]

    def born(self, storage: int) -> int:
        """The step, or 0 for one that was not seen after any."""
        return self._born.get(storage, 0)

    @staticmethod
    def _living(storages: object) -> dict[int, int]:
        tapped = {address for address, _, _ in _C.live_blocks(0)}
        return {
            storage: size
            for device, address, size, storage in _C.storage_spans(storages)
            if size and device != "meta" and address not in tapped
        }


class Growth:
    """Counts the storages, and their bytes, that were born since it was made and that live after each step.

    Call :meth:`step` after each step and :meth:`table` at the end. The garbage collector is off until :meth:`close`,
    the end of a ``with`` block, or the end of the object. Keeps nothing alive.

    Attributes:
        counts: storages that lived after each step.
        bytes: their bytes.
    """

    def __init__(self) -> None:
        recorder = _C.Recorder(0)
        recorder.start()
        collector.switch_off()
        self._end = weakref.finalize(self, _end, recorder)
        self._starts = [_C.next_serial()]  # of each step, and of the next one
        self._other: _OtherMemory | None = _OtherMemory() if _cuda.is_in_use() else None
        self.counts: list[int] = []
        self.bytes: list[int] = []

    def __enter__(self) -> Growth:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the counting. What was counted stays; who holds it can no longer be asked."""
        self._end()
        self._other = None

    def step(self) -> None:
        """A step has ended.

        Raises:
            RuntimeError: after :meth:`close`.
        """
        self._require_open("step()")
        sizes = [size for _, size, _ in _C.live_blocks(self._starts[0])]
        if self._other is not None:
            self._other.see(len(self._starts))
            sizes += self._other.alive()
        elif _cuda.is_in_use():
            self._other = _OtherMemory()
        self.counts.append(len(sizes))
        self.bytes.append(sum(sizes))
        self._starts.append(_C.next_serial())

    def grown(self) -> list[Grown]:
        """What is held in the same way from several steps, the first and the last one aside: by bytes, descending.

        The first step makes what stays (gradients, optimizer state); what the last one made, the next one may let go.

        Raises:
            RuntimeError: after :meth:`close`.
        """
        self._require_open("grown()")
        if len(self.counts) < 3:
            return []
        born = {address: serial for address, _, serial in _C.live_blocks(self._starts[1])}
        groups: dict[tuple[str, ...], Grown] = {}
        for entry in search(Scope(since=self._starts[1], older=self._other and self._other.older)).found:
            step = self._born_in(entry, born)
            if 1 < step < len(self.counts):
                group = groups.setdefault(_likeness(entry.leak.chain), Grown())
                group.leaks.append(entry.leak)
                group.steps.append(step)
        for group in groups.values():
            group.steps.sort()
        several = [group for group in groups.values() if len(set(group.steps)) > 1]
        return sorted(several, key=lambda group: -group.bytes)

    def _born_in(self, entry: Found, serials: dict[int, int]) -> int:
        if entry.address in serials:
            return sum(serials[entry.address] >= start for start in self._starts)
        return self._other.born(entry.leak.storage) if self._other is not None else 0

    def table(self) -> str:
        """The counts after each step, and, until :meth:`close`, what grew and who holds it."""
        rows = []
        for number, (count, size) in enumerate(zip(self.counts, self.bytes, strict=True), 1):
            before = self.counts[number - 2], self.bytes[number - 2]
            rows.append(
                [str(number), str(count), str(size)]
                + (["", ""] if number == 1 else [f"{count - before[0]:+d}", f"{size - before[1]:+d}"])
            )
        lines = [table(["step", "live tensors", "live bytes", "tensors", "bytes"], rows)]
        if self._end.alive:
            grown = self.grown()
            if grown:
                lines += ["", "grew, and is held by"]
            for group in grown[:SHOWN_HOLDERS]:
                count = len(group.leaks)
                lines.append(
                    f"  {count} tensor{'s' * (count > 1)} ({group.bytes} bytes) from steps {min(group.steps)} to "
                    f"{max(group.steps)}: {group.held_by[0]}"
                )
                lines += [f"    {line}" for line in group.held_by[1:]]
            if len(grown) > SHOWN_HOLDERS:
                lines.append(f"  and {len(grown) - SHOWN_HOLDERS} more")
        return "\n".join(lines)

    def report(self) -> Report:
        """What grew, as a report: for :meth:`Report.draw` and :meth:`Report.as_dict`."""
        leaks = [leak for group in self.grown() for leak in group.leaks]
        return Report(leaks=sorted(leaks, key=lambda leak: -leak.bytes))

    def _require_open(self, what: str) -> None:
        if not self._end.alive:
            raise RuntimeError(f"{what} was called after close(); make another Growth")


def _likeness(chain: list[Holder]) -> tuple[str, ...]:
    """Equal for chains of the same holders, but for numbers and repetitions."""
    return tuple(dict.fromkeys(re.sub(r"\b\d+\b", "*", str(holder)) for holder in chain if holder.kind != "more"))


def _end(recorder: Any) -> None:
    recorder.stop()
    collector.give_back()
