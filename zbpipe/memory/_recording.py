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
import functools
import gc
import inspect
import struct
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from zbpipe import _C, _observer
from zbpipe._text import megabytes, table
from zbpipe._torch.pipelining import stages_of

Path = str | PathLike[str]

EVENT = struct.Struct("QQQQII")
RANGE = struct.Struct("2I")
ALLOC, FREE, FREE_OLDER = range(3)

PASSES = ("I", "W", "B")

_METHODS: dict[str, Callable[[dict[str, Any]], str]] = {
    "forward_one_chunk": lambda _: "forward",
    "backward_one_chunk": lambda arguments: "B" if arguments.get("full_backward", True) else "I",
    "backward_weight_one_chunk": lambda _: "W",
}
"""A stage's methods, and from their arguments the kind of phase that a call is."""


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
        parts = [self.kind]
        parts += [] if self.stage is None else [f"stage {self.stage}"]
        parts += [] if self.microbatch is None else [f"microbatch {self.microbatch}"]
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


class Source(Protocol):
    """What feeds a recording."""

    def start(self) -> None: ...

    def stop(self) -> bool: ...

    def mark(self) -> int | None: ...

    def counters(self) -> dict[str, int]: ...

    @property
    def log(self) -> _C.Recorder: ...


class _CpuSource:
    """torch's CPU allocator, tapped natively: csrc/shim/zbp_tap.h."""

    def __init__(self, max_events: int) -> None:
        self.log = _C.Recorder(max_events)
        self.stop, self.mark, self.counters = self.log.stop, self.log.mark, self.log.counters

    def start(self) -> None:
        self.log.start()
        try:
            self.log.adopt(gc.get_objects())
        except BaseException:
            self.log.stop()
            raise


class _Thread(threading.local):
    """The pass within which a thread of a recording is: of those within one another only the outermost is marked."""

    def __init__(self) -> None:
        self.place = _Place()


class _Place:
    outermost: _Open | None = None


@dataclass
class _Open:
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


