"""Recordings of an allocator over a step, and the phases in them.

Note [What a recording counts]

live bytes
    Blocks that were handed out since the recording began and not taken back yet, on all threads. What was there
    before (weights, optimizer state, the inputs) is not in it; gradients are, once they come into being.
bytes
    What was asked for. Allocators round up; that is not in it.
a phase's peak
    The most live bytes at any moment between its beginning and its end, whichever thread they come from.
held from I to W
    Blocks that were live when I of a microbatch returned and that were taken back while its W ran: all that was
    kept for W, needed or not. But for blocks that were handed out within another microbatch's forward, I, W or B, on
    that phase's thread: they are that one's (what it sent, say), and it is chance that they go during this W.
    What no W takes back is not in it, however much W reads it: torch keeps inputs and gradients that it received from
    another rank in buffers that it never frees, where zbpipe holds them until W frees them.
    One kind of chance remains: a send of what this very I computed that is let go of within its W.
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from zbpipe._formatting import in_words
from zbpipe.memory._export import Path, draw, export, held_table, phase_table
from zbpipe.memory._log import (
    PASSES,
    Allocation,
    HeldMicrobatch,
    Log,
    Open,
    Pair,
    Phase,
    events_of,
    highest,
    marks_of,
    pairs_of,
    phase_of,
)
from zbpipe.memory._out_of_memory import beginning, report
from zbpipe.memory._phases import PhaseContext, running, stages_in, unwatch, watch


class Recording:
    """What :func:`record` returns: to be entered once, filled while it is, and read at any time.

    The counters and ``phases`` can be read while it runs; what needs the log (``held``, ``events``, :meth:`plot`,
    :meth:`export`) afterwards. Of one that was not entered yet each raises RuntimeError. ``device`` is the
    ``torch.device`` whose allocator is recorded.
    """

    def __init__(self, log: Log, device: torch.device, max_events: int, folder: Path | None = None) -> None:
        self.device = device
        self._log, self._max_events = log, max_events
        self._folder = None if folder is None else pathlib.Path(folder).absolute()  # the program may leave this one
        self._since: tuple[int, object] | None = None  # for the report of a lack of memory
        self._is_running = self._is_over = False
        self._opened: list[Open] = []
        self._lost = 0  # phases, for want of memory
        self._thread = threading.local()  # its outermost pass
        self._first_call = 0  # of Running.calls
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._unsplit: set[int] = set()
        self._held_pairs: list[Pair] | None = None  # when it is over

    # ---- recording

    def __enter__(self) -> Recording:
        if self._is_running or self._is_over:
            raise RuntimeError("a recording can be entered once; call zbpipe.memory.record() again for another one")
        self._log.start(gc.get_objects())
        self._since = None if self._folder is None else beginning()
        self._is_running = True
        running.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        running.remove(self)
        unwatch(self)
        self._log.mark()
        self._is_running, self._is_over = False, True
        displaced = self._log.stop()
        if self._folder is not None and self._since is not None:
            report(self._folder, self, error, self._since)
        self._since = None
        if displaced:
            warnings.warn(
                "another CPU allocator was installed while memory was recorded; what it handed out is not counted",
                RuntimeWarning,
                stacklevel=2,
            )

    def phase(self, kind: str, *, stage: int | None = None, microbatch: int | None = None) -> PhaseContext:
        """A context manager that marks a phase, such as ``rec.phase("forward", microbatch=3)``.

        Phases may nest and overlap, and end on another thread than their own. Outside of the recording they mark
        nothing. "I" and "W" of the same stage and microbatch are paired for ``held``; of "I", "W" and "B" within one
        another on a thread only the outermost is marked, so that zbpipe's own marks go away where there are better
        ones.
        """
        return PhaseContext([self], kind, stage, microbatch)

    def watch(self, stages: Any) -> None:
        """Marks each forward, I, W and whole backward of pipeline stages from now to the recording's end.

        Calls of zbpipe's own functions are marked without being watched, with the number of the call of I as their
        microbatch, unless a watched stage makes them.

        Args:
            stages: a stage or a schedule of ``torch.distributed.pipelining``, or an iterable of them. Attributes of the
                stage hide the methods that a schedule calls meanwhile, and call what the stage's class has at that
                time: zbpipe may be patched in and out meanwhile. A stage that is watched already is watched once.

        Raises:
            TypeError: it is none of these.
            RuntimeError: the recording is not running.
        """
        if not self._is_running:
            raise RuntimeError("watch() was called outside of the recording; call it within its with block")
        for stage in list(stages_in(stages)):
            if getattr(stage, "is_first", False):
                self._unsplit.add(stage.stage_index)
            watch(self, stage)

    def _begin(self, kind: str, stage: int | None, microbatch: int | None, calls: Any) -> Open | None:
        outermost: Open | None = getattr(self._thread, "outermost", None)
        if not self._is_running or (kind in PASSES and outermost is not None and outermost.is_open):
            return None
        if calls is not None:
            calls = tuple(call - self._first_call for call in calls if call >= self._first_call)
            microbatch = calls[0] if len(calls) == 1 else None
        if (mark := self._log.mark()) is None:
            self._lost += 1
            return None
        opened = Open(kind, stage, microbatch, mark, calls)
        if kind in PASSES:
            self._thread.outermost = opened
        self._opened.append(opened)
        return opened

    def _end(self, opened: Open) -> None:
        opened.is_open = False
        opened.end = self._log.mark() if self._is_running else None

    def _phases_ended(self) -> list[Open]:
        """By their beginnings."""
        return sorted((p for p in list(self._opened) if p.end is not None), key=lambda p: p.begin)

    # ---- totals

    @property
    def _readable(self) -> Log:
        """The log, of which something is known by now."""
        if not self._is_running and not self._is_over:
            raise RuntimeError("the recording has not been entered yet, and knows nothing; use it in a with statement")
        if why := getattr(self._log, "unreadable", ""):
            raise RuntimeError(why)
        return self._log

    @property
    def live(self) -> int:
        """Live bytes now, or at the recording's end."""
        return int(self._readable.counters()["live"])

    @property
    def peak(self) -> int:
        """The most live bytes at any moment."""
        return max(mark.peak for mark in marks_of(self._readable))

    @property
    def allocated(self) -> int:
        """Bytes handed out."""
        return sum(mark.allocated for mark in marks_of(self._readable))

    @property
    def freed(self) -> int:
        """Bytes taken back, of those that were handed out in the recording."""
        return sum(mark.freed for mark in marks_of(self._readable))

    @property
    def allocations(self) -> int:
        """Blocks handed out."""
        return sum(mark.allocations for mark in marks_of(self._readable))

    @property
    def older_frees(self) -> tuple[int, int]:
        """Blocks that were there before the recording and were taken back in it, and their bytes.

        On the CPU only blocks from earlier or enclosing recordings are known, and counted; on CUDA all are.
        """
        counters = self._readable.counters()
        return counters["older_frees"], counters["older_freed"]

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

    # ---- phases

    @property
    def phases(self) -> list[Phase]:
        """The phases that have ended, by their beginnings."""
        ended, marks = self._phases_ended(), marks_of(self._readable)
        return [phase_of(p, marks) for p in ended]

    @property
    def held(self) -> list[HeldMicrobatch]:
        """What was held from I to W, per stage and microbatch, in the order of the I.

        First stages are left out: torch's schedules do not split their backward.

        Raises:
            RuntimeError: the recording still runs, or its log is not whole.
        """
        return [HeldMicrobatch(pair.stage, pair.microbatch, sum(pair.freed.values())) for pair in self._pairs()]

    @property
    def held_peak(self) -> int:
        """The most bytes that were held at once, of microbatches between their I and W. Raises as ``held``."""
        return highest(self._pairs())

    def _pairs(self) -> list[Pair]:
        if self._held_pairs is None:
            self._held_pairs = pairs_of(self._phases_ended(), self._unsplit, self._whole_log("held"))
        return self._held_pairs

    # ---- the log

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

    def plot(self, path: Path, title: str = "") -> None:
        """Draws live bytes over time with the phases shaded, as PNG or what the name's suffix says.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            RuntimeError: the recording still runs, or its log is not whole.
        """
        log = self._whole_log("plot()")
        draw(title, str(self.device), self.phases, events_of(log), marks_of(log)[-1].events).savefig(path)

    def export(self, path: Path) -> None:
        """Writes the recording as a Chrome trace, for Perfetto or chrome://tracing: live bytes as a counter, and a
        slice per phase. The name ends in ``.json`` or ``.json.gz``.

        Raises:
            ValueError: another suffix.
            RuntimeError: the recording still runs, or its log is not whole.
        """
        log = self._whole_log("export()")
        export(path, str(self.device), self.phases, events_of(log))

    def __str__(self) -> str:
        if not self._is_running and not self._is_over:
            return f"{self.device}: not entered yet"
        peak, live, allocated = map(in_words, (self.peak, self.live, self.allocated))
        lines = [f"{self.device}: peak {peak}, live {live}, {allocated} in {self.allocations} allocations"]
        lines += [f"incomplete: {self.incomplete}"] if self.incomplete else []
        lines += ["", phase_table(phases)] if (phases := self.phases) else []
        with contextlib.suppress(RuntimeError):  # without a whole log nobody knows
            held = self.held
            lines += (
                ["", f"held from I to W, at most {in_words(self.held_peak)} at once", held_table(held)] if held else []
            )
        return "\n".join(lines)
