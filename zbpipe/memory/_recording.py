"""Recordings of an allocator over a step, and the phases in them.

Note [What a recording counts]

live bytes
    Blocks that were handed out since the recording began and not taken back yet, on all threads. What was there
    before (weights, optimizer state, the inputs) is not in it; gradients are, once they come into being.
bytes
    What was asked for. Allocators round up; that is not in it.
a phase's peak
    The most live bytes at any moment between its beginning and its end, whichever thread they come from.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import operator
import os
import pathlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zbpipe import _C, passes
from zbpipe._formatting import argument, in_words
from zbpipe._stage import self_check
from zbpipe.memory._export import Path, draw, export, peak_table, phase_table
from zbpipe.memory._log import ENDED, Allocation, AtPeak, Ended, Log, Marks, Named, Phase, events_of, label, phase_of
from zbpipe.memory._stages import METHODS, Method, lock, stages_in

_PASSES = ("I", "W", "B")
_running: list[Recording] = []  # under the lock


def _observed(kind: str, run: Callable[..., Any], /, *args: Any) -> Any:
    """Runs a pass of zbpipe's, marked in the recordings that run."""
    with contextlib.ExitStack() as stack:
        for recording in tuple(_running):
            stack.enter_context(recording.phase(kind))
        return run(*args)


