"""The phases of a step, marked in recordings while they run; zbpipe's passes mark themselves."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from zbpipe import _C, passes
from zbpipe._formatting import argument
from zbpipe.memory._results import label

PASSES = ("I", "W", "B")
_ENDED = "_zbpipe_ended"  # an exception's own: by recording the innermost phase that it has ended. It may be pickled.
_numbers = itertools.count()


@dataclass
class _Place:
    """A thread of a recording, and the outermost pass within which it is."""

    outermost: Open | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.place = _Place()


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
    """The phases of a recording, by the numbers of its marks. It marks nothing while ``is_running`` is False."""

    def __init__(self, mark: Callable[[], int | None]) -> None:
        self.is_running = False
        self.lost = 0  # for want of memory
        self.watched: weakref.WeakSet[Any] = weakref.WeakSet()  # stages: _watch.py
        self._mark = mark
        self._number = next(_numbers)
        self._phases: list[Open] = []
        self._thread = _Thread()
        self._calls = 0
        self._call_of: weakref.WeakKeyDictionary[_C.ParamGroup, int] = weakref.WeakKeyDictionary()

    def mark(self) -> int | None:
        return self._mark() if self.is_running else None

    def begin(self, kind: str, stage: int | None, microbatch: int | None, calls: tuple[int, ...] | None) -> Open | None:
        place = self._thread.place
        if not self.is_running or (kind in PASSES and place.outermost is not None):
            return None
        mark = self.mark()
        if mark is None:
            self.lost += 1
            return None
        opened = Open(kind, stage, microbatch, mark, place, calls=calls)
        if kind in PASSES:
            place.outermost = opened
        self._phases.append(opened)
        return opened

    def end(self, opened: Open, error: BaseException | None = None) -> None:
        if error is not None:
            what = label(opened.kind, opened.stage, opened.microbatch)
            vars(error).setdefault(_ENDED, {}).setdefault(self._number, what)
        if opened.place.outermost is opened:
            opened.place.outermost = None
        opened.end = self.mark()

    def ended(self) -> list[Open]:
        """The phases that have ended, by their beginnings."""
        return sorted((p for p in list(self._phases) if p.end is not None), key=lambda p: p.begin)

    def ended_by(self, error: BaseException) -> str:
        """The label of the innermost phase that an exception has ended, or ""."""
        ended: dict[int, str] = vars(error).get(_ENDED, {})
        return ended.get(self._number, "")

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
        if not isinstance(kind, str):
            raise TypeError(f"kind is {argument(kind)}; expected the phase's name, and its number as microbatch=...")
        self._recordings = recordings
        self._what = (kind, stage, microbatch, calls)
        self._open: list[tuple[Marks, Open]] = []

    def __enter__(self) -> None:
        for recording in self._recordings:
            opened = recording.begin(*self._what)
            if opened is not None:
                self._open.append((recording, opened))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._open:
            recording, opened = self._open.pop()
            recording.end(opened, error)


class Running:
    """The recordings that run, and the observer of zbpipe's passes as long as there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.recordings: tuple[Marks, ...] = ()

    def add(self, recording: Marks) -> None:
        with self._lock:
            self.recordings = (*self.recordings, recording)
            passes.observer = self

    def remove(self, recording: Marks) -> None:
        with self._lock:
            self.recordings = tuple(r for r in self.recordings if r is not recording)
            if not self.recordings:
                passes.observer = None

    def input_pass(self, *args: Any) -> tuple[tuple[torch.Tensor | None, ...], list[_C.ParamGroup]]:
        calls = [(recording, recording.next_call()) for recording in self.recordings]
        with contextlib.ExitStack() as stack:
            for recording, call in calls:
                stack.enter_context(PhaseContext([recording], "I", None, call, (call,)))
            result = _C.input_pass(*args)
        for recording, call in calls:
            recording.note(result[1], call)
        return result

    def weight_pass(self, groups: tuple[Any, ...], *how: Any) -> None:
        with contextlib.ExitStack() as stack:
            for recording in self.recordings:
                calls = recording.calls_of(groups)
                stack.enter_context(PhaseContext([recording], "W", None, calls[0] if len(calls) == 1 else None, calls))
            _C.weight_pass(groups, *how)

    def backward(self, backward: Callable[..., None], /, *args: Any) -> None:
        with PhaseContext(self.recordings, "B"):
            backward(*args)


running = Running()