class _PhaseContext:
    """Marks its beginning and its end in recordings, whatever happens between.

    Of I, W and B one within another on a thread only the outermost is marked: a stage's method, say, and not zbpipe's
    function that it calls.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        kind: str,
        stage: int | None = None,
        microbatch: int | None = None,
        calls: tuple[int, ...] | None = None,
    ) -> None:
        self._recordings = recordings
        self._what = (kind, stage, microbatch, calls)
        self._open: list[tuple[Recording, _Open]] = []

    def __enter__(self) -> None:
        for recording in self._recordings:
            opened = recording._begin(*self._what)
            if opened is not None:
                self._open.append((recording, opened))

    def __exit__(self, *error: object) -> None:
        while self._open:
            recording, opened = self._open.pop()
            recording._end(opened)


class Recording:
    """What :func:`record` returns: to be entered once, filled while it is, and read at any time.

    The counters and ``phases`` can be read while it runs; what needs the log (``held``, ``events``, :meth:`plot`,
    :meth:`export`) afterwards.
    """

    def __init__(self, source: Source, device: torch.device, max_events: int) -> None:
        self.device = device
        self._source = source
        self._max_events = max_events
        self._is_running = False
        self._is_over = False
        self._phases: list[_Open] = []
        self._lost_phases = 0  # for want of memory
        self._watched: weakref.WeakSet[_Watch] = weakref.WeakSet()
        self._unsplit: set[int] = set()
        self._thread = _Thread()
        self._calls = 0
        self._held_pairs: list[_Pair] | None = None  # when it is over
        self._call_of: weakref.WeakKeyDictionary[_C.ParamGroup, int] = weakref.WeakKeyDictionary()

    # ---- recording

    def __enter__(self) -> Recording:
        if self._is_running or self._is_over:
            raise RuntimeError("a recording can be entered once; call zbpipe.memory.record() again for another one")
        self._source.start()
        self._is_running = True
        _running.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _running.remove(self)
        _leave(self)
        self._mark()
        self._is_running = False
        self._is_over = True
        if self._source.stop():
            warnings.warn(
                "another CPU allocator was installed while memory was recorded; what it handed out is not counted",
                RuntimeWarning,
                stacklevel=2,
            )

    def phase(
        self, kind: str, *, stage: int | None = None, microbatch: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """A context manager that marks a phase, such as ``rec.phase("forward", microbatch=3)``.

        Phases may nest and overlap, and end on another thread than their own. Outside of the recording they mark
        nothing. "I" and "W" of the same stage and microbatch are paired for ``held``; of "I", "W" and "B" within one
        another on a thread only the outermost is marked, so that zbpipe's own marks go away where there are better
        ones.
        """
        return _PhaseContext([self], kind, stage, microbatch)

    def watch(self, stages: Any) -> None:
        """Marks each forward, I, W and whole backward of pipeline stages from now to the recording's end.

        Calls of zbpipe's own functions are marked without being watched, with the number of the call of I as their
        microbatch, unless a watched stage makes them.

        Args:
            stages: a stage or a schedule of ``torch.distributed.pipelining``, or an iterable of them. The methods that
                a schedule calls are hidden by attributes of the stage meanwhile, one for all recordings that watch
                it, which call what the stage's class has at that time: zbpipe may be patched in and out meanwhile.
                A stage that is watched already is watched once.

        Raises:
            TypeError: it is none of these.
            RuntimeError: the recording is not running.
        """
        if not self._is_running:
            raise RuntimeError("watch() was called outside of the recording; call it within its with block")
        for stage in list(_stages_of(stages)):
            if getattr(stage, "is_first", False):
                self._unsplit.add(stage.stage_index)
            _join(self, stage)

    def _mark(self) -> int | None:
        return self._source.mark() if self._is_running else None

    def _begin(
        self, kind: str, stage: int | None, microbatch: int | None, calls: tuple[int, ...] | None
    ) -> _Open | None:
        if not self._is_running or (kind in PASSES and self._thread.place.outermost is not None):
            return None
        mark = self._mark()
        if mark is None:
            self._lost_phases += 1
            return None
        opened = _Open(kind, stage, microbatch, mark, self._thread.place, calls=calls)
        if kind in PASSES:
            opened.place.outermost = opened
        self._phases.append(opened)
        return opened

    def _end(self, opened: _Open) -> None:
        if opened.place.outermost is opened:
            opened.place.outermost = None
        opened.end = self._mark()

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls - 1

    def _calls_of(self, groups: Any) -> tuple[int, ...]:
        """The calls of I that the groups are from; nothing for what is no group, which the pass will refuse."""
        if not isinstance(groups, list):
            return ()
        known = (self._call_of.get(group) for group in groups if isinstance(group, _C.ParamGroup))
        return tuple(sorted({call for call in known if call is not None}))

    # ---- totals

    def _counters(self) -> dict[str, int]:
        self._require_begun()
        return self._source.counters()

    def _require_begun(self) -> None:
        if not self._is_running and not self._is_over:
            raise RuntimeError("the recording has not been entered yet, and knows nothing; use it in a with statement")

    @property
    def live(self) -> int:
        """Live bytes now, or at the recording's end."""
        return self._counters()["live"]

    @property
    def peak(self) -> int:
        """The most live bytes at any moment."""
        return self._counters()["peak"]

    @property
    def allocated(self) -> int:
        """Bytes handed out."""
        return self._counters()["allocated"]

    @property
    def freed(self) -> int:
        """Bytes taken back, of those that were handed out in the recording."""
        return self._counters()["freed"]

    @property
    def allocations(self) -> int:
        """Blocks handed out."""
        return self._counters()["allocations"]

    @property
    def older_frees(self) -> tuple[int, int]:
        """Blocks that were there before the recording and were taken back in it, and their bytes.

        On the CPU only blocks from earlier or enclosing recordings are known, and counted; on CUDA all are.
        """
        counters = self._counters()
        return counters["older_frees"], counters["older_freed"]

    @property
    def incomplete(self) -> str:
        """Empty, or what the recording lacks. Counters and phases are exact even when the log is not whole."""
        counters = self._counters()
        return "; ".join(
            f"{count} {what}"
            for count, what in (
                (counters["untracked"], "blocks could not be followed for want of memory"),
                (counters["dropped"], f"events did not fit into the log (max_events={self._max_events})"),
                (self._lost_phases, "phases could not be marked for want of memory"),
            )
            if count
        )

    # ---- phases

    @property
    def phases(self) -> list[Phase]:
        """The phases that have ended, by their beginnings."""
        self._require_begun()
        ended = self._ended()
        marks = self._source.log.marks()
        return [_phase_of(p, p.end, marks) for p in ended]

    def _ended(self) -> list[_Open]:
        return sorted((p for p in list(self._phases) if p.end is not None), key=lambda p: p.begin)

    @property
    def held(self) -> list[HeldMicrobatch]:
        """What was held from I to W, per stage and microbatch, in the order of the I. Needs the log.

        First stages are left out: torch's schedules do not split their backward.

        Raises:
            RuntimeError: the recording still runs, or its log is not whole.
        """
        return [HeldMicrobatch(pair.stage, pair.microbatch, sum(pair.bytes)) for pair in self._pairs()]

    @property
    def held_peak(self) -> int:
        """The most bytes that were held at once, over all microbatches whose I has returned and whose W has not begun.

        Raises:
            RuntimeError: as ``held``.
        """
        changes: list[tuple[int, int]] = []
        for pair in self._pairs():
            changes.append((pair.at, sum(pair.bytes)))
            changes += [(begin, -size) for begin, size in zip(pair.begins, pair.bytes, strict=True)]
        level = peak = 0
        for _, change in sorted(changes):
            level += change
            peak = max(peak, level)
        return peak

    def _pairs(self) -> list[_Pair]:
        log = self._whole_log("held")
        if self._held_pairs is None:
            self._held_pairs = self._pair(log)
        return self._held_pairs

    def _pair(self, log: _C.Recorder) -> list[_Pair]:
        pairs: dict[object, _Pair] = {}
        found: list[_Pair] = []
        ended = self._ended()
        for p in ended:
            assert p.end is not None
            key: object = (p.stage, p.microbatch) if p.calls is None else p.calls
            if p.kind == "I" and p.stage not in self._unsplit:
                pairs[key] = _Pair(p.stage, p.microbatch, p.end)
                found.append(pairs[key])
            elif p.kind == "W" and p.stage not in self._unsplit:
                if p.calls is not None and len(p.calls) > 1:
                    served = [pairs[call,] for call in p.calls if (call,) in pairs]
                    pair = _Pair(p.stage, None, max((q.at for q in served), default=p.begin))
                    found.append(pair)
                elif key in pairs:
                    pair = pairs[key]
                else:
                    continue  # its I was before the recording
                pair.begins.append(p.begin)
                pair.bytes.append(log.held(pair.at, p.begin, p.end, _of_others(p, ended)))
        return [pair for pair in found if pair.begins]

    # ---- the log

    def _whole_log(self, what: str) -> _C.Recorder:
        self._require_begun()
        if not self._is_over:
            raise RuntimeError(f"{what} needs the recording's log, and it still runs; leave its with block first")
        if self._max_events == 0:
            raise RuntimeError(f"{what} needs a log, and the recording has none; record with a larger max_events")
        dropped = self._source.counters()["dropped"]
        if dropped:
            raise RuntimeError(
                f"{what} needs the whole log, and {dropped} events did not fit into max_events={self._max_events}; "
                "record with a larger one"
            )
        return self._source.log

    def events(self) -> Iterator[Allocation]:
        """All events in order, times in ns since the recording began.

        Raises:
            RuntimeError: the recording still runs, or its log is not whole.
        """
        log = self._whole_log("events()")
        start = log.marks()[0][0]
        live = 0
        for time, address, size, _, thread, kind in EVENT.iter_unpack(log.events()):
            live += size if kind == ALLOC else -size if kind == FREE else 0
            yield Allocation(time - start, address, size if kind == ALLOC else -size, live, thread, kind == FREE_OLDER)

    def plot(self, path: Path, title: str = "") -> None:
        """Draws live bytes over time with the phases shaded, as PNG or what the name's suffix says.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            RuntimeError: the recording still runs, or its log is not whole.
        """
        from zbpipe.memory._plot import plot

        plot(self, path, title)

    def export(self, path: Path) -> None:
        """Writes the recording for a viewer.

        By the name's suffix: ``.json`` or ``.json.gz`` is a Chrome trace (Perfetto, chrome://tracing) with live bytes
        as a counter and a slice per phase; ``.pickle`` is a snapshot for pytorch.org/memory_viz, with the phase in
        which each block was handed out as its stack.

        Raises:
            ValueError: another suffix.
            RuntimeError: the recording still runs, or its log is not whole.
        """
        from zbpipe.memory._export import export

        export(self, path)

    def __str__(self) -> str:
        if not self._is_running and not self._is_over:
            return f"{self.device}: not entered yet"
        counters = self._source.counters()
        lines = [
            f"{self.device}: peak {megabytes(counters['peak'])} MB, live {megabytes(counters['live'])} MB, "
            f"{megabytes(counters['allocated'])} MB in {counters['allocations']} allocations"
        ]
        if self.incomplete:
            lines.append(f"incomplete: {self.incomplete}")
        phases = self.phases
        if phases:
            lines += ["", _phase_table(phases)]
        if self._is_over and self._max_events and not counters["dropped"] and (pairs := self.held):
            lines += [
                "",
                f"held from I to W, at most {megabytes(self.held_peak)} MB at once",
                table(
                    ("stage", "microbatch", "held, MB"),
                    [(_text(h.stage), _text(h.microbatch), megabytes(h.bytes)) for h in pairs],
                    left=0,
                ),
            ]
        return "\n".join(lines)


