"""Who holds the memory that was born, or a tensor's: see Note [How holders are searched] in ``_heap.py``."""

from __future__ import annotations

import contextvars
import gc
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from zbpipe import _C
from zbpipe.leaks import _source
from zbpipe.leaks._found import Found, Result, Scope, Sought, Telling
from zbpipe.leaks._heap import Heap
from zbpipe.leaks._results import Leak
from zbpipe.leaks._ways import Ways
from zbpipe.leaks._words.chains import thread_names

__all__ = ["Found", "Result", "Scope", "are_there_others", "find_holders", "search", "storages_now"]

_HERE = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "_cli"))  # whose frames hold nothing of the user's


def search(scope: Scope) -> Result:
    with _no_collection():
        # First what Python's audit hooks hear of: they may free what they like.
        listed = gc.get_objects()
        roots, held, threads = _roots(scope.target, scope.returned)
        heap = Heap(held, ignored=[listed, scope])
        heap.add_roots(roots)
        del roots, held
        heap.explore()
        blocks = _C.live_blocks(0)
        born, sought = _sought(heap, scope, blocks)
        is_all = not born and scope.older is None if scope.target is None else bool(sought)
        if not is_all:
            before = heap.count_native()
            heap.explore_rest(listed)
            if heap.count_native() != before:
                born, sought = _sought(heap, scope, blocks)
        del listed
        try:
            return Telling(heap, Ways(heap, _C.handle_of(scope.target)), scope, threads).result(sought, born)
        finally:
            _source.forget()


def find_holders(tensor: torch.Tensor) -> Leak:
    """Find who holds the memory of a living tensor, besides variables of running functions that are that very tensor.

    Args:
        tensor: a tensor with one storage of its own.

    Returns:
        A :class:`Leak`, whose ``chain`` leads from the outermost holder to the tensor. It does not hold the tensor.

    Raises:
        TypeError: no tensor.
        ValueError: a tensor whose memory is not one storage of its own (sparse, a wrapper).

    Source:
        ``objgraph.find_backref_chain``, which sees no holder in C++.
    """
    if not issubclass(type(tensor), torch.Tensor):
        raise TypeError(f"tensor is a {type(tensor).__name__}; expected a torch.Tensor")
    found = search(Scope(target=tensor)).found
    if not found:
        raise ValueError(
            f"tensor is a {type(tensor).__name__} without one storage of its own; pass those it is made of"
        )
    return found[0].leak


def storages_now() -> object:
    """The storages of all living tensors, each referred to weakly: for ``Scope.older``."""
    return _C.watch_storages(_storages())


def are_there_others(older: object) -> bool:
    """Whether tensors live on memory that was not there and that is not torch's CPU allocator's."""
    tapped = {address for address, _, _ in _C.live_blocks(0)}  # first: nothing of it is lost meanwhile
    known = _identities(older)
    return any(_is_new(storage.memory, storage.address, known, tapped) for storage in _storages())


def _storages() -> list[Any]:
    """Handles of the storages of all tensors that the collector lists or that these lead to through autograd. Where an
    application has frozen what lives, the collector's list lacks it: then of all that the roots reach, too."""
    with _no_collection():
        listed = gc.get_objects()
        if gc.get_freeze_count():
            roots, held, _ = _roots()
            heap = Heap(held, ignored=[listed])
            heap.add_roots(roots + listed)
            heap.explore()
        else:
            heap = Heap({}, ignored=())
            heap.explore_autograd(listed)
        return [heap.things[place] for place in heap.native["storage"]]


@contextmanager
def _no_collection() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _identities(watched: object) -> set[int]:
    return {identity for _, _, _, identity in _C.storage_spans(watched)}


def _is_new(memory: tuple[int, int, str, bool], identity: int, known: set[int], tapped: Container[int]) -> bool:
    address, size, _, is_foreign = memory
    return is_foreign and size > 0 and identity not in known and address not in tapped


def _roots(target: Any = None, returned: Any = None) -> tuple[list[Any], dict[int, list[Any]], dict[int, str]]:
    """The modules and the frames of all threads, what these hold by their identities, and the names of the threads.

    Frames of the leak tools are left out, and variables that are the target itself.
    """
    found: list[Any] = [] if returned is None else [returned]
    held: dict[int, list[Any]] = {}
    found += list(sys.modules.values())
    for variable, value in contextvars.copy_context().items():
        found.append(variable)
        held[id(variable)] = [value]
    current = sys._current_frames()
    for frame in current.values():
        at: FrameType | None = frame
        while at is not None:
            if not at.f_code.co_filename.startswith(_HERE):
                variables = [value for _, value in _C.frame_variables(at) if target is None or value is not target]
                variables.append(at.f_globals)
                if not at.f_code.co_flags & 1:  # a module's or a class's body: its variables are in a dictionary
                    variables.append(at.f_locals)
                found.append(at)
                held[id(at)] = variables
            at = at.f_back
    names = thread_names(current.items())
    # This frame among its own variables would be a cycle, which keeps all callers' frames and what they hold.
    current.clear()
    frame = at = None  # type: ignore[assignment]
    return found, held, names


def _sought(heap: Heap, scope: Scope, blocks: list[tuple[int, int, int]]) -> tuple[dict[int, int], dict[int, Sought]]:
    """The blocks that were born and that no storage is known for, bytes by addresses; and the storages that are
    searched for, by their places."""
    tapped = {address for address, _, _ in blocks}
    is_any = scope.target is None
    born = {address: size for address, size, serial in blocks if is_any and scope.since <= serial < scope.until}
    target = _C.handle_of(scope.target)
    wanted = target and target.storage
    known = set() if scope.older is None else _identities(scope.older)
    seen = set()
    found: dict[int, Sought] = {}
    for place in heap.native["storage"]:
        storage = heap.things[place]
        memory, identity = storage.memory, storage.address
        address, size, device, _ = memory
        seen.add(address)
        if scope.target is not None:
            is_sought = storage is wanted
        else:
            is_sought = address in born or (scope.older is not None and _is_new(memory, identity, known, tapped))
        if is_sought and identity not in scope.allowed:
            found[place] = Sought(address, size, device, identity)
    for place in heap.native["tensor"] if found else ():
        storage = heap.things[place].storage
        if (entry := found.get(heap.place.get(id(storage), -1))) is not None:
            entry.tensors.append(place)
    return {address: size for address, size in born.items() if address not in seen}, found
