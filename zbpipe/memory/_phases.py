"""The phases of a step, marked in recordings while they run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zbpipe import _C
from zbpipe.memory._results import Phase

PASSES = ("I", "W", "B")


class _Thread(threading.local):
    """The pass within which a thread of a recording is: of those within one another only the outermost is marked."""

    def __init__(self) -> None:
        self.place = _Place()


class _Place:
    """Also the phases that exceptions have ended since the last one began, with the exceptions' identities."""

    def __init__(self) -> None:
        self.outermost: Open | None = None
        self.raised: list[tuple[int, Open]] = []


@dataclass
class Open:
    """A phase by the numbers of its marks; ``end`` is None while it runs. ``calls``: the numbers of the calls of
    zbpipe's I that it is or that it is the W of; None if it was not zbpipe's passes that made it. ``place`` is that
    of the thread on which it began: it may end on another one."""

    kind: str
    stage: int | None
    microbatch: int | None
    begin: int
    place: _Place
    end: int | None = None
    calls: tuple[int, ...] | None = None


class Marks:
    """The phases of a recording, by the numbers of the marks in its source. It marks nothing while ``is_running`` is
    False."""

    def __init__(self, mark: Callable[[], int | None]) -> None:
        self.is_running = False
        self.lost = 0  # for want of memory
        self._mark = mark
        self._phases: list[Open] = []
        self._thread = _Thread()
        self._calls = 0
        self._call_of: weakref.WeakKeyDictionary[_C.ParamGroup, int] = weakref.WeakKeyDictionary()

    def mark(self) -> int | None:
        return self._mark() if self.is_running else None

    def begin(self, kind: str, stage: int | None, microbatch: int | None, calls: tuple[int, ...] | None) -> Open | None:
        if not self.is_running or (kind in PASSES and self._thread.place.outermost is not None):
            return None
        mark = self.mark()
        if mark is None:
            self.lost += 1
            return None
        opened = Open(kind, stage, microbatch, mark, self._thread.place, calls=calls)
        opened.place.raised.clear()  # the thread goes on: what it raised was handled
        if kind in PASSES:
            opened.place.outermost = opened
        self._phases.append(opened)
        return opened

    def end(self, opened: Open, error: object = None) -> None:
        if error is not None:
            self._thread.place.raised.append((id(error), opened))
        if opened.place.outermost is opened:
            opened.place.outermost = None
        opened.end = self.mark()

    def ended(self) -> list[Open]:
        """The phases that have ended, by their beginnings."""
        return sorted((p for p in list(self._phases) if p.end is not None), key=lambda p: p.begin)

    def innermost(self, raised: Container[int] | None) -> Open | None:
        """Of the phases of this thread the one that began last of those that one of these exceptions has ended; with
        None, of those that run, on this thread if there are any there."""
        if raised is not None:
            ended = [p for error, p in self._thread.place.raised if error in raised]
            return max(ended, key=lambda p: p.begin, default=None)
        running = [p for p in list(self._phases) if p.end is None]
        return ([None, *running] + [p for p in running if p.place is self._thread.place])[-1]

    def so_far(self) -> Marks:
        """A copy in which what runs ends now."""
        now = self.mark()
        copy = Marks(self._mark)
        copy._phases = [p if p.end is not None else replace(p, end=now) for p in list(self._phases)]
        return copy

    def next_call(self) -> int:
        """The number of a call of zbpipe's I."""
        self._calls += 1
        return self._calls - 1

    def note(self, groups: Iterable[_C.ParamGroup], call: int) -> None:
        """Groups are from this call of I."""
        for group in groups:
            self._call_of[group] = call

    def calls_of(self, groups: tuple[Any, ...]) -> tuple[int, ...]:
        """The calls of I that the groups are from; nothing for what is no group, which the pass will refuse."""
        known = (self._call_of.get(group) for group in groups if isinstance(group, _C.ParamGroup))
        return tuple(sorted({call for call in known if call is not None}))


class PhaseContext:
    """Marks its beginning and its end in recordings, whatever happens between.

    Of I, W and B one within another on a thread only the outermost is marked: a stage's method, say, and not zbpipe's
    function that it calls.
    """

    def __init__(
        self,
        recordings: Sequence[Marks],
        kind: str,
        stage: int | None = None,
        microbatch: int | None = None,
        calls: tuple[int, ...] | None = None,
    ) -> None:
        self._recordings = recordings
        self._what = (kind, stage, microbatch, calls)
        self._open: list[tuple[Marks, Open]] = []

    def __enter__(self) -> None:
        for recording in self._recordings:
            opened = recording.begin(*self._what)
            if opened is not None:
                self._open.append((recording, opened))

    def __exit__(self, *error: object) -> None:
        while self._open:
            recording, opened = self._open.pop()
            recording.end(opened, error[1])


def phase_of(p: Open, end: int | None, marks: Sequence[tuple[int, ...]]) -> Phase:
    assert end is not None
    spans = marks[p.begin : end]
    start = marks[0][0]
    return Phase(
        kind=p.kind,
        stage=p.stage,
        microbatch=p.microbatch,
        thread=marks[p.begin][8],
        begin_ns=marks[p.begin][0] - start,
        end_ns=marks[end][0] - start,
        live_begin=marks[p.begin][2],
        live_end=marks[end][2],
        peak=max(span[3] for span in spans),
        allocated=sum(span[4] for span in spans),
        freed=sum(span[5] for span in spans),
        allocations=sum(span[6] for span in spans),
        frees=sum(span[7] for span in spans),
    )
