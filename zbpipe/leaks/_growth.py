"""Growth from step to step: what lives after each, and who holds what came on top.

The memory of torch's CPU allocator is counted block by block, seen or not. Of other memory (CUDA's, numpy's, another
process's, that of ``copy.deepcopy`` and ``torch.load``) the storages of the tensors that can be seen are counted, once
CUDA is in use or such memory was seen to live on: it is looked for after the first steps, and ever less often.

What grows. A window of the last ten losses, a list that is cleared after each epoch, two buffers that take turns: each
holds what several steps made, and none grows. Hence all of this must hold of what is held alike:

- it was made by several steps, the first and the last one aside: the first makes what stays (gradients, optimizer
  state), and what the last one made, the next one may let go;
- tensors become more: there are more after one of the last quarter of the steps than after any of the quarter before.
  So a window is no growth once it is full, nor is anything else that stays as full as it is;
- it is old: its oldest tensor has lived for more than twice as many steps as any tensor of about its size that was let
  go (no smaller than its smallest, no larger than its largest). So a list that is cleared is no growth, from the first
  time that it was; twice, since that list may have been half full when the steps began to be watched.

A tensor for each step, or for every second one, is found within six steps if nothing else of its size is kept for a
while, and otherwise after twice that while. What is never let go within the steps that are watched is growth: what has
not been cleared yet cannot be told from what will never be.

What optimizers keep for parameters that they still have is no growth, however late the parameters come.

What becomes larger. A tensor that steps replace by a larger one (``seen = torch.cat([seen, new])``) leaves as many as
before, and more bytes. These rise if over the second half of the steps (:func:`rises`) each step adds the same, or if
Kendall's rank correlation of bytes and steps is beyond chance and each quarter of that half is above the one before: so
one jump is no rise, and neither are batches of random lengths. Who holds what is now of a size that nothing had before,
and large enough to have made the rise, is named.

Source: M. G. Kendall, A new measure of rank correlation, Biometrika 30 (1938).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

from zbpipe import _C
from zbpipe._formatting import table
from zbpipe.leaks import _cuda
from zbpipe.leaks._alike import Likeness, merged
from zbpipe.leaks._collector import collector
from zbpipe.leaks._excused import optimizer_state
from zbpipe.leaks._report import Report
from zbpipe.leaks._results import Leak, chain_lines
from zbpipe.leaks._search import Scope, are_there_others, search, storages_now

SHOWN_HOLDERS = 10
LONG_TABLE = 20  # rows; longer ones are folded
_FEWEST = 4  # values that tell a rise
_POINTS = 200  # of longer series
_DEVIATIONS = 4.0  # of the score of values in random order: one such series in some 30,000 is taken for a rise
_RISERS = 4  # tensors that may have made a rise together, each with its share
_SELDOM = 32  # steps from one look for other memory to the next


@dataclass
class Grown:
    """Leaks that are held alike: by the same holders, but for places in lists and how often one holds its like (a
    linked list, a chain of nodes). ``steps`` are those in which they were born, ``sizes`` the bytes of their blocks,
    ``keys`` those blocks. ``is_larger``: they did not become more, but larger."""

    leaks: list[Leak] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    is_larger: bool = False

    @property
    def bytes(self) -> int:
        """Of all its leaks."""
        return sum(leak.bytes for leak in self.leaks)

    @property
    def held_by(self) -> list[str]:
        """Lines: the chain to its tensors from top to bottom, the holder to blame marked by ``>>``."""
        leaks = sorted(self.leaks, key=lambda leak: -leak.bytes)
        return chain_lines(merged([leak.chain for leak in leaks]), leaks[0].place_of_blame)

    def add(self, leak: Leak, step: int, size: int, key: int) -> None:
        self.leaks.append(leak)
        self.steps.append(step)
        self.sizes.append(size)
        self.keys.append(key)


class _OtherMemory:
    """Storages on memory that is not the CPU allocator's.

    A weak reference to a storage keeps its identity from being given to another one.
    """

    def __init__(self) -> None:
        self.older = self._last = storages_now()
        self._before = set(self._living(self.older))

    def born(self) -> dict[int, int]:
        """Those that live and were not there at the beginning, with their bytes."""
        now = storages_now()
        born = {storage: size for storage, size in self._living(now).items() if storage not in self._before}
        self._last = now
        return born

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

    Raises:
        RuntimeError: the CPU allocator cannot be watched (``csrc/shim/memory/zbp_tap.h``).

    Source:
        ``objgraph.show_growth``, for storages.
    """

    def __init__(self) -> None:
        recorder = _C.Recorder(0)
        recorder.start()
        collector.switch_off()
        self._end = weakref.finalize(self, _end, recorder)
        self._since = _C.next_serial()
        # What lived after the last step: its step of birth and its bytes, by a block's serial or a storage's negative.
        self._living: dict[int, tuple[int, int]] = {}
        self._longest: dict[int, int] = {}  # steps that anything of so many bytes lived on, of what was let go
        self._first_seen: dict[int, int] = {}  # the step after which something of so many bytes lived first
        try:
            self._older: object = storages_now()
            self._other: _OtherMemory | None = _OtherMemory() if _cuda.is_in_use() else None
        except BaseException:
            self._end()  # the error may keep this object
            raise
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
        self._older = self._other = None

    def step(self) -> None:
        """A step has ended.

        Raises:
            RuntimeError: after :meth:`close`.
        """
        self._require_open("step()")
        number = len(self.counts) + 1
        living = {serial: size for _, size, serial in _C.live_blocks(self._since)}
        if self._other is not None:
            living.update((-storage, size) for storage, size in self._other.born().items())
        elif _cuda.is_in_use() or (_is_looked_at(number) and are_there_others(self._older)):
            self._other = _OtherMemory()
        for key, (born, size) in self._living.items():
            if key not in living:
                self._longest[size] = max(number - 1 - born, self._longest.get(size, 0))
        self._living = {key: self._living.get(key, (number, size)) for key, size in living.items()}
        for size in living.values():
            self._first_seen.setdefault(size, number)
        self.counts.append(len(living))
        self.bytes.append(sum(living.values()))

    def grown(self) -> list[Grown]:
        """What grows, as this module says it: groups of tensors that are held alike, by bytes, descending.

        Raises:
            RuntimeError: after :meth:`close`.
        """
        self._require_open("grown()")
        more, larger = self._tensors_become_more(), rises(self.bytes)
        if not more and not larger:
            return []
        serials = {address: serial for address, _, serial in _C.live_blocks(self._since)}
        kept = _C.storages_of(optimizer_state()) if more else set()
        groups: dict[tuple[str, ...], Grown] = {}
        candidates: dict[tuple[str, ...], Grown] = {}
        likeness = Likeness()
        found = search(Scope(since=self._since, older=self._other and self._other.older)).found
        for entry in found:
            key = serials.get(entry.address, -entry.leak.storage)
            born, size = self._living.get(key, (0, 0))
            alike = likeness(entry.leak.chain)
            if more and 1 < born < len(self.counts) and entry.leak.storage not in kept:
                groups.setdefault(alike, Grown()).add(entry.leak, born, size, key)
            elif larger and born and self._may_have_risen(size):
                candidates.setdefault(alike, Grown(is_larger=True)).add(entry.leak, born, size, key)
        for alike, group in candidates.items():
            groups.setdefault(alike, group)
        for group in groups.values():
            group.steps.sort()
        return sorted(self._growing([*groups.values()], more, larger), key=lambda group: -group.bytes)

    def still_grown(self, groups: list[Grown]) -> list[Grown]:
        """Those, of what :meth:`grown` found some steps ago, that later steps have not shown to be let go in time."""
        return self._growing(groups, self._tensors_become_more(), rises(self.bytes)) if groups else []

    def _growing(self, groups: list[Grown], more: bool, larger: bool) -> list[Grown]:
        return [group for group in groups if (larger if group.is_larger else more and self._is_old(group))]

    def _may_have_risen(self, size: int) -> bool:
        """Nothing had this size before the last quarter of the steps, and it is large enough to have made the rise."""
        steps = len(self.bytes)
        rise = self.bytes[-1] - self.bytes[steps // 2]
        return self._first_seen.get(size, 0) > steps - max(steps // 4, 1) and size >= rise / _RISERS

    def _is_old(self, group: Grown) -> bool:
        steps = {self._living[key][0] for key in group.keys if key in self._living}
        return len(steps) > 1 and len(self.counts) - min(steps) > 2 * self._longest_of(group)

    def _tensors_become_more(self) -> bool:
        half = len(self.counts) // 2
        last = half + (len(self.counts) - half) // 2
        return len(self.counts) > 2 and max(self.counts[last:]) > max(self.counts[half:last])

    def _longest_of(self, group: Grown) -> int:
        smallest, largest = min(group.sizes), max(group.sizes)
        return max((steps for size, steps in self._longest.items() if smallest <= size <= largest), default=0)

    def table(self) -> str:
        """The counts after each step, and, until :meth:`close`, what grew and who holds it."""
        held_by = describe(self.grown()) if self._end.alive else ""
        return "\n".join([self.counts_table(), "", held_by] if held_by else [self.counts_table()])

    def counts_table(self) -> str:
        """The counts after each step; of many steps those that add the same as the one before in one line."""
        rows: list[list[str]] = []
        first = 0  # step of the last row's
        is_long = len(self.counts) > LONG_TABLE
        for number, (count, size) in enumerate(zip(self.counts, self.bytes, strict=True), 1):
            before = (self.counts[number - 2], self.bytes[number - 2]) if number > 1 else (0, 0)
            added = ["", ""] if number == 1 else [f"{count - before[0]:+d}", f"{size - before[1]:+d}"]
            if is_long and rows and rows[-1][3:] == added:
                rows[-1] = [f"{first} to {number}", str(count), str(size), *added]
            else:
                first = number
                rows.append([str(number), str(count), str(size), *added])
        if len(rows) > 2 * LONG_TABLE:
            left_out = [f"... {len(rows) - 2 * LONG_TABLE} rows ...", "", "", "", ""]
            rows = [*rows[:LONG_TABLE], left_out, *rows[-LONG_TABLE:]]
        return table(["step", "live tensors", "live bytes", "tensors", "bytes"], rows)

    def report(self) -> Report:
        """What grew, as a report: for :meth:`Report.draw` and :meth:`Report.as_dict`.

        Raises:
            RuntimeError: after :meth:`close`.
        """
        return report_of(self.grown())

    def _require_open(self, what: str) -> None:
        if not self._end.alive:
            raise RuntimeError(f"{what} was called after close(); make another Growth")


def _is_looked_at(step: int) -> bool:
    return step & (step - 1) == 0 or step % _SELDOM == 0


def rises(values: Sequence[int]) -> bool:
    """Whether the second half of them rises steadily; see this module's head."""
    half = values[len(values) // 2 :]
    if len(half) < _FEWEST:
        return False
    steps = {after - before for before, after in pairwise(half)}
    if len(steps) == 1:
        return steps.pop() > 0
    few = [half[i * len(half) // _POINTS] for i in range(_POINTS)] if len(half) > _POINTS else half
    count = len(few)
    score = sum((few[j] > few[i]) - (few[j] < few[i]) for i in range(count) for j in range(i + 1, count))
    if score < _DEVIATIONS * math.sqrt(count * (count - 1) * (2 * count + 5) / 18):
        return False
    quarters = [max(half[i * len(half) // 4 : (i + 1) * len(half) // 4]) for i in range(4)]
    return all(before < after for before, after in pairwise(quarters))


def describe(groups: list[Grown]) -> str:
    """What grew and who holds it, for people; empty if nothing grew."""
    lines = ["grew, and is held by"] if groups else []
    for group in groups[:SHOWN_HOLDERS]:
        lines += [f"  {headline(group)}", *(f"    {line}" for line in group.held_by)]
    if len(groups) > SHOWN_HOLDERS:
        lines.append(f"  and {len(groups) - SHOWN_HOLDERS} more")
    return "\n".join(lines)


def headline(group: Grown) -> str:
    """How much grew, and when, in a line."""
    count = len(group.leaks)
    head = f"{count} tensor{'s' * (count > 1)} ({group.bytes} bytes)"
    if group.is_larger:
        return f"{head}, larger than any of earlier steps:"
    return f"{head} from steps {min(group.steps)} to {max(group.steps)}:"


def report_of(groups: list[Grown]) -> Report:
    return Report(leaks=sorted((leak for group in groups for leak in group.leaks), key=lambda leak: -leak.bytes))


def _end(recorder: Any) -> None:
    try:
        recorder.stop()
    finally:
        collector.give_back()
