"""What a check is told may live on."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, MappingView
from typing import Any

import torch

from zbpipe._formatting import argument
from zbpipe._torch.autograd import own_grad_of, without_torch_functions
from zbpipe.leaks._python import array_type

ACTIONS = ("warn", "error", "record")
_ONCE = (Iterator, MappingView)  # can be looked into once, as a module's parameters(), or changes
_DEPTH = 4  # of collections in a fixture's value or a window, within which tensors are theirs
_COLLECTIONS = (dict, list, tuple, set, frozenset)
_KNOWN = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, *_COLLECTIONS, *_ONCE)


def checked(action: object, allow: Any) -> tuple[Any, ...]:
    """``allow`` as it is to be kept, when all is legal: a collection may get more members until it is looked at."""
    if action not in ACTIONS:
        raise ValueError(f"action is {argument(action)}; expected one of {', '.join(map(repr, ACTIONS))}")
    allow = list(allow) if issubclass(type(allow), _ONCE) else allow
    for thing in allow if isinstance(allow, _COLLECTIONS[1:]) else (allow,):
        if not issubclass(type(thing), _KNOWN) and not callable(thing):
            raise TypeError(
                f"allow holds a {type(thing).__name__}; expected tensors, modules, optimizers, collections of them, or "
                "functions that say of a tensor whether it may live"
            )
    listed, todo, seen = list[Any](), [allow], set[int]()
    while todo:
        thing = todo.pop()
        if issubclass(type(thing), _ONCE):
            listed.append(thing := list(thing))
        if issubclass(type(thing), _COLLECTIONS) and id(thing) not in seen:
            seen.add(id(thing))
            todo += thing.values() if issubclass(type(thing), dict) else thing
    return (allow, *listed)


def parts_of(allow: Iterable[Any]) -> tuple[list[torch.Tensor], list[Callable[[torch.Tensor], bool]], list[Any]]:
    """What ``allow`` names: tensors, predicates, and the objects that may hold tensors."""
    tensors: list[torch.Tensor] = []
    predicates: list[Callable[[torch.Tensor], bool]] = []
    holders: list[Any] = []
    todo = list(allow)
    seen: set[int] = set()
    with without_torch_functions():  # what a subclass would have to say
        while todo:
            thing = todo.pop()
            kind = type(thing)
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            if issubclass(kind, torch.Tensor):
                tensors.append(thing)
                with contextlib.suppress(Exception):  # none but a wrapper (a DTensor, say) says what it is made of
                    todo += [getattr(thing, name) for name in thing.__tensor_flatten__()[0]]
                todo.append(own_grad_of(thing))
            elif issubclass(kind, torch.nn.Module):
                holders += thing.modules()
                todo += [*thing.parameters(), *thing.buffers()]
            elif issubclass(kind, torch.optim.Optimizer):
                holders.append(thing)
                todo += tensors_in([thing.state, thing.param_groups])
            elif issubclass(kind, _COLLECTIONS):
                todo += thing if not issubclass(kind, dict) else [*thing.keys(), *thing.values()]
            elif callable(thing):
                predicates.append(thing)
    return tensors, predicates, holders


def tensors_in(thing: Any, is_wide: bool = False) -> list[torch.Tensor]:
    """The tensors in nested collections and under numpy arrays; if ``is_wide`` also those in modules, caches and
    attributes, a few collections deep."""
    found: list[torch.Tensor] = []
    array = array_type()
    todo = [(thing, _DEPTH)]
    seen: dict[int, int] = {}  # by identities, how deep was looked
    while todo:
        one, level = todo.pop()
        kind = type(one)  # not isinstance(): a lazy object's __class__ may run anything
        inner: Iterable[Any] = ()
        if issubclass(kind, torch.Tensor):
            found.append(one)
        elif array is not None and issubclass(kind, array):
            todo.append((array.base.__get__(one), level))
        elif is_wide and issubclass(kind, torch.nn.Module):
            found += [*one.parameters(), *one.buffers()]
        elif (is_wide and level == 0) or issubclass(kind, type) or seen.get(id(one), level - 1) >= level:
            continue
        elif issubclass(kind, dict):
            inner = [*dict.keys(one), *dict.values(one)]
        elif issubclass(kind, _COLLECTIONS):
            inner = list(one)
        elif is_wide and kind is functools._lru_cache_wrapper:
            inner = gc.get_referents(one)  # its entries, by whatever they are kept in
        elif is_wide:
            with contextlib.suppress(Exception):  # attributes; of an optimizer its state, one collection deeper
                todo.append((object.__getattribute__(one, "__dict__"), level))
        seen[id(one)] = level
        todo += [(item, level - 1) for item in inner]
    return found