class Recording:
    """What :func:`record` returns: a context manager, to be entered once.

    Counters and ``phases`` can be read from the beginning of the block on, and before it raise RuntimeError.
    :meth:`events`, :meth:`plot` and :meth:`export` need the log, and can be called after the block. ``device`` is the
    ``torch.device`` whose allocator is recorded.
    """

    def __init__(self, log: Log, device: torch.device, max_events: int, folder: Path | None, trace: bool) -> None:
        self.device, self._is_traced = device, trace
        self._at_peak: list[AtPeak] | None = None
        self._why_no_peak = "the recording did not trace; use record(trace=True)"
        self._log, self._max_events = log, max_events
        self._folder = None if folder is None else pathlib.Path(folder).absolute()  # the program may leave this one
        self._report: Callable[[Recording, BaseException | None], None] | None = None
        self._is_running = self._is_over = False
        self._ended: list[Ended] = []
        self._lost = 0  # marks, for want of memory
        self._in_pass: set[int] = set()  # threads
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()

    def __enter__(self) -> Recording:
        if self._is_running or self._is_over:
            raise RuntimeError("a recording can be entered once; call zbpipe.memory.record() again for another one")
        self_check.look()  # whose tensors are not the program's
        self_check.look_at_regions()
        self._log.start(gc.get_objects())
        if self._folder is not None:
            from zbpipe.memory._out_of_memory import reporter  # with which the leak tools come

            self._report = reporter(self._folder)
        if self._is_traced:
            _C.trace_start()
        self._is_running = True
        with lock:
            _running.append(self)
            passes.observer = _observed
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self._is_running, self._is_over = False, True
        with lock:
            _running.remove(self)
            passes.observer = _observed if _running else None
            for stage, name in itertools.product(self._watched, METHODS):
                method = vars(stage).get(name)
                if isinstance(method, Method):
                    method.recordings.discard(self)
                    if not method.recordings:
                        del vars(stage)[name]
                        vars(stage).update({} if method.before is None else {name: method.before})
        with contextlib.ExitStack() as end:
            if self._is_traced:
                end.callback(_C.trace_stop)
            self._log.mark()
            displaced = self._log.stop()
            if self._is_traced:
                self._look_at_the_peak()
        report, self._report = self._report, None
        if report is not None:
            report(self, error)
        if displaced:
            warnings.warn(
                "another CPU allocator was installed while memory was recorded, and what it handed out is not counted; "
                "install it before the recording",
                RuntimeWarning,
                stacklevel=2,
            )

    def _look_at_the_peak(self) -> None:
        from zbpipe.memory._peak import at_peak

        trace_of = getattr(self._log, "trace_of", _C.trace_of)
        try:
            log = self._whole_log("at_peak")
            self._at_peak = at_peak(log, self._marks, self._ended, str(self.device), trace_of)
        except Exception as failed:  # the program's own, for want of memory say, may be on its way
            self._why_no_peak = f"{type(failed).__name__}: {failed}"

    def phase(
        self, kind: str, *, stage: int | None = None, microbatch: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Marks a phase, such as ``with rec.phase("forward", microbatch=3)``.

        Phases may nest and overlap, and end on another thread than their own. Outside of the recording they mark
        nothing. zbpipe's passes mark themselves as "I", "W" or "B". A phase of these names on the same thread replaces
        the marks within it, since it may name the stage and the microbatch.

        Args:
            kind: the phase's name.
            stage, microbatch: its numbers, for its label.

        Returns:
            A context manager, to be entered once.

        Raises:
            TypeError: ``kind`` is no str, or a number is no integer.
        """
        if not isinstance(kind, str):
            raise TypeError(f"kind is {argument(kind)}; expected the phase's name, and its number as microbatch=...")
        stage, microbatch = (None if number is None else operator.index(number) for number in (stage, microbatch))
        return _Marked(self._mark, self._in_pass, self._ended, (kind, stage, microbatch))

    def _mark(self) -> int | None:
        """The number of a mark that is made now, None outside of the recording."""
        mark: int | None = self._log.mark() if self._is_running else None
        self._lost += mark is None and self._is_running
        return mark

    def watch(self, stages: Any) -> None:
        """Marks each forward, I, W and whole backward of pipeline stages from now to the recording's end.

        Meanwhile attributes of a stage hide the methods that a schedule calls. They call what the stage's class has at
        that time, so zbpipe may be patched in and out. Other calls of zbpipe's own functions mark themselves.

        Args:
            stages: a stage or a schedule of ``torch.distributed.pipelining``, or an iterable of them. A stage that is
                watched already is watched once.

        Raises:
            TypeError: it is none of these.
            RuntimeError: the recording is not running.
        """
        if not self._is_running:
            raise RuntimeError("watch() was called outside of the recording; call it within its with block")
        given = list(stages_in(stages))
        with lock:
            self._watched.update(given)
            for stage, name in itertools.product(given, METHODS):
                if not isinstance(vars(stage).get(name), Method):
                    vars(stage)[name] = Method(stage, name)
                vars(stage)[name].recordings.add(self)

    @property
    def _readable(self) -> Log:
        """The log, of which something is known by now."""
        if not self._is_running and not self._is_over:
            raise RuntimeError("the recording has not been entered yet, and knows nothing; use it in a with statement")
        if why := getattr(self._log, "unreadable", ""):
            raise RuntimeError(why)
        return self._log

    @property
    def _marks(self) -> Marks:
        return Marks(*zip(*self._readable.marks(), strict=True))

    @property
    def live(self) -> int:
        """Live bytes now, or at the recording's end."""
        return int(self._readable.counters()["live"])

    @property
    def peak(self) -> int:
        """The most live bytes at any moment."""
        return int(max(self._marks.peak))

    @property
    def allocated(self) -> int:
        """Bytes handed out."""
        return sum(self._marks.allocated)

    @property
    def allocations(self) -> int:
        """Blocks handed out."""
        return sum(self._marks.allocations)

    @property
    def incomplete(self) -> str:
        """Empty, or what the recording lacks. Counters and phases are exact even when the log is not whole."""
        counters = self._readable.counters()
        lacks = {
            "blocks could not be followed for want of memory": counters["untracked"],
            f"events did not fit into the log (max_events={self._max_events})": counters["dropped"],
            "phases could not be marked for want of memory": self._lost,
        }
        return "; ".join(f"{count} {what}" for what, count in lacks.items() if count)

    @property
    def phases(self) -> list[Phase]:
        """The phases that have ended, in the order in which they began."""
        ended, marks = sorted(self._ended, key=operator.attrgetter("begin")), self._marks
        return [phase_of(marks, phase) for phase in ended]

    def _whole_log(self, what: str) -> Log:
        log = self._readable
        if not self._is_over:
            raise RuntimeError(f"{what} needs the recording's log, and it still runs; leave its with block first")
        if self._max_events == 0:
            raise RuntimeError(f"{what} needs a log, and the recording has none; record with a larger max_events")
        if log.counters()["dropped"]:
            raise RuntimeError(f"{what} needs the whole log, and {self.incomplete}; record with a larger one")
        return log

    def events(self) -> Iterator[Allocation]:
        """All events in order, times in ns since the recording began.

        Raises:
            RuntimeError: the recording still runs, or its log is not whole.
        """
        return map(Allocation._make, events_of(self._whole_log("events()")))

    @property
    def at_peak(self) -> list[AtPeak]:
        """What lived at the peak, the most bytes first, and who held it at the end of the with block.

        Raises:
            RuntimeError: ``trace`` was not asked for, the recording still runs, or its log is not whole.
        """
        self._whole_log("at_peak")
        if self._at_peak is None:
            raise RuntimeError(f"at_peak is not known: {self._why_no_peak}")
        return self._at_peak

    def plot(self, path: Path, title: str = "") -> None:
        """Draws live bytes over time with the phases shaded, as PNG or what the name's suffix says.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            RuntimeError: the recording still runs, or its log is not whole.
        """
        log = self._whole_log("plot()")
        draw(title, str(self.device), self.phases, events_of(log), self._marks.events[-1]).savefig(os.fspath(path))

    def export(self, path: Path) -> None:
        """Writes the recording as a Chrome trace, for Perfetto or chrome://tracing: live bytes as a counter, and a
        slice per phase. The name ends in ``.json`` or ``.json.gz``.

        Raises:
            ValueError: another suffix.
            RuntimeError: the recording still runs, or its log is not whole.
        """
        export(path, str(self.device), self.phases, events_of(self._whole_log("export()")))

    def __str__(self) -> str:
        if not self._is_running and not self._is_over:
            return f"{self.device}: not entered yet"
        if why := getattr(self._log, "unreadable", ""):
            return f"{self.device}: {why}"
        peak, live, allocated = map(in_words, (self.peak, self.live, self.allocated))
        lines = [f"{self.device}: peak {peak}, live {live}, {allocated} in {self.allocations} allocations"]
        lines += [f"incomplete: {self.incomplete}"] if self.incomplete else []
        lines += ["", phase_table(phases)] if (phases := self.phases) else []
        lines += ["", "at the peak", peak_table(self._at_peak)] if self._at_peak else []
        return "\n".join(lines)


class _Marked(contextlib.AbstractContextManager[None]):
    """What Recording.phase() returns: the phase's marks, if it has any."""

    def __init__(self, mark: Callable[[], int | None], in_pass: set[int], ended: list[Ended], named: Named) -> None:
        self._mark, self._in_pass, self._ended, self._named = mark, in_pass, ended, named
        self._thread: int | None = None  # that entered it
        self._begin: int | None = None

    def __enter__(self) -> None:
        if self._thread is not None:
            raise RuntimeError("a phase can be entered once; call phase() again for another one")
        self._thread = threading.get_ident()
        is_pass = self._named[0] in _PASSES
        if not is_pass or self._thread not in self._in_pass:
            self._begin = self._mark()
        if is_pass and self._begin is not None:
            self._in_pass.add(self._thread)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._begin is None:
            return
        for raised in (error, getattr(error, "__cause__", None)):  # of what a pass raises, the cause alone goes on
            if raised is not None:
                vars(raised).setdefault(ENDED, label(*self._named))
        if self._named[0] in _PASSES:
            self._in_pass.discard(self._thread)
        if (end := self._mark()) is not None:
            self._ended.append(Ended(self._named, self._begin, end))
