"""The check: what was born inside and outlived it."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from zbpipe import _C
from zbpipe.leaks._collector import collector
from zbpipe.leaks._report import Leak, Report
from zbpipe.leaks._search import search

F = TypeVar("F", bound=Callable[..., Any])

ACTIONS = ("warn", "error", "record")


class TensorLeakWarning(UserWarning):
    """Tensors outlived a check; ``report`` says which."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


class TensorLeakError(AssertionError):
    """Tensors outlived a check; ``report`` says which."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


class Check:
    """What :func:`check_tensor_leak` returns: a context manager, once, and a decorator."""

    def __init__(self, action: str, allow: tuple[Any, ...], trace: bool, device: torch.device | None) -> None:
        self._arguments = (action, allow, trace, device)
        self._action = action
        self._allow = allow
        self._trace = trace
        self._device = device
        self._recorder: _C.Recorder | None = None
        self.report: Report | None = None

    def __call__(self, function: F) -> F:
        arguments = self._arguments

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with Check(*arguments):
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    def __enter__(self) -> Check:
        if self._recorder is not None:
            raise RuntimeError("a check can be entered once; call check_tensor_leak() again for another one")
        collector.switch_off()
        try:
            recorder = _C.Recorder(0)
            recorder.start()
            self._recorder = recorder
            self._older = _C.storages_now()
            self._since = _C.next_serial()
        except BaseException:
            collector.give_back()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        assert self._recorder is not None
        try:
            report = self._look()
        finally:
            displaced = self._recorder.stop()
            self._older = None
            self._allow = ()
            collector.give_back()
        if displaced:
            report.unseen.append("memory that another CPU allocator handed out, which was installed meanwhile")
        self.report = report
        if not report or kind is not None or self._action == "record":
            return
        if self._action == "error":
            raise TensorLeakError(report)
        warnings.warn(TensorLeakWarning(report), stacklevel=2)

    def _look(self) -> Report:
        tensors, predicates, holders = _split(self._allow)
        allowed = _C.storages_of(tensors)
        blocks = {address for address, _, _ in _C.live_blocks(self._since)}
        blocks -= _C.addresses_of(tensors)
        if not blocks and _C.storages_since(self._older) == 0:
            return Report()
        trimmed = {id(holder) for holder in (*tensors, *holders)}
        del tensors, holders

        def keep(candidates: list[torch.Tensor]) -> bool:
            return not any(predicate(tensor) for predicate in predicates for tensor in candidates)

        found, cycles, report = search(
            since=self._since, older=self._older, allowed=allowed, trimmed=trimmed, keep=keep if predicates else None
        )
        report.cycles = cycles
        report.leaks = _fates(found, self._since)
        return report


def _fates(found: list[tuple[Leak, str, int]], since: int) -> list[Leak]:
    """The leaks, with what became of them when the collector ran; it runs only if it can make a difference."""
    if all(rank == "root" for _, rank, _ in found):
        return [leak for leak, _, _ in found]
    gc.collect()
    living = {address for address, _, _ in _C.live_blocks(since)}
    return [
        leak if rank == "root" or address in living or (not address) else _collected(leak)
        for leak, rank, address in found
    ]


def _collected(leak: Leak) -> Leak:
    values = {name: getattr(leak, name) for name in Leak.__dataclass_fields__}
    return Leak(**{**values, "fate": "freed by the collector"})


def _split(allow: Iterable[Any]) -> tuple[list[torch.Tensor], list[Callable[[torch.Tensor], bool]], list[Any]]:
    """What ``allow`` names: tensors, predicates, and the objects that may hold tensors."""
    tensors: list[torch.Tensor] = []
    predicates: list[Callable[[torch.Tensor], bool]] = []
    holders: list[Any] = []
    todo = list(allow)
    while todo:
        thing = todo.pop()
        if issubclass(type(thing), torch.Tensor):
            tensors.append(thing)
            if thing.is_leaf and thing.grad is not None:
                tensors.append(thing.grad)
        elif issubclass(type(thing), torch.nn.Module):
            holders += thing.modules()
            todo += [*thing.parameters(), *thing.buffers()]
        elif issubclass(type(thing), torch.optim.Optimizer):
            holders.append(thing)
            todo += [thing.state, thing.param_groups]
        elif issubclass(type(thing), dict):
            todo += [*thing.keys(), *thing.values()]
        elif issubclass(type(thing), (list, tuple, set, frozenset)):
            todo += thing
        elif callable(thing):
            predicates.append(thing)
    return tensors, predicates, holders


def _check_allow(allow: Any) -> tuple[Any, ...]:
    if not isinstance(allow, (list, tuple, set, frozenset)):
        allow = (allow,)
    for thing in allow:
        known = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, dict, list, tuple, set, frozenset)
        if not issubclass(type(thing), known) and not callable(thing):
            raise TypeError(
                f"allow holds a {type(thing).__name__}; expected tensors, modules, optimizers, collections of them, or "
                "functions that say of a tensor whether it may live"
            )
    return tuple(allow)


def check_tensor_leak(
    function: Any = None,
    *,
    action: str = "warn",
    allow: Any = (),
    trace: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """See :mod:`zbpipe.leaks`."""
    if action not in ACTIONS:
        raise ValueError(f"action is {action!r}; expected one of {', '.join(map(repr, ACTIONS))}")
    check = Check(action, _check_allow(allow), trace, None if device is None else torch.device(device))
    return check if function is None else check(function)


def find_holders(tensor: torch.Tensor) -> Leak:
    """Who holds a living tensor, besides the variables of the caller that are the tensor itself."""
    if not issubclass(type(tensor), torch.Tensor):
        raise TypeError(f"tensor is a {type(tensor).__name__}; expected a torch.Tensor")
    found, _, _ = search(target=tensor)
    if not found:
        raise ValueError(f"a {type(tensor).__name__} without a storage of its own has no holders of memory to find")
    return found[0][0]


