"""All that lives, breadth first from the roots: Python's objects, and libtorch's by their handles.

Note [How holders are searched]

A tensor, a node or a storage is one vertex, whatever stands for it in Python. The vertex is its handle (Note [Handles]
in ``csrc/instruments/shim/zbp_holders.h``), found by :func:`zbpipe._C.references_of`. All else is found by
``gc.get_referents``. Vertices are numbered in the order of discovery, so the way back from a vertex is a shortest chain
of holders.

What the roots do not reach is looked at as Python's collector does. A reference that is counted and that no edge
explains comes from where nobody can look: a C++ variable, a C stack, a library's table. Its vertex is the beginning of
hidden chains. What these do not reach either is garbage, and hangs on a cycle (``_ways.py``).

What is met is kept alive until the search ends, and the collector is off. Other threads go on meanwhile: what they move
may be told by another chain than the one that it has now. Nothing is unpacked and no code of the program runs: types
are told by their identities and bases alone.
"""

from __future__ import annotations

import datetime
import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from zbpipe import _C
from zbpipe._torch.autograd import NATIVE_CLASSES, SAVED_TENSOR
from zbpipe._torch.pipelining import work_type
from zbpipe.leaks._python import array_type, namespace_of

_SKIPPED, _PLAIN, _NATIVE, _PARTLY_NATIVE, _ARRAY, _WORK = range(6)
_PARTLY_NATIVE_TYPES = (_C.ParamGroup, SAVED_TENSOR, type(datetime.datetime_CAPI))
TYPE_FLAGS = vars(type)["__flags__"]  # a metaclass may have a property of this name
_HAS_REFERENTS = 1 << 14  # Py_TPFLAGS_HAVE_GC
NOBODY = -1
_OWN = 2  # of sys.getrefcount(): the list of things, the argument


class Heap:
    """What was met. ``things`` are Python objects and handles, ``parents`` the places of who held them first.

    ``held`` has what a root holds besides its referents, by the root's identity; a running frame has none of its own.
    ``threads`` are names of all threads but the main one, by the identities of their frames.
    """

    def __init__(self, held: dict[int, list[Any]], ignored: Iterable[Any]) -> None:
        self.things: list[Any] = []
        self.parents: list[int] = []
        self.place: dict[int, int] = {id(thing): NOBODY for thing in ignored}
        self.reached = sys.maxsize  # what comes from here on the roots do not reach
        self.edges: list[list[int]] = []  # of each of those, to others of them
        self.unseen: Counter[str] = Counter()
        self.works: list[int] = []
        self.native: dict[str, list[int]] = {"tensor": [], "storage": [], "node": []}
        self.held = held
        self.threads: dict[int, str] = {}
        self._special: set[int] = set()  # things with other referents than the collector's
        self._python_references: defaultdict[int, int] = defaultdict(int)
        self._native_references: defaultdict[int, int] = defaultdict(int)
        self._kinds: dict[int, int] = {}  # by the identity of the class, which a metaclass may not let be hashed
        self.array, self.work = array_type(), work_type()  # None where nobody has imported them

    def add_roots(self, roots: Iterable[Any]) -> None:
        for root in roots:
            self._meet(root, NOBODY)

    def explore(self, begin: int = 0) -> None:
        """Looks at all things from a place on, and at all that these hold."""
        things, parents, place, special = self.things, self.parents, self.place, self._special
        referents, kind_of, skipped, plain = gc.get_referents, self._kinds.get, _SKIPPED, _PLAIN
        for at, thing in enumerate(islice(things, begin, None), begin):  # which becomes longer meanwhile
            if at in special:
                for reference in self.references(thing):
                    self._meet_reference(*reference, at)
                continue
            for held in referents(thing):
                kind = kind_of(id(type(held)))
                if kind == skipped:
                    continue
                key = id(held)
                if key in place:  # all but tensors and nodes, which are there by their handles
                    continue
                if kind == plain:
                    place[key] = len(things)
                    things.append(held)
                    parents.append(at)
                else:
                    self._meet(held, at)

    def explore_rest(self, listed: list[Any]) -> None:
        """Looks at what is listed and was not reached, and remembers who holds whom of it."""
        self.reached = len(self.things)
        self.add_roots(one for one in listed if id(one) not in self.place)
        listed.clear()
        for at, thing in enumerate(islice(self.things, self.reached, None), self.reached):
            holds = [self._meet_reference(*reference, at) for reference in self.references(thing)]
            self.edges.append([place - self.reached for place in holds if place >= self.reached])

    def references(self, thing: Any) -> Iterator[tuple[Any, str | None, bool]]:
        """What a thing holds, how, and whether the reference is to libtorch's object."""
        if id(thing) in self.held:
            yield from ((one, None, False) for one in self.held[id(thing)])
            return
        if type(thing) is _C.Handle:
            if thing.kind == "storage":  # a numpy array behind it counts as nothing that it holds
                return
            yield from _C.references_of(thing)
            thing = thing.object
            if thing is None:
                return
            # Its attributes may lie in it, until somebody asks for their dictionary.
            if sys.version_info >= (3, 14) and len(gc.get_referents(thing)) > 1:
                namespace_of(thing)
        yield from ((one, None, False) for one in gc.get_referents(thing))
        kind = self._kind_of(thing)
        if kind == _PARTLY_NATIVE:
            yield from _C.references_of(thing)
        elif kind == _ARRAY:
            yield from ((one, None, False) for one in _held_by_array(thing, self.array))

    def is_held_unseen(self, place: int, target: Any) -> bool:
        """Whether references to a thing are counted that come from nobody who was met. Those to the target's Python
        object are the caller's."""
        thing = self.things[place]
        python, native = self._python_references[place], self._native_references[place]
        if type(thing) is not _C.Handle:
            del thing
            return sys.getrefcount(self.things[place]) - _OWN > python
        if thing.kind == "storage":
            return False
        of_native, of_python, python_owns, native_owns = thing.counts
        return of_native - python_owns > native or (thing is not target and of_python - native_owns > python)

    def labels(self, holder: int) -> dict[int, str]:
        """How a place holds others, where C++ knows, by the identities of these: the first way if there are several."""
        thing = self.things[holder]
        is_native = type(thing) is _C.Handle or self._kind_of(thing) == _PARTLY_NATIVE
        references = _C.references_of(thing) if is_native else []
        return {id(held): label for held, label, _ in reversed(references) if label is not None}

    def places_of(self, identities: set[int]) -> set[int]:
        """Of Python objects, by their identities."""
        found = {self.place[identity] for identity in identities if identity in self.place}
        native = [*self.native["tensor"], *self.native["node"]] if identities else []
        return found | {place for place in native if id(self.things[place].object) in identities}

    def references_to(self, place: int) -> int:
        """How many were met, of those to a handle's thing."""
        return self._python_references[place] + self._native_references[place]

    def _meet_reference(self, held: Any, label: str | None, is_native: bool, at: int) -> int:
        if held is None:
            if label is not None:
                self.unseen[label] += 1
            return NOBODY
        return self._meet(held, at, is_native)

    def _meet(self, held: Any, at: int, is_native: bool = False) -> int:
        """The place of what is held; a new one if it is met for the first time."""
        kind = self._kind_of(held)
        if kind == _SKIPPED:
            return NOBODY
        if kind == _NATIVE and type(held) is not _C.Handle:
            held = _C.handle_of(held) or held  # an undefined tensor has none
        place = self.place.get(id(held))
        if place is None:
            place = self.place[id(held)] = len(self.things)
            self.things.append(held)
            self.parents.append(at)
            if type(held) is _C.Handle:
                native = held.kind
                self.native[native].append(place)
                if native != "storage":  # which holds nothing
                    self._special.add(place)
            elif kind != _PLAIN or id(held) in self.held:
                self._special.add(place)
                if kind == _WORK:
                    self.works.append(place)
        if at != NOBODY:
            (self._native_references if is_native else self._python_references)[place] += 1
        return place

    def _kind_of(self, thing: Any) -> int:
        kind = self._kinds.get(id(type(thing)))
        if kind is None:
            kind = self._kinds[id(type(thing))] = self._find_kind(thing)
        return kind

    def _find_kind(self, thing: Any) -> int:
        cls = type(thing)
        if cls is _C.Handle or issubclass(cls, NATIVE_CLASSES) or _C.handle_of(thing) is not None:
            return _NATIVE
        if issubclass(cls, _PARTLY_NATIVE_TYPES):
            return _PARTLY_NATIVE
        if self.array is not None and issubclass(cls, self.array):
            return _ARRAY
        if self.work is not None and issubclass(cls, self.work):
            return _WORK
        return _PLAIN if TYPE_FLAGS.__get__(cls) & _HAS_REFERENTS else _SKIPPED