@dataclass
class _Pair:
    """An I and its W: ``at`` is the mark of I's end, then per W the mark of its beginning and what it freed."""

    stage: int | None
    microbatch: int | None
    at: int
    begins: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)


def _of_others(w: _Open, phases: Iterable[_Open]) -> bytes:
    """The marks of the other microbatches' forwards and passes, as _C.Recorder.held takes them. Microbatches that
    zbpipe numbered by its calls are not to be compared with those that stages or the user numbered."""
    return b"".join(
        RANGE.pack(p.begin, p.end)
        for p in phases
        if p.kind in (*PASSES, "forward") and (p.calls is None) == (w.calls is None) and _is_another(p, w)
    )


def _is_another(p: _Open, w: _Open) -> bool:
    if p.calls is not None and w.calls is not None:
        return not set(p.calls) & set(w.calls)
    return p.microbatch is not None and w.microbatch is not None and p.microbatch != w.microbatch


def _phase_of(p: _Open, end: int | None, marks: Sequence[tuple[int, ...]]) -> Phase:
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


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


def _phase_table(phases: Sequence[Phase]) -> str:
    header = ("phase", "stage", "microbatch", "ms", "begin, MB", "end, MB", "peak, MB", "allocated", "freed", "blocks")
    return table(
        header,
        [
            (
                p.kind,
                _text(p.stage),
                _text(p.microbatch),
                f"{(p.end_ns - p.begin_ns) / 1e6:.2f}",
                *map(megabytes, (p.live_begin, p.live_end, p.peak, p.allocated, p.freed)),
                str(p.allocations),
            )
            for p in phases
        ],
    )


