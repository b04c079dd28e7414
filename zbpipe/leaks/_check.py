"""The check: what was born inside and outlived it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, overload

from zbpipe import _C
from zbpipe._formatting import refuse_what_runs_later
from zbpipe._torch import allocator
from zbpipe.leaks import _allow
from zbpipe.leaks._collector import Collections, collector
from zbpipe.leaks._judge import with_fates, without_excused
from zbpipe.leaks._report import Report
from zbpipe.leaks._results import COLLECTED, Holder, Leak
from zbpipe.leaks._search import Scope, identities, natives_now, others_of, search, storages_now

F = TypeVar("F", bound=Callable[..., Any])
Action = Literal["warn", "error", "record"]


class _OfReport(Exception):
    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


class TensorLeakWarning(_OfReport, UserWarning):
    """Tensors outlived a check; ``report``, a :class:`Report`, says which."""


class TensorLeakError(_OfReport, AssertionError):
    """Tensors outlived a check; ``report``, a :class:`Report`, says which."""


class Check:
    """What :func:`check_tensor_leak` returns: a context manager, to be entered once, and a decorator.

    Attributes:
        report: a :class:`Report` of what was found; None before the end of the block.

    Raises:
        RuntimeError: it was entered twice, or left without having been entered.
    """

    def __init__(self, action: Action, allow: tuple[Any, ...], trace: bool) -> None:
        self.report: Report | None = None
        self._action, self._allow, self._trace = action, allow, trace
        self._begun: contextlib.ExitStack | None = None
        self._unseen: list[str] = []
        self._returned: Any = None
        self._warns_at: tuple[str, int] | None = None
        self._collections = Collections()
        self._exempt: list[range] = []  # serials of blocks
        self._others: list[tuple[object, object]] = []  # storages before and after

    def __call__(self, function: F) -> F:
        """``function``, checked whenever it is called.

        The object that it returns is no leak. What that object holds may be one.

        Raises:
            TypeError: no function, or one that runs after its call has returned (a generator or coroutine function).
        """
        if not (callable(function) and (inspect.isroutine(function) or isinstance(function, functools.partial))):
            raise TypeError(
                f"check_tensor_leak was given a {type(function).__name__} to check; expected a function, or pass what "
                "may live on as allow=..."
            )
        refuse_what_runs_later(function)
        arguments = (self._action, self._allow, self._trace)
        code = getattr(inspect.unwrap(function), "__code__", None)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with Check(*arguments) as check:
                check._warns_at = (code.co_filename, code.co_firstlineno) if code else None
                check._returned = function(*args, **kwargs)
                return check._returned

        return run  # type: ignore[return-value]

    def __enter__(self) -> Check:
        if self._begun is not None:
            raise RuntimeError("a check can be entered once; call check_tensor_leak() again for another one")
        with contextlib.ExitStack() as begun:  # what is begun ends where a later step fails
            recorder = _C.Recorder(0)
            recorder.start()
            begun.callback(self._stop, recorder)
            begun.enter_context(collector)
            self._cuda_before = allocator.blocks_now()
            self._older: object = storages_now()
            self._modules = set(sys.modules)
            self._since = _C.next_serial()
            begun.enter_context(self._collections)
            if self._trace:
                _C.trace_start()
                begun.callback(_C.trace_stop)
            self._begun = begun.pop_all()
        return self

    def _stop(self, recorder: _C.Recorder) -> None:
        if untracked := recorder.counters()["untracked"]:
            self._unseen.append(f"{untracked} blocks that could not be followed for want of memory")
        if recorder.stop():
            self._unseen.append("what another CPU allocator handed out that was installed inside")

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._begun is None or self.report is not None:
            raise RuntimeError("a check is left once, after it was entered; use it in a with statement")
        try:
            with self._begun:
                self._collections.__exit__()
                report = self._look()
        finally:
            self._older = self._returned = None
            self._allow, self._others = (), []
        report.unseen += self._unseen
        self.report = report
        if not report or kind is not None or self._action == "record":
            return
        if self._action == "error":
            raise TensorLeakError(report)
        if self._warns_at is None:
            warnings.warn(TensorLeakWarning(report), stacklevel=2)
        else:
            warnings.warn_explicit(TensorLeakWarning(report), None, *self._warns_at)

    @contextlib.contextmanager
    def _exempted(self) -> Iterator[None]:
        """What is born inside is no leak of this check's."""
        since, blocks, older = _C.next_serial(), allocator.blocks_now(), storages_now()
        try:
            yield
        finally:
            self._exempt.append(range(since, _C.next_serial()))
            self._cuda_before |= allocator.blocks_now() - blocks
            self._others.append((older, storages_now()))

    def _look(self) -> Report:
        report = Report()
        tensors, predicates, holders = _allow.parts_of((*self._allow, *_allow.tensors_in(self._returned)))
        exempted = (identities(now) - identities(older) for older, now in self._others)
        scope = Scope(
            since=self._since,
            until=_C.next_serial(),
            exempt=self._exempt,
            older=self._older,
            allowed=_C.storages_of(tensors).union(*exempted),
            trimmed={id(holder) for holder in (*tensors, *holders)},
            returned=self._returned,
            predicates=predicates,
            traced=self._trace,
        )
        born = {address: serial for address, _, serial, _ in _C.live_blocks(self._since) if scope.includes(serial)}
        is_explained = not born.keys() - _C.addresses_of(tensors) and not allocator.is_in_use()
        if not is_explained or others_of(natives_now()["storage"], self._older):
            result = search(scope)
            del tensors, holders
            fated = with_fates(result.found, born, self._since)
            judged, report.notes = without_excused(fated, set(sys.modules) - self._modules)
            report.leaks = [entry.leak for entry in judged] + self._blocks_of_cuda()
            report.places = {entry.leak.storage: entry.places for entry in judged}
            report.cycles, report.visited = result.cycles, result.visited
            report.unseen += result.unseen if report.leaks else []
        chain = [Holder("unknown", "a cycle that a collection inside the check freed: nobody looked at it before")]
        for serial, size in self._collections.freed.items():
            if scope.includes(serial):
                report.leaks.append(Leak((), "", "cpu", size, 0, 0, COLLECTED, None, chain, 0))
        report.leaks.sort(key=lambda leak: -leak.bytes)
        return report

    def _blocks_of_cuda(self) -> list[Leak]:
        """Those that C++ holds: no storage begins in them. One with a freed one's address and size counts as old."""
        if not (new := allocator.blocks_now() - self._cuda_before):
            return []
        chain = [Holder("unknown", "C++ that cannot be seen; the allocator counts the block as in use")]
        begins = sorted((device, address) for device, address, size, _ in _C.storage_spans(storages_now()) if size)
        found = []
        for device, address, size in sorted(new):
            at = bisect_left(begins, (device, address))
            if at == len(begins) or begins[at] >= (device, address + max(size, 1)):
                found.append(Leak((), "", device, size, 0, 0, "alive", None, chain, 0))
        return found


