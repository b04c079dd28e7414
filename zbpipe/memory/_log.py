"""What feeds a recording, its events, and what was held from I to W by them: Note [What a recording counts]."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from zbpipe.memory._phases import PASSES, Open

EVENT = struct.Struct("QQQQII")  # zbp_event in csrc/instruments/core/zbp_record.h
ALLOC, FREE, FREE_OLDER = range(3)


Log = Any
"""What feeds a recording: ``_C.Recorder``, or what has its methods."""


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


def marks_of(log: Log) -> list[Mark]:
    return [Mark(*mark) for mark in log.marks()]


def events_of(log: Log) -> Iterator[tuple[int, int, int, int, int, bool]]:
    """The fields of an :class:`Allocation` each."""
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


def _count(ended: Sequence[Open], of: dict[int, Pair], log: Log) -> None:
    """Sums what each W frees: of the blocks that lived at its I's end those that are no other microbatch's."""
    begins = {p.begin: p for p in ended if p.kind in (*PASSES, "forward")}
    ends = {p.end: p for p in begins.values()}
    marks, events = marks_of(log), EVENT.iter_unpack(log.events())
    running: list[Open] = []
    made: dict[int, tuple[int, list[Open]]] = {}  # by serial: the latest mark then, and the passes on its thread
    for number, mark in enumerate(marks):
        if number in begins:
            running.append(begins[number])
        if number in ends:
            running.remove(ends[number])
        here: dict[int, list[Open]] = {}
        for p in running:
            here.setdefault(marks[p.begin].thread, []).append(p)
        weights = [(w, of[w.begin]) for w in running if w.begin in of]
        until = marks[number + 1].events if number + 1 < len(marks) else None
        for _, _, size, serial, thread, kind in islice(events, None if until is None else until - mark.events):
            if kind == ALLOC:
                made[serial] = number, here.get(thread, [])
            elif kind == FREE:
                when, within = made.pop(serial)
                for w, pair in weights:
                    if when < pair.at and not any(_is_another(p, w) for p in within):
                        pair.freed[w.begin] += size


def _is_another(p: Open, w: Open) -> bool:
    """Microbatches that zbpipe numbered by its calls are not to be compared with those that others numbered."""
    if p.calls is not None and w.calls is not None:
        return not set(p.calls) & set(w.calls)
    return p.calls is w.calls and None not in (p.microbatch, w.microbatch) and p.microbatch != w.microbatch


def highest(pairs: Iterable[Pair]) -> int:
    """The most bytes that were held at once."""
    changes: list[tuple[int, int]] = []
    for pair in pairs:
        changes.append((pair.at, sum(pair.freed.values())))
        changes += [(begin, -size) for begin, size in pair.freed.items()]
    level = peak = 0
    for _, change in sorted(changes):
        level += change
        peak = max(peak, level)
    return peak