# ---- stages


def _stages_of(stages: Any) -> Iterator[Any]:
    if all(hasattr(stages, name) for name in _METHODS):
        yield stages
    elif (of_schedule := stages_of(stages)) is not None:
        yield from of_schedule
    elif isinstance(stages, Iterable):
        for stage in stages:
            yield from _stages_of(stage)
    else:
        raise TypeError(
            f"watch() was given a {type(stages).__name__}; expected a pipeline stage, a schedule or a list of them"
        )


class _Watch:
    """A stage whose methods mark their calls in the recordings that watch it. It holds the stage, and the stage's own
    attributes hold it: a stage that is dropped meanwhile goes with the next garbage collection."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self.recordings: tuple[Recording, ...] = ()
        self.methods = {name: _WatchedMethod(self, name) for name in _METHODS}


class _WatchedMethod:
    """Stands in front of a stage's method. Somebody may keep it for longer, or put another one in front of it: when
    nothing watches any more it only passes calls on."""

    def __init__(self, watch: _Watch, name: str) -> None:
        stage = watch.stage
        method = getattr(stage, name)
        functools.update_wrapper(self, method)
        before = vars(stage).get(name)
        while isinstance(before, _WatchedMethod):  # of an earlier watch, which somebody's own undoing has put back
            before = before.before
        self.before: Callable[..., Any] | None = before
        self._own = method if before is None and not hasattr(type(stage), name) else before
        self._watch = watch
        self._name = name
        self._signature = inspect.signature(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage, recordings = self._watch.stage, self._watch.recordings
        # By its class, now: zbpipe's patch and whoever else changes the class between two calls must be met.
        method = self._own or functools.partial(getattr(type(stage), self._name), stage)
        if not recordings:
            return method(*args, **kwargs)
        arguments = self._signature.bind(*args, **kwargs).arguments
        microbatch = arguments.get("fwd_chunk_id", arguments.get("bwd_chunk_id"))
        with _PhaseContext(recordings, _METHODS[self._name](arguments), stage.stage_index, microbatch):
            return method(*args, **kwargs)


_watches: weakref.WeakValueDictionary[int, _Watch] = weakref.WeakValueDictionary()
"""By their stages' ids: a watch keeps its stage. Those that some recording has joined and not left."""

_watches_lock = threading.Lock()


def _join(recording: Recording, stage: Any) -> None:
    with _watches_lock:
        watch = _watches.get(id(stage))
        if watch is None:
            watch = _Watch(stage)
            vars(stage).update(watch.methods)
            _watches[id(stage)] = watch
        if recording not in watch.recordings:
            watch.recordings = (*watch.recordings, recording)
            recording._watched.add(watch)


