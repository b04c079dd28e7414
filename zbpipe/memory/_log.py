"""What feeds a recording, its marks and its events, and the phases between marks: Note [What a recording counts]."""

from __future__ import annotations

import struct
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from zbpipe.leaks import Leak

EVENT = struct.Struct("QQQQQII")  # zbp_event in csrc/instruments/core/zbp_record.h
ALLOC, FREE, FREE_OLDER = range(3)
ENDED = "_zbpipe_phase"  # an exception's attribute, which may be pickled: the innermost phase that it has ended

Named = tuple[str, int | None, int | None]  # a phase's kind, stage and microbatch
Log = Any
"""What feeds a recording: ``_C.Recorder``, or what has its methods."""


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
    place = {"stage": stage, "microbatch": microbatch}
    return " ".join([kind, *(f"{what} {number}" for what, number in place.items() if number is not None)])


@dataclass(frozen=True)
class AtPeak:
    """Blocks that lived at a recording's peak, and that one line made in the phases of one kind and stage.

    ``bytes`` are those of all its ``blocks``. ``phase`` is where they were made, as "forward stage 1 microbatches 0 to
    3", "" outside of all phases. ``created`` is the ``file:line`` that made them, None where no Python ran. ``alive``
    of the blocks lived at the recording's end, too. ``holder`` says who held the largest of these then: a
    :class:`zbpipe.leaks.Leak`, None if none lived, if nobody knows its tensor, and for all but the ten largest rows.
    """

    bytes: int
    blocks: int
    phase: str
    created: str | None
    alive: int
    holder: Leak | None


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


Marks = namedtuple("Marks", "time_ns events live peak allocated freed allocations frees thread")
"""By a mark's number: its moment, the events before it, and from ``peak`` on what was seen from it to the next one."""


class Ended(NamedTuple):
    """A phase that has ended, with the numbers of its marks."""

    named: Named
    begin: int
    end: int


def phase_of(marks: Marks, ended: Ended) -> Phase:
    (kind, stage, microbatch), begin, end = ended
    times = {"begin_ns": marks.time_ns[begin] - marks.time_ns[0], "end_ns": marks.time_ns[end] - marks.time_ns[0]}
    lives = {"live_begin": marks.live[begin], "live_end": marks.live[end], "peak": max(marks.peak[begin:end])}
    sums = {name: sum(getattr(marks, name)[begin:end]) for name in ("allocated", "freed", "allocations", "frees")}
    return Phase(kind, stage, microbatch, marks.thread[begin], **times, **lives, **sums)


def events_of(log: Log) -> Iterator[tuple[Any, ...]]:
    """The fields of each :class:`Allocation`."""
    start, live = log.marks()[0][0], 0
    for time, address, size, _, _, thread, kind in EVENT.iter_unpack(log.events()):
        change = size if kind == ALLOC else -size
        live += 0 if kind == FREE_OLDER else change
        yield time - start, address, change, live, thread, kind == FREE_OLDER
