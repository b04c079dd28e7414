"""What feeds a recording, its events, and what was held from I to W by them: Note [What a recording counts]."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

EVENT = struct.Struct("QQQQII")  # zbp_event in csrc/instruments/core/zbp_record.h
ALLOC, FREE, FREE_OLDER = range(3)
PASSES = ("I", "W", "B")

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
        return label(self)


def label(p: Phase | Open) -> str:
    place = {"stage": p.stage, "microbatch": p.microbatch}
    return " ".join([p.kind, *(f"{what} {number}" for what, number in place.items() if number is not None)])


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


@dataclass(eq=False)
class Open:
    """A phase by the numbers of its marks; ``end`` is None while it runs. ``calls``: the numbers of the calls of
    zbpipe's I that it is or that it is the W of; None if it was not zbpipe's passes that made it."""

    kind: str
    stage: int | None
    microbatch: int | None
    begin: int
    calls: tuple[int, ...] | None
    end: int | None = None
    is_open: bool = True

    @property
    def label(self) -> str:
        return label(self)


class Mark(NamedTuple):
    """A moment; from ``peak`` on, what was seen from it to the next one. ``events`` were logged before it."""

    time_ns: int
    events: int
    live: int
    peak: int
    allocated: int
    freed: int
    allocations: int
    frees: int
    thread: int


def phase_of(p: Open, marks: list[Mark]) -> Phase:
    assert p.end is not None
    begin, end, spans = marks[p.begin], marks[p.end], marks[p.begin : p.end]
    sums = {name: sum(getattr(span, name) for span in spans) for name in ("allocated", "freed", "allocations", "frees")}
    times = {"begin_ns": begin.time_ns - marks[0].time_ns, "end_ns": end.time_ns - marks[0].time_ns}
    lives = {"live_begin": begin.live, "live_end": end.live, "peak": max(span.peak for span in spans)}
    return Phase(p.kind, p.stage, p.microbatch, begin.thread, **times, **lives, **sums)


def marks_of(log: Log) -> list[Mark]:
    return [Mark(*mark) for mark in log.marks()]


def events_of(log: Log) -> Iterator[tuple[Any, ...]]:
    """The fields of each :class:`Allocation`."""
    start, live = log.marks()[0][0], 0
    for time, address, size, _, thread, kind in EVENT.iter_unpack(log.events()):
        change = size if kind == ALLOC else -size
        live += 0 if kind == FREE_OLDER else change
        yield time - start, address, change, live, thread, kind == FREE_OLDER


@dataclass
class Pair:
    """An I and its W: ``at`` is the mark of I's end, then per W the mark of its beginning and the bytes it freed."""

    stage: int | None
    microbatch: int | None
    at: int
    freed: dict[int, int] = field(default_factory=dict)


def pairs_of(ended: Sequence[Open], unsplit: Collection[int | None], log: Log) -> list[Pair]:
    """Each I with its W, in the order of the I. ``unsplit``: stages whose backward is not split."""
    pairs: dict[object, Pair] = {}
    found: list[Pair] = []
    of: dict[int, Pair] = {}  # by the marks of the W's beginnings
    for p in ended:
        if p.stage in unsplit:
            continue
        key: object = (p.stage, p.microbatch) if p.calls is None else p.calls
        if p.kind == "I":
            assert p.end is not None
            pairs[key] = Pair(p.stage, p.microbatch, p.end)
            found.append(pairs[key])
        elif p.kind == "W":
            if p.calls is not None and len(p.calls) > 1:
                served = [pairs[call,] for call in p.calls if (call,) in pairs]
                pairs[key] = Pair(p.stage, None, max((q.at for q in served), default=p.begin))
                found.append(pairs[key])
            if key in pairs:  # else its I was before the recording
                of[p.begin] = pairs[key]
                pairs[key].freed[p.begin] = 0
    _count(ended, of, log)
    return [pair for pair in found if pair.freed]


def _count(ended: Iterable[Open], of: dict[int, Pair], log: Log) -> None:
    """Sums what each W frees: of the blocks that lived at its I's end those that are no other microbatch's."""
    marks, logged = marks_of(log), log.events()
    running: list[list[Open]] = [[] for _ in marks]  # the passes from each mark to the next one
    for p in ended:
        for those in running[p.begin : p.end] if p.kind in (*PASSES, "forward") else ():
            those.append(p)
    made: dict[int, tuple[int, int]] = {}  # by serial: the latest mark then, and the thread
    events, places = EVENT.iter_unpack(logged), [*(mark.events for mark in marks), len(logged) // EVENT.size]
    for number, (begin, end) in enumerate(pairwise(places)):
        for _, _, size, serial, thread, kind in islice(events, end - begin):
            if kind == ALLOC:
                made[serial] = number, thread
            elif kind == FREE:
                when, by = made.pop(serial)
                for w in running[number]:
                    if w.begin in of and when < (pair := of[w.begin]).at:
                        within = (p for p in running[when] if marks[p.begin].thread == by)
                        if not any(_is_another(p, w) for p in within):
                            pair.freed[w.begin] += size


def _is_another(p: Open, w: Open) -> bool:
    """Microbatches that zbpipe numbered by its calls are not to be compared with those that others numbered."""
    if p.calls is not None and w.calls is not None:
        return not set(p.calls) & set(w.calls)
    return p.calls is w.calls and None not in (p.microbatch, w.microbatch) and p.microbatch != w.microbatch


def highest(pairs: Iterable[Pair]) -> int:
    """The most bytes that were held at once."""
    changes = [(pair.at, sum(pair.freed.values())) for pair in pairs]
    changes += [(begin, -size) for pair in pairs for begin, size in pair.freed.items()]
    return max(accumulate((change for _, change in sorted(changes)), initial=0))