def _leave(recording: Recording) -> None:
    with _watches_lock:
        for watch in list(recording._watched):
            watch.recordings = tuple(r for r in watch.recordings if r is not recording)
            if not watch.recordings:
                _watches.pop(id(watch.stage), None)
                _restore(watch)
        recording._watched.clear()


def _restore(watch: _Watch) -> None:
    attributes = vars(watch.stage)
    for name, method in watch.methods.items():
        if attributes.get(name) is not method:
            continue  # somebody has put another one in front; ours passes calls on
        if method.before is None:
            del attributes[name]
        else:
            attributes[name] = method.before
    watch.methods.clear()  # no cycle is left for the garbage collector


# ---- all that run


class _Running:
    """The recordings that run, and the observer of zbpipe's passes as long as there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.recordings: tuple[Recording, ...] = ()

    def add(self, recording: Recording) -> None:
        with self._lock:
            self.recordings = (*self.recordings, recording)
            _observer.current = self

    def remove(self, recording: Recording) -> None:
        with self._lock:
            self.recordings = tuple(r for r in self.recordings if r is not recording)
            if not self.recordings:
                _observer.current = None

    def input_pass(
        self, outputs: Any, output_grads: Any, inputs: Any, weights: Any, defer: Any, checkpoint: Any, /
    ) -> tuple[tuple[torch.Tensor | None, ...], list[_C.ParamGroup]]:
        recordings = self.recordings
        calls = [recording._next_call() for recording in recordings]
        with contextlib.ExitStack() as stack:
            for recording, call in zip(recordings, calls, strict=True):
                stack.enter_context(_PhaseContext([recording], "I", None, call, (call,)))
            result = _C.input_pass(outputs, output_grads, inputs, weights, defer, checkpoint)
        for recording, call in zip(recordings, calls, strict=True):
            for group in result[1]:
                recording._call_of[group] = call
        return result

    def weight_pass(
        self, weights: Any, param_groups: Iterable[_C.ParamGroup], retain_graph: bool, fuse: bool, main_grad: bool, /
    ) -> Sequence[torch.Tensor]:
        groups = list(param_groups) if isinstance(param_groups, Iterable) else param_groups
        with contextlib.ExitStack() as stack:
            for recording in self.recordings:
                calls = recording._calls_of(groups)
                stack.enter_context(_PhaseContext([recording], "W", None, calls[0] if len(calls) == 1 else None, calls))
            return _C.weight_pass(weights, groups, retain_graph, fuse, main_grad)

    def backward(self, backward: Callable[..., None], /, *args: Any) -> None:
        with _PhaseContext(self.recordings, "B"):
            backward(*args)


_running = _Running()


def record(device: torch.device | str = "cpu", *, max_events: int = 4_000_000) -> Recording:
    """Records every block that an allocator hands out and takes back, on all threads, while its with block runs.

    Recordings may nest and overlap on several threads; each sees all. Nothing is sampled, no tensor is kept. On the
    CPU an allocator of zbpipe's stands in front of torch's meanwhile (csrc/shim/zbp_tap.h says how, why it goes
    together with torch.profiler, and what it does not see); on CUDA torch's own allocator history is used, which must
    not be in use already. Entering looks once at all objects that Python's collector knows, for storages that may
    grow. A forked child inherits the recording, and counts for itself alone.

    Args:
        device: "cpu", or a CUDA device, whose allocator is recorded.
        max_events: bounds the log, which takes 48 bytes an event. Beyond it counters and phases stay exact, and the
            log is lost. 0: no log at all, cheap enough to leave on: 0.1 us per block, where torch.empty takes 1.4
            (benchmarks/recorder.py).

    Raises:
        ValueError: another device, or a negative ``max_events``.
        RuntimeError: on entering: the allocator cannot be recorded.
    """
    place = torch.device(device)
    if max_events < 0:
        raise ValueError(f"max_events is {max_events}; expected the number of events to keep, or 0 for no log")
    if place.type == "cpu":
        return Recording(_CpuSource(max_events), place, max_events)
    if place.type == "cuda":
        from zbpipe.memory._cuda import CudaSource

        source = CudaSource(place, max_events)
        return Recording(source, source.device, max_events)
    raise ValueError(f"device is {place}; memory can be recorded on cpu and cuda")


def phase(
    kind: str, *, stage: int | None = None, microbatch: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Marks a phase in every recording that runs; costs next to nothing when none does. See :meth:`Recording.phase`."""
    return _PhaseContext(_running.recordings, kind, stage, microbatch)
