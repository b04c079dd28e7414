"""What a recording is made of for whoever reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import NamedTuple

from zbpipe._formatting import Unit, table

Path = str | PathLike[str]


@dataclass(frozen=True)
class Phase:
    """A named part of a recording, and the bytes in it: see Note [What a recording counts].

    ``kind`` is "forward", "I", "W" or "B" (a backward that is not split) where zbpipe made the phase, else whatever it
    was named. ``stage`` and ``microbatch`` are None where unknown. Times are in ns since the recording began.
    ``allocated`` and ``freed`` are bytes, ``allocations`` and ``frees`` blocks. ``thread`` is a small number, 0 for a
    device's allocator.
    """

    kind: str
    stage: int | None
    microbatch: int | None
    thread: int
    begin_ns: int
    end_ns: int
    live_begin: int
    live_end: int
    peak: int
    allocated: int
    freed: int
    allocations: int
    frees: int

    @property
    def label(self) -> str:
        """As "I stage 1 microbatch 3"."""
        return label(self.kind, self.stage, self.microbatch)


def label(kind: str, stage: int | None, microbatch: int | None) -> str:
    parts = [kind]
    parts += [] if stage is None else [f"stage {stage}"]
    parts += [] if microbatch is None else [f"microbatch {microbatch}"]
    return " ".join(parts)


@dataclass(frozen=True)
class HeldMicrobatch:
    """Bytes held for one microbatch of a stage from I to W. ``microbatch`` is None if one W served several."""

    stage: int | None
    microbatch: int | None
    bytes: int


class Allocation(NamedTuple):
    """An event of the log: ``bytes`` handed out at ``address`` (> 0) or taken back (< 0), ``live`` bytes afterwards.

    ``older`` blocks were there before the recording; they do not change ``live``.
    """

    time_ns: int
    address: int
    bytes: int
    live: int
    thread: int
    older: bool


Event = tuple[int, int, int, int, int, bool]
"""The fields of an :class:`Allocation`."""


def short(name: str, most: int = 28) -> str:
    """A name in one line of at most so many characters."""
    line = " ".join(name.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def short_label(phase: Phase, most: int = 31) -> str:
    """A phase's label in at most so many characters, its stage and microbatch whole."""
    of = label("", phase.stage, phase.microbatch)
    return short(phase.kind, max(most - len(of), 1)) + of


def phase_table(phases: Sequence[Phase]) -> str:
    """All bytes in one unit, that of the largest."""
    unit = Unit.of(max(p.peak for p in phases))
    header = ("phase", "ms", *(f"{column}, {unit.name}" for column in ("begin", "end", "peak")), "blocks")
    rows = []
    for p in phases:
        sizes = [unit(size) for size in (p.live_begin, p.live_end, p.peak)]
        rows.append((short_label(p), f"{(p.end_ns - p.begin_ns) / 1e6:.2f}", *sizes, str(p.allocations)))
    return table(header, rows)


def held_table(held: Sequence[HeldMicrobatch]) -> str:
    unit = Unit.of(max(h.bytes for h in held))
    rows = [(*("" if n is None else str(n) for n in (h.stage, h.microbatch)), unit(h.bytes)) for h in held]
    return table(("stage", "microbatch", f"held, {unit.name}"), rows, left=0)
