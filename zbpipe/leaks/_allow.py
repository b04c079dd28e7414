"""What a check is told may live on."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, MappingView
from typing import Any

import torch

from zbpipe._formatting import argument
from zbpipe._torch.autograd import without_torch_functions
from zbpipe.leaks._python import array_type

ACTIONS = ("warn", "error", "record")
_ONCE = (Iterator, MappingView)
_KNOWN = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, dict, list, tuple, set, frozenset)


def checked(action: object, allow: Any, device: torch.device | str | None) -> tuple[Any, ...]:
    """``allow`` as it is to be kept, when all is legal: a collection may get more members until it is looked at."""
    if action not in ACTIONS:
        raise ValueError(f"action is {argument(action)}; expected one of {', '.join(map(repr, ACTIONS))}")
    try:
        kind = None if device is None else torch.device(device).type
    except (RuntimeError, TypeError):
        kind = "?"
    if kind not in (None, "cpu", "cuda"):
        raise ValueError(f"device is {argument(device)}; tensors can be checked on cpu and cuda")
    allow = _at_once(allow)
    listed: list[Any] = []
    for thing in allow if isinstance(allow, (list, tuple, set, frozenset)) else (allow,):
        if issubclass(type(thing), _ONCE):
            listed.append(_at_once(thing))
        elif not issubclass(type(thing), _KNOWN) and not callable(thing):
            raise TypeError(
                f"allow holds a {type(thing).__name__}; expected tensors, modules, optimizers, collections of them, or "
                "functions that say of a tensor whether it may live"
            )
    return (allow, *listed)


def _at_once(thing: Any) -> Any:
    """An iterator, as of a module's parameters(), can be looked into once: its list; of a dictionary's view, too."""
    return list(thing) if issubclass(type(thing), _ONCE) else thing


def parts_of(allow: Iterable[Any]) -> tuple[list[torch.Tensor], list[Callable[[torch.Tensor], bool]], list[Any]]:
    """What ``allow`` names: tensors, predicates, and the objects that may hold tensors."""
    with without_torch_functions():  # what a subclass would have to say
        return _parts_plainly(allow)


def _parts_plainly(
    allow: Iterable[Any],
) -> tuple[list[torch.Tensor], list[Callable[[torch.Tensor], bool]], list[Any]]:
    tensors: list[torch.Tensor] = []
    predicates: list[Callable[[torch.Tensor], bool]] = []
    holders: list[Any] = []
    todo = list(allow)
    seen: set[int] = set()
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if issubclass(type(thing), torch.Tensor):
            tensors.append(thing)
            todo += _inner_tensors(thing)
            if (thing.is_leaf or thing.retains_grad) and thing.grad is not None:
                todo.append(thing.grad)
        elif issubclass(type(thing), torch.nn.Module):
            holders += thing.modules()
            todo += [*thing.parameters(), *thing.buffers()]
        elif issubclass(type(thing), torch.optim.Optimizer):
            holders.append(thing)
            todo += [*tensors_in(thing.state), *tensors_in(thing.param_groups)]
        elif issubclass(type(thing), (dict, list, tuple, set, frozenset)):
            todo += thing if not issubclass(type(thing), dict) else [*thing.keys(), *thing.values()]
        elif callable(thing):
            predicates.append(thing)
    return tensors, predicates, holders


def _inner_tensors(tensor: torch.Tensor) -> list[Any]:
    """Those that a wrapper (a DTensor, a jagged tensor) is made of, by the protocol that torch.compile takes them
    apart by."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        return []
    try:
        return [getattr(tensor, name) for name in flatten(tensor)[0]]
    except Exception:
        return []


def tensors_in(thing: Any) -> list[torch.Tensor]:
    """The tensors in nested collections."""
    found: list[torch.Tensor] = []
    array = array_type()
    todo, seen = [thing], set()
    while todo:
        item = todo.pop()
        if issubclass(type(item), torch.Tensor):
            found.append(item)
        elif array is not None and issubclass(type(item), array):
            todo.append(array.base.__get__(item))
        elif issubclass(type(item), (dict, list, tuple, set, frozenset)) and id(item) not in seen:
            seen.add(id(item))
            todo += [*item.keys(), *item.values()] if issubclass(type(item), dict) else item
    return found


def owned_tensors(thing: Any, depth: int) -> Iterator[torch.Tensor]:
    """The tensors that a value owns: in modules, collections, caches and attributes, so many collections deep."""
    kind = type(thing)  # not isinstance(): a lazy object's __class__ may run anything
    if issubclass(kind, torch.Tensor):
        yield thing
    elif issubclass(kind, torch.nn.Module):
        yield from (*thing.parameters(), *thing.buffers())
    elif depth == 0 or issubclass(kind, type):
        return
    elif kind is functools._lru_cache_wrapper:
        for value in gc.get_referents(thing):  # its entries, by whatever they are kept in
            yield from owned_tensors(value, depth - 1)
    elif issubclass(kind, dict):
        for value in [*thing.keys(), *thing.values()]:
            yield from owned_tensors(value, depth - 1)
    elif issubclass(kind, (list, tuple, set, frozenset)):
        for value in list(thing):
            yield from owned_tensors(value, depth - 1)
    else:
        # An object's attributes; of an optimizer its state, where that of a parameter is one level deeper.
        with contextlib.suppress(Exception):
            yield from owned_tensors(object.__getattribute__(thing, "__dict__"), depth)
