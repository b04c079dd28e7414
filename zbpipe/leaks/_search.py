"""Who holds the memory that was born, or a tensor's: see Note [How holders are searched] in ``_heap.py``."""

from __future__ import annotations

import contextvars
import gc
import os
import sys
import threading
from collections.abc import Iterable
from traceback import walk_stack
from typing import Any

import torch

from zbpipe import _C
from zbpipe.leaks import _python
from zbpipe.leaks._collector import collector
from zbpipe.leaks._found import PACKAGE, Found, Result, Scope, Telling
from zbpipe.leaks._heap import Heap, natives_of
from zbpipe.leaks._results import Leak
from zbpipe.leaks._ways import Ways

__all__ = ["Found", "Result", "Scope", "find_holders", "natives_now", "others_of", "search", "storages_now"]

_HERE = tuple(os.path.join(PACKAGE, part, "") for part in ("leaks", "_cli"))  # whose frames hold nothing of the user's


def search(scope: Scope) -> Result:
    with collector:
        # First what Python's audit hooks hear of: they may free what they like.
        listed = gc.get_objects()
        heap = _explored([listed, scope], target=scope.target, returned=scope.returned)
        blocks = _C.live_blocks(scope.since) if scope.target is None else []
        born, sought = _sought(heap, scope, blocks)
        is_all = not born and scope.older is None if scope.target is None else bool(sought)
        if not is_all:
            heap.explore_rest(listed)
            born, sought = _sought(heap, scope, blocks)
        del listed
        try:
            traces = {address: trace for address, _, _, trace in blocks} if scope.traced else {}
            return Telling(Ways(heap, scope.handle), scope, traces).result(sought, born)
        finally:
            _python.forget()


def find_holders(tensor: torch.Tensor) -> Leak:
    """Finds who holds the memory of a living tensor. Running functions' own variables for the tensor do not count.

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
            f"tensor is a {type(tensor).__name__} without one storage of its own; pass the tensors that it is made of"
        )
    return found[0].leak


def storages_now() -> object:
    """The storages of all living tensors, each referred to weakly: for ``Scope.older``."""
    return _C.watch_storages([*natives_now()["storage"]])


def others_of(storages: Iterable[_C.Handle], known: object) -> dict[int, int]:
    """The storages on memory that is not torch's CPU allocator's and that were not known to :func:`storages_now`: bytes
    by their identities."""
    foreign = [(storage.address, *storage.memory[:2]) for storage in storages if storage.memory[3]]
    tapped = {address for address, *_ in _C.live_blocks(0)} if foreign else set()
    old = identities(known) if foreign else set()
    return {
        identity: size
        for identity, address, size in foreign
        if size > 0 and address not in tapped and identity not in old
    }


def natives_now() -> dict[str, list[Any]]:
    """Handles of all tensors that the collector lists, and of what these lead to through autograd, by their kinds.
    Where an application has frozen what lives, the list lacks it: then of all that the roots reach, too."""
    with collector:
        listed = gc.get_objects()
        if not gc.get_freeze_count():
            return natives_of(listed)
        heap = _explored([listed], also=listed)
        return {kind: [heap.things[place] for place in places] for kind, places in heap.native.items()}


def _explored(ignored: list[Any], also: Iterable[Any] = (), target: Any = None, returned: Any = None) -> Heap:
    """All that the roots reach, and what is listed ``also``.

    Roots are what a checked function returned, modules, context variables and the frames of all threads. Frames of the
    leak tools are left out, and variables that are the target itself. What the frames of libraries hold comes last: the
    program's place is named where it has the same.
    """
    context = contextvars.copy_context()
    roots: list[Any] = [*([] if returned is None else [returned]), *sys.modules.values(), *context]
    of_libraries: list[Any] = []
    heap = Heap({id(variable): [value] for variable, value in context.items()}, [roots, of_libraries, *ignored])
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, current = threading.main_thread().ident, sys._current_frames()
    for ident, frame in current.items():
        for at, _ in reversed([*walk_stack(frame)]):  # what a caller has given is the caller's
            if ident != main:
                heap.threads[id(at)] = names.get(ident, str(ident))
            if not at.f_code.co_filename.startswith(_HERE):
                variables = [value for _, value in _C.frame_variables(at) if target is None or value is not target]
                variables.append(at.f_globals)
                if not at.f_code.co_flags & 1:  # a module's or a class's body: its variables are in a dictionary
                    variables.append(at.f_locals)
                is_librarys = _python.library_path(at.f_code.co_filename) is not None
                (of_libraries if is_librarys else roots).append(at)
                heap.held[id(at)] = variables
    # This frame among its own variables would be a cycle, which keeps all callers' frames and what they hold.
    current.clear()
    frame = at = None  # type: ignore[assignment]
    for things in (roots, of_libraries, also):
        begin = len(heap.things)
        heap.add_roots(things)
        heap.explore(begin)
    return heap


def identities(watched: object) -> set[int]:
    return {identity for _, _, _, identity in _C.storage_spans(watched)}


def _sought(
    heap: Heap, scope: Scope, blocks: list[tuple[int, int, int, int]]
) -> tuple[dict[int, int], dict[int, list[int]]]:
    """The blocks that were born and that no storage is known for, bytes by addresses; and the places of the storages
    that are searched for, with those of their tensors."""
    born = {address: size for address, size, serial, _ in blocks if scope.includes(serial)}
    lost = dict(born)
    storages = {place: heap.things[place] for place in heap.native["storage"]}
    target = scope.handle
    sought = set() if target is None or target.storage is None else {target.storage.address}
    if scope.older is not None:
        sought.update(others_of(storages.values(), scope.older))
    found: dict[int, list[int]] = {}
    for place, storage in storages.items():
        address = storage.memory[0]
        lost.pop(address, None)
        if (address in born or storage.address in sought) and storage.address not in scope.allowed:
            found[place] = []
    for place in heap.native["tensor"] if found else ():
        of = heap.place.get(id(heap.things[place].storage), -1)
        if of in found:
            found[of].append(place)
    return lost, found
