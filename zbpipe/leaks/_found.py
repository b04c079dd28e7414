"""What a search is for and what it found, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CellType
from typing import Any

import torch

from zbpipe import _C
from zbpipe.leaks import _excused, _source
from zbpipe.leaks._alike import plain
from zbpipe.leaks._heap import Heap
from zbpipe.leaks._results import Cycle, Holder, Leak
from zbpipe.leaks._ways import LEFT_OUT, Ways
from zbpipe.leaks._words.chains import Step, Words

_OWN_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_PERHAPS_HELD_BY = 3  # works that are named
_TELLING_OF_CYCLES = ("hook", "cell", "function", "attribute")  # kinds, the most telling first
_LONGEST_CYCLE = 50  # that is walked to find a place of the program's


@dataclass(frozen=True, slots=True)
class Found:
    """A leak. ``rank`` is "root", "hidden" (held from where nobody can look), "cycle" (garbage) or "none"; ``address``
    that of its memory."""

    leak: Leak
    rank: str
    address: int
    excused: str | None = None  # whose own cycle keeps it, if that is a library's


@dataclass
class Result:
    """What a search found; nothing in it refers to what was looked at. ``visited`` counts all that was met."""

    found: list[Found] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    visited: int = 0


@dataclass(slots=True)
class Scope:
    """What a search is for: the storages on CPU blocks with serials from ``since`` to before ``until``, and those on
    other memory that are not among ``older``, what :func:`storages_now` returned; or a ``target``'s alone.

    ``allowed`` are identities of storages that are not searched for. ``trimmed`` are identities of objects that may
    hold tensors: a chain begins behind the last of them. ``returned`` is held by nobody but the caller. ``keep`` is
    asked for each leak, with its tensors, if it is one.
    """

    since: int = 0
    until: int = 2**64 - 1
    older: Any = None
    target: torch.Tensor | None = None
    allowed: set[int] = field(default_factory=set)
    trimmed: set[int] = field(default_factory=set)
    returned: Any = None
    keep: Callable[[list[torch.Tensor]], bool] | None = None
    traced: bool = False


@dataclass(slots=True)
class Sought:
    """A storage that is searched for, with its memory and the places of its tensors."""

    address: int
    bytes: int
    device: str
    identity: int
    tensors: list[int] = field(default_factory=list)


class Telling:
    """Puts what a search found into words."""

    def __init__(self, heap: Heap, ways: Ways, scope: Scope, threads: dict[int, str]) -> None:
        self._heap, self._ways, self._scope = heap, ways, scope
        self._words = Words(threads)
        self._steps: dict[tuple[int, int], Step] = {}
        self._before: dict[int, dict[int, int]] = {}  # by a cycle's number: who comes before each of its members
        self._storages: dict[int, tuple[int, list[int]]] = {}  # likewise: where chains begin, what hangs on it
        self._works: list[list[Holder]] = []
        self._trimmed = heap.places_of(scope.trimmed)

    def result(self, sought: dict[int, Sought], lost: dict[int, int]) -> Result:
        heap = self._heap
        reached = [place for place in heap.works if place < heap.reached]
        self._works = [self._holders(self._ways.chain(place)) for place in reached[:_PERHAPS_HELD_BY]]
        found = {}
        for place, entry in sought.items():
            if self._scope.keep is None or self._scope.keep([heap.things[i].wrap() for i in entry.tensors]):
                found[entry.identity] = self._leak(place, entry)
        cycles = self._cycles(found)
        blocks = [self._block(address, size) for address, size in lost.items()]
        return Result(
            sorted([*found.values(), *blocks], key=lambda entry: -entry.leak.bytes),
            cycles,
            [f"{what}: {count}" for what, count in heap.unseen.items()],
            len(heap.things),
        )

    # ---- leaks

    def _block(self, address: int, size: int) -> Found:
        """One that nothing visible holds."""
        leak = Leak((), "", "cpu", size, 0, 0, "alive", self._created(address), _perhaps(self._works), 0)
        return Found(leak, "none", address)

    def _leak(self, place: int, sought: Sought) -> Found:
        things, rank, scope = self._heap.things, self._ways.rank(place), self._scope
        places = self._chain_to(place, rank)
        last = places[-1] if places else None
        tensors = sorted(sought.tensors, key=lambda tensor: tensor != last)
        shape, dtype, used = things[tensors[0]].facts if tensors else ((), "", 0)
        others = max(sum(map(self._heap.references_to, tensors)) - 1, 0)
        before = self._cycle_before(places[0], sought.identity) if rank == "cycle" and places else {}
        behind = self._behind(places)
        is_whole = len(behind) == len(places)
        if before and is_whole:
            behind = self._from_the_programs(behind, before)
        placed = self._placed(behind, before)
        chain = [holder for _, holder in placed]
        in_cycle = 0
        if before and is_whole:
            out = next((i for i, one in enumerate(behind) if one not in before), len(behind))
            in_cycle = max(sum(at < out for at, _ in placed), 1)
        if places and scope.returned is not None and self._step(places, 0).thing is scope.returned:
            chain.insert(0, Holder("object", "what the function returned"))
        elif rank == "hidden" and self._works and type(things[places[0]]) is _C.Handle:
            chain = _perhaps(self._works) + chain
        elif rank in ("hidden", "none") and scope.target is not None and not chain:
            text = "variables of running functions that are the tensor itself, as far as can be seen"
            chain = [Holder("frame", text)]
        elif rank == "hidden":
            chain.insert(0, Holder("unknown", "C or C++ that cannot be seen"))
        elif rank == "none":
            chain = _perhaps(self._works) + chain
        if chain and used and used < sought.bytes:
            chain[-1] = replace(chain[-1], text=f"{chain[-1].text}, which uses {used} of {sought.bytes} bytes")
        if chain and chain[-1].kind in ("tensor", "saved"):
            chain[-1] = self._words.sized(chain[-1], sought.bytes)
        created, name = self._created(sought.address), str(dtype).removeprefix("torch.")
        leak = Leak(
            shape,
            name,
            sought.device,
            sought.bytes,
            sought.identity,
            len(tensors),
            "alive",
            created,
            chain,
            others,
            in_cycle,
        )
        return Found(leak, rank, sought.address)

    def _chain_to(self, storage: int, rank: str) -> list[int]:
        """Without the storage itself where a tensor stands for it."""
        if rank == "none":
            return []
        places = self._ways.chain(storage)
        is_of_tensor = len(places) < 2 or (places[-2] != LEFT_OUT and self._is_native(places[-2], "tensor"))
        return places[:-1] if is_of_tensor else places

    def _behind(self, places: list[int]) -> list[int]:
        """From the last of those on that are known to hold tensors."""
        known = (i for i, place in enumerate(places[:-1]) if place in self._trimmed)
        return places[max(known, default=0) :]

    def _created(self, address: int) -> str | None:
        """The innermost line that is neither torch's nor ours; else the innermost."""
        trace = _C.trace_of(address) if self._scope.traced and address else []
        for filename, _, line in trace:
            if not filename.startswith(_OWN_CODE):
                return _source.place(filename, line)
        return _source.place(trace[0][0], trace[0][2]) if trace else None

    # ---- cycles

    def _cycle_before(self, start: int, storage: int) -> dict[int, int]:
        """Who comes before each member of the cycle that a chain begins in; the storage hangs on it."""
        number = self._ways.cycle_number(start)
        if number not in self._storages:
            self._storages[number] = start, []
            cycle = self._ways.cycle(start)
            self._before[number] = {place: cycle[i - 1] for i, place in enumerate(cycle)}
        self._storages[number][1].append(storage)
        return self._before[number]

    def _from_the_programs(self, places: list[int], before: dict[int, int]) -> list[int]:
        """A chain that begins in a cycle; if it has no place of the program's, from the cycle's most telling one on."""
        if any(map(_is_the_programs, self._holders(places)[:-1])):
            return places
        longer = list(places)
        while (one := before.get(longer[0])) is not None and one not in longer and len(longer) < _LONGEST_CYCLE:
            longer.insert(0, one)
        added = len(longer) - len(places)
        of_program = [(at, one) for at, one in self._told(longer) if at < added and _is_the_programs(one)]
        for kind in _TELLING_OF_CYCLES:
            if found := [at for at, holder in of_program if holder.kind == kind]:
                return longer[found[-1] :]
        return places

    def _placed(self, places: list[int], before: dict[int, int]) -> list[tuple[int, Holder]]:
        """The holders. The dictionary of a tensor or node in a cycle is described as theirs."""
        if places and places[0] in before and type(self._heap.things[places[0]]) is dict:
            owner = before[places[0]]
            if type(self._heap.things[owner]) is _C.Handle:
                return [(at - 1, holder) for at, holder in self._told([owner, *places]) if at > 0]
        return self._told(places)

    def _cycles(self, found: dict[int, Found]) -> list[Cycle]:
        """Those that leaks hang on, the most bytes first, those that read alike as one. What hangs on a library's own
        is excused in ``found``."""
        alike: dict[str, Cycle] = {}
        for start, storages in self._storages.values():
            held = sum(found[storage].leak.bytes for storage in storages)
            places = self._ways.cycle(start)
            first = next((i for i, place in enumerate(places) if not _is_part(self._heap.things[place])), 0)
            turned = [*places[first:], *places[:first]]
            holders = self._holders([*turned, turned[0]])[:-1]
            text = " -> ".join([*map(_with_line, holders), "back"])
            if _excused.is_a_librarys_own(holders):
                for storage in storages:
                    found[storage] = replace(found[storage], excused=text)
                continue
            cycle = alike.get(plain(text))
            alike[plain(text)] = (
                Cycle(text, holders, held)
                if cycle is None
                else replace(cycle, bytes=cycle.bytes + held, count=cycle.count + 1)
            )
        return sorted(alike.values(), key=lambda cycle: -cycle.bytes)

    # ---- steps

    def _is_native(self, place: int, kind: str) -> bool:
        thing = self._heap.things[place]
        return type(thing) is _C.Handle and thing.kind == kind

    def _holders(self, places: list[int]) -> list[Holder]:
        return [holder for _, holder in self._told(places)]

    def _told(self, places: list[int]) -> list[tuple[int, Holder]]:
        return self._words.placed_holders(self._steps_of(places))

    def _steps_of(self, places: list[int]) -> list[Step]:
        return [self._step(places, at) for at in range(len(places))]

    def _step(self, places: list[int], at: int) -> Step:
        place, before = places[at], places[at - 1] if at else -1
        if place == LEFT_OUT:
            return Step("more", None, str(self._ways.depth(places[at + 1]) - self._ways.depth(before) - 1), None)
        step = self._steps.get((before, place))
        if step is None:
            edge = self._heap.label(before, place) if before >= 0 else None
            thing = self._heap.things[place]
            if type(thing) is _C.Handle:
                step = Step(thing.kind, thing.object, thing.name, edge)
            else:
                step = Step("group" if type(thing) is _C.ParamGroup else "python", thing, "", edge)
            self._steps[before, place] = step
        return step


def _is_the_programs(holder: Holder) -> bool:
    return holder.kind in _TELLING_OF_CYCLES and holder.where is not None and not holder.is_library


def _perhaps(works: list[list[Holder]]) -> list[Holder]:
    """Of memory that nothing visible holds: works hold tensors and do not tell which."""
    if not works:
        return [Holder("unknown", "C or C++ that cannot be seen")]
    count = f"one of {len(works)} works, say " if len(works) > 1 else ""
    *before, work = works[0]
    return [*before, Holder("work", f"{count}{work.text}, which does not tell what it holds", work.where)]


def _is_part(thing: Any) -> bool:
    """What belongs to something else, and says little without it."""
    return any(type(thing) is part for part in (tuple, dict, CellType))


def _with_line(holder: Holder) -> str:
    line = _source.line_at(holder.where)
    return f"{holder.text} ({holder.where}: {line})" if line else str(holder)
