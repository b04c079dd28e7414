"""What a search is for and what it found, in words."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zbpipe import _C
from zbpipe.leaks import _python
from zbpipe.leaks._alike import plain
from zbpipe.leaks._heap import NOBODY
from zbpipe.leaks._results import Cycle, Holder, Leak, is_a_librarys_own
from zbpipe.leaks._ways import Ways, is_part
from zbpipe.leaks._words import Words

PACKAGE = os.path.join(Path(__file__).parents[1], "")
OWN_CODE = (os.path.join(Path(torch.__file__).parent, ""), PACKAGE)
UNSEEN = "C or C++ that cannot be seen"


@dataclass(slots=True)
class Found:
    """A leak. ``rank`` is "root", "hidden" (held from where nobody can look), "cycle" (garbage) or "none"; ``address``
    that of its memory; ``places`` those of the chain's holders in the search. Growth adds its ``key``, the step in
    which it was ``born``, and the ``size`` of its block."""

    leak: Leak
    rank: str
    address: int
    places: tuple[int, ...] = ()
    excused: str | None = None  # whose own cycle keeps it, if that is a library's
    key: int = 0
    born: int = 0
    size: int = 0


@dataclass
class Result:
    """What a search found; nothing in it refers to what was looked at. ``visited`` counts all that was met."""

    found: list[Found]
    cycles: list[Cycle]
    unseen: list[str]
    visited: int


@dataclass(slots=True)
class Scope:
    """What a search is for: the storages on CPU blocks with serials from ``since`` to before ``until`` that are not
    ``exempt``. With ``older``, which :func:`storages_now` returned, also newer storages on other memory. Or that
    of a ``target`` alone: a tensor whose variables do not count as holders, or any tensor's handle.

    ``allowed`` are identities of storages that are not searched for. ``trimmed`` are identities of objects that may
    hold tensors: a chain begins behind the last of them. ``returned`` is held by nobody but the caller. ``predicates``
    say of a leak's tensors whether they may live.
    """

    since: int = 0
    until: int = 2**64 - 1
    exempt: Sequence[range] = ()
    older: Any = None
    target: torch.Tensor | _C.Handle | None = None
    allowed: set[int] = field(default_factory=set)
    trimmed: set[int] = field(default_factory=set)
    returned: Any = None
    predicates: Sequence[Callable[[torch.Tensor], bool]] = ()
    traced: bool = False

    @property
    def handle(self) -> _C.Handle | None:
        return self.target if type(self.target) is _C.Handle else _C.handle_of(self.target)

    def includes(self, serial: int) -> bool:
        return self.since <= serial < self.until and not any(serial in serials for serials in self.exempt)


class Telling:
    """Puts what a search found into words."""

    def __init__(self, ways: Ways, scope: Scope, traces: dict[int, int]) -> None:
        """``traces``: the numbers of the blocks' traces, by their addresses."""
        self._ways, self._heap, self._scope, self._traces = ways, ways.heap, scope, traces
        self._words = Words(ways)
        # By its number: a cycle, from the member on where a chain begins, and the storages that hang on it.
        self._cycles: dict[int, tuple[list[int], list[int]]] = {}
        self._trimmed = self._heap.places_of(scope.trimmed)
        self._works = [place for place in self._heap.works if place < self._heap.reached]
        told = self._words.told(ways.chain(self._works[0])) if self._works else []
        self._first_work = [holder for _, holder in told]

    def result(self, sought: dict[int, list[int]], lost: dict[int, int]) -> Result:
        """``sought`` are storages that are searched for, with the places of their tensors; ``lost`` are blocks that
        nothing visible holds, bytes by their addresses."""
        heap, predicates = self._heap, self._scope.predicates
        found = {}
        for place, tensors in sought.items():
            if not any(may_live(heap.things[i].wrap()) for i in tensors for may_live in predicates):
                found[heap.things[place].address] = self._leak(place, tensors)
        cycles = self._told_cycles(found)
        listed = list(found.values())
        for address, size in lost.items():
            leak = Leak((), "", "cpu", size, 0, 0, "alive", self._created(address), self._perhaps(), 0)
            listed.append(Found(leak, "none", address))
        listed.sort(key=lambda entry: -entry.leak.bytes)
        return Result(listed, cycles, [f"{what}: {count}" for what, count in heap.unseen.items()], len(heap.things))

    def _leak(self, place: int, tensors: list[int]) -> Found:
        things, rank = self._heap.things, self._ways.rank(place)
        identity, (address, held, device, _) = things[place].address, things[place].memory
        way = [] if rank == "none" else self._ways.chain(place)
        if len(way) < 2 or way[-2] in tensors:
            way = way[:-1]  # a tensor stands for its storage
        shown = [place for place in way[-1:] if place in tensors] or tensors[:1]
        shape, dtype, used = things[shown[0]].facts if shown else ((), "", 0)
        told, in_cycle = self._chain(way, rank, identity)
        places, chain = tuple(at for at, _ in told), [holder for _, holder in told]
        if chain:
            last = chain[-1]
            text = f"{last.text}, which uses {used} of {held} bytes" if 0 < used < held else last.text
            text += _in_an_array(things[place], held)
            size = held if last.kind in ("tensor", "saved") else last.bytes
            chain[-1] = self._words.holder(last.kind, text, last.where, size, last.is_library)
        name, created = str(dtype).removeprefix("torch."), self._created(address)
        more = max(sum(map(self._heap.references_to, tensors)) - 1, 0)
        leak = Leak(shape, name, device, held, identity, len(tensors), "alive", created, chain, more, in_cycle)
        return Found(leak, rank, address, places)

    def _chain(self, way: list[int], rank: str, storage: int) -> tuple[list[tuple[int, Holder]], int]:
        """Those from the outermost to the last on a way with their places, and how many of them are a cycle's."""
        scope, things, number_of = self._scope, self._heap.things, self._ways.cycle_number
        cycle = self._cycle_of(way[0], storage) if rank == "cycle" and way else []
        known = max((at for at, place in enumerate(way[:-1]) if place in self._trimmed), default=0)
        of_cycle, in_cycle = bool(cycle) and not known, 0
        # Who holds the first in its cycle: of what that is a part.
        before = [cycle[cycle.index(way[0]) - 1]] if of_cycle and way[0] in cycle else []
        chain = self._words.told([*before, *way[known:]], len(before))
        if of_cycle:
            members = [number_of(place) == number_of(way[0]) for place, _ in chain]
            in_cycle = max((count for count, is_member in enumerate(members, 1) if is_member), default=1)
        first = things[way[0]] if way else None
        if scope.returned is not None and scope.returned is (first.object if type(first) is _C.Handle else first):
            return [(NOBODY, Holder("object", "what the function returned")), *chain], in_cycle
        if rank == "none" and scope.target is not None:
            text = "variables of running functions that are the tensor itself, as far as can be seen"
            return [(NOBODY, Holder("frame", text))], 0
        if rank == "none" or (rank == "hidden" and type(first) is _C.Handle):
            return [*((NOBODY, holder) for holder in self._perhaps()), *chain], in_cycle
        return [(NOBODY, Holder("unknown", UNSEEN)), *chain] if rank == "hidden" else chain, in_cycle

    def _perhaps(self) -> list[Holder]:
        """Of memory that nothing visible holds: works hold tensors and do not tell which."""
        if not self._works:
            return [Holder("unknown", UNSEEN)]
        count = f"one of {len(self._works)} works, say " if len(self._works) > 1 else ""
        *before, work = self._first_work
        return [*before, Holder("work", f"{count}{work.text}, which does not tell what it holds", work.where)]

    def _created(self, address: int) -> str | None:
        return created_at(_C.trace_of(self._traces.get(address, 0)))

    def _cycle_of(self, start: int, storage: int) -> list[int]:
        """The cycle that a chain begins in; the storage hangs on it."""
        number = self._ways.cycle_number(start)
        if number not in self._cycles:
            self._cycles[number] = self._ways.cycle(start), []
        self._cycles[number][1].append(storage)
        return self._cycles[number][0]

    def _told_cycles(self, found: dict[int, Found]) -> list[Cycle]:
        """Those that leaks hang on, the most bytes first, those that read alike as one. What hangs on a library's own
        is excused in ``found``."""
        alike: dict[str, Cycle] = {}
        for cycle, storages in self._cycles.values():
            first = next((at for at, place in enumerate(cycle) if not is_part(self._heap.things[place])), 0)
            turned = [*cycle[first:], *cycle[:first]]
            holders = [holder for _, holder in self._words.told([turned[-1], *turned, turned[0]], 1, -1)]
            text = " -> ".join([*map(_with_line, holders), "back"])
            if is_a_librarys_own(holders):
                for storage in storages:
                    found[storage].excused = text
                continue
            held = sum(found[storage].leak.bytes for storage in storages)
            one = alike.setdefault(plain(text), Cycle(text, holders, 0, 0))
            alike[plain(text)] = replace(one, bytes=one.bytes + held, count=one.count + 1)
        return sorted(alike.values(), key=lambda cycle: -cycle.bytes)


def _in_an_array(storage: _C.Handle, held: int) -> str:
    """Of memory that is a numpy array's: what the array keeps. An array of another's memory has all of that."""
    array, cls = next((held for held, _, _ in _C.references_of(storage)), None), _python.array_type()
    if array is None or cls is None:
        return ""
    base, size = (vars(cls)[name] for name in ("base", "nbytes"))
    while issubclass(type(owner := base.__get__(array)), cls):
        array = owner
    if owner is not None and type(owner) is not bytes:
        return ", in numpy's memory: what is behind the array may be larger"
    whole = size.__get__(array) if owner is None else len(owner)
    return f", in a numpy array of {whole} bytes" if whole > held else ""


def created_at(trace: Sequence[tuple[str, str, int]]) -> str | None:
    """The innermost line that is neither torch's nor ours; else the innermost."""
    outside = [entry for entry in trace if not entry[0].startswith(OWN_CODE)]
    return next((_python.place(filename, line) for filename, _, line in outside or trace), None)


def _with_line(holder: Holder) -> str:
    line = _python.line_at(holder.where)
    return f"{holder.text} ({holder.where}: {line})" if line else str(holder)