def natives_of(listed: list[Any]) -> dict[str, list[Any]]:
    """Handles of the tensors, nodes and storages among what is listed, and of all that these hold natively, by their
    kinds. None of them gets a Python object."""
    samples = {id(type(one)): one for one in listed}  # by identity: a metaclass may not let a class be hashed
    natives = {
        cls for cls, one in samples.items() if issubclass(type(one), NATIVE_CLASSES) or _C.handle_of(one) is not None
    }
    todo = [handle for one in listed if id(type(one)) in natives and (handle := _C.handle_of(one)) is not None]
    kinds: dict[str, list[Any]] = {"tensor": [], "storage": [], "node": []}
    found = set(todo)
    for handle in todo:  # which becomes longer meanwhile
        kinds[kind := handle.kind].append(handle)
        for held, _, is_native in _C.references_of(handle) if kind != "storage" else ():
            if is_native and type(held) is _C.Handle and held not in found:
                found.add(held)
                todo.append(held)
    return kinds


def _held_by_array(array: Any, cls: Any) -> list[Any]:
    """The base of a numpy array, and its items if these are objects; by the descriptors of numpy's own class."""
    base, dtype = (vars(cls)[name].__get__(array) for name in ("base", "dtype"))
    found = [] if base is None else [base]
    return found + list(_objects_in(cls.view(array, cls), cls)) if dtype.hasobject else found


def _objects_in(array: Any, cls: Any) -> Iterator[Any]:
    """Fields and their arrays are looked through, too: a structured array's items are tuples."""
    has_fields = array.dtype.fields is not None
    todo = cls.tolist(cls.ravel(array))
    while todo:
        item = todo.pop()
        if has_fields and type(item) is cls:
            yield from _objects_in(item, cls)
        elif has_fields and type(item) is tuple:
            todo += item
        else:
            yield item
