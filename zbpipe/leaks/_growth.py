"""Growth from step to step: what lives after each, and who holds what came on top."""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from zbpipe import _C
from zbpipe.leaks._collector import collector
from zbpipe.leaks._report import Leak, Report, words
from zbpipe.leaks._search import Scope, search
from zbpipe.memory._format import table

SHOWN_HOLDERS = 10


@dataclass
class Grown:
    """Leaks with one chain (but for places in lists), and the steps in which they were born."""

    chain: str
    leaks: list[Leak] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(leak.bytes for leak in self.leaks)


class Growth:
    """Counts the CPU storages, and their bytes, that were born since it was made and that live after each step.

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

    def step(self) -> None:
        """A step has ended.

        Raises:
            RuntimeError: after :meth:`close`.
        """
        self._require_open("step()")
        blocks = _C.live_blocks(self._starts[0])
        self.counts.append(len(blocks))
        self.bytes.append(sum(block[1] for block in blocks))
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
        groups: dict[str, Grown] = {}
        for entry in search(Scope(since=self._starts[1])).found:
            step = sum(born.get(entry.address, 0) >= start for start in self._starts)
            if step < len(self.counts):
                chain = re.sub(r"item \d+", "item *", words(entry.leak.chain))
                group = groups.setdefault(chain, Grown(chain))
                group.leaks.append(entry.leak)
                group.steps.append(step)
        for group in groups.values():
            group.steps.sort()
        several = [group for group in groups.values() if len(set(group.steps)) > 1]
        return sorted(several, key=lambda group: -group.bytes)

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
                    f"{max(group.steps)}: {group.chain}"
                )
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


def _end(recorder: Any) -> None:
    recorder.stop()
    collector.give_back()