@overload
def check_tensor_leak(function: F, /) -> F: ...


@overload
def check_tensor_leak(*, action: Action = "warn", allow: Any = (), trace: bool = False) -> Check: ...


def check_tensor_leak(function: Any = None, *, action: Action = "warn", allow: Any = (), trace: bool = False) -> Any:
    """Finds tensors that are allocated in a block or function and outlive it, or that only the garbage collector frees.

    ``with check_tensor_leak() as check:``, ``@check_tensor_leak`` or ``@check_tensor_leak(action="error")``. The
    collector is off inside, and afterwards as it was before. Checks may be nested and run on several threads. Each sees
    what any thread allocates while it runs. A clean check reads the collector's list at its beginning and at its end. A
    check that finds something looks at all living objects, and runs the collector if no chain leads to it.

    Args:
        action: "warn" (a :class:`TensorLeakWarning`), "error" (a :class:`TensorLeakError`), or "record" (neither: see
            ``check.report``). Neither happens if the block raises.
        allow: what may live on: tensors and their ``.grad``, modules with their parameters and buffers, optimizers with
            their state, collections and iterators of these, and functions that say of a tensor whether it may live.
            Iterators are read now, collections when the block is left. Anything else that these objects hold is a leak,
            whose chain begins with the object.
        trace: True remembers the line that made each block of CPU memory, at about 0.4 microseconds a block
            (benchmarks/recorder.py).

    Returns:
        A :class:`Check` to enter, or the function, checked whenever it is called.

    Raises:
        TypeError, ValueError: an argument is none of these.
        RuntimeError: on entering: the CPU allocator cannot be watched (``csrc/instruments/shim/zbp_tap.h``).

    Example::

        with zbpipe.leaks.check_tensor_leak(action="error", allow=stage):
            stage(x).sum().backward()

    Source:
        ``check_tensor_leak`` of torch's own tests of pipelining (pytorch/pytorch PR 136584), which sees cycles in
        Python alone.
    """
    check = Check(action, _allow.checked(action, allow), trace)
    return check if function is None else check(function)
