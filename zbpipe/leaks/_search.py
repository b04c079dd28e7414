"""From the process to a report: calls the native search and puts what it found into words, then lets go of it."""

from __future__ import annotations

import contextvars
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CellType, FrameType
from typing import Any

import torch

from zbpipe import _C
from zbpipe._torch.pipelining import work_type
from zbpipe.leaks import _excused, _source
from zbpipe.leaks._alike import plain
from zbpipe.leaks._results import Cycle, Holder, Leak
from zbpipe.leaks._words.chains import Step, Words, thread_names
from zbpipe.leaks._words.of_python import array_type

_HERE = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "_cli"))  # whose frames hold nothing of the user's
_OWN_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_PERHAPS_HELD_BY = 3  # works that are named
_TELLING_OF_CYCLES = ("hook", "cell", "function", "attribute")  # kinds, the most telling first
_LONGEST_CYCLE = 50  # that is walked to find a place of the program's

Root = tuple[Any, "list[Any] | None"]


@dataclass(frozen=True, slots=True)
class Found:
    """A leak; ``rank`` as search_holders() gives it (csrc/bindings/holders.c); ``address`` of its memory."""

    leak: Leak
    rank: str
    address: int
    excused: str | None = None  # whose own cycle keeps it, if that is a library's


@dataclass
class Result:
    """What a search found; nothing in it refers to what was looked at."""

    found: list[Found] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    visited: int = 0


@dataclass
class Scope:
    """What a search is for: see search_holders() in csrc/bindings/holders.c.

    ``trimmed`` are identities of objects that may hold tensors: a chain begins behind the last of them. ``returned`` is
    held by nobody but the caller. ``keep`` is asked for each leak, with its tensors that Python knows, if it is one.
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


def search(scope: Scope) -> Result:
    roots, threads = _roots(scope.target, scope.returned)
    found = _C.search_holders(
        roots,
        [scope.__dict__],
        scope.target,
        scope.allowed,
        scope.since,
        scope.until,
        scope.older,
        work_type(),
        array_type(),
        scope.keep is not None,
    )
    roots.clear()
    try:
        return _in_words(found, scope, Words(threads))
    finally:
        # The steps refer to all that was found: nothing of it may live on.
        found.clear()
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
    return _C.storages_now(_roots_if_frozen())


def are_there_others(older: object) -> bool:
    """Whether tensors live on memory that was not there and that is not torch's CPU allocator's."""
    return _C.storages_since(_roots_if_frozen(), older) > 0


def _roots_if_frozen() -> list[Root]:
    return _roots()[0] if gc.get_freeze_count() else []


def _roots(target: Any = None, returned: Any = None) -> tuple[list[Root], dict[int, str]]:
    """The modules and the frames of all threads with their variables, and the names of the threads.

    Frames of the leak tools are left out, and variables that are the target itself.
    """
    found: list[Root] = [] if returned is None else [(returned, None)]
    found += [(module, None) for module in list(sys.modules.values())]
    found += [(variable, [value]) for variable, value in contextvars.copy_context().items()]
    current = sys._current_frames()
    for frame in current.values():
        at: FrameType | None = frame
        while at is not None:
            if not at.f_code.co_filename.startswith(_HERE):
                held = [value for _, value in _C.frame_variables(at) if target is None or value is not target]
                held.append(at.f_globals)
                if not at.f_code.co_flags & 1:  # a module's or a class's body: its variables are in a dictionary
                    held.append(at.f_locals)
                found.append((at, held))
            at = at.f_back
    names = thread_names(current.items())
    # This frame among its own variables would be a cycle, which keeps all callers' frames and what they hold.
    current.clear()
    frame = at = None  # type: ignore[assignment]
    return found, names


def _in_words(result: dict[str, Any], scope: Scope, words: Words) -> Result:
    works = [words.holders(steps) for steps in result["works"][:_PERHAPS_HELD_BY]]
    cycle_of: dict[int, dict[int, Step]] = {}
    for steps, storages in result["cycles"]:
        before = {id(step[1]): steps[i - 1] for i, step in enumerate(steps) if step[1] is not None}
        cycle_of.update(dict.fromkeys(storages, before))
    found: dict[int, Found] = {}
    lost: list[Found] = []
    leaks = result["leaks"]
    leaks.reverse()
    while leaks:  # of many leaks each goes when it has been put into words
        leak = leaks.pop()
        tensors = [tensor for _, _, tensor, _ in leak[4] if tensor is not None]
        if scope.keep is None or scope.keep(tensors):
            entry = _leak(leak, scope, words, works, cycle_of.get(leak[0], {}))
            if entry.leak.storage:
                found[entry.leak.storage] = entry
            else:
                lost.append(entry)
        del tensors
    cycles = _cycles(result["cycles"], found, words)
    return Result(
        sorted([*found.values(), *lost], key=lambda entry: -entry.leak.bytes),
        cycles,
        [f"{what}: {count}" for what, count in result["unseen"].items()],
        result["visited"],
    )


def _leak(
    leak: tuple[Any, ...],
    scope: Scope,
    words: Words,
    works: list[list[Holder]],
    cycle: dict[int, Step],
) -> Found:
    storage, size, device, address, tensors, steps, rank, others = leak
    shape, dtype, _, used = tensors[0] if tensors else ((), "", None, 0)
    behind = _behind(steps, scope.trimmed)
    if rank == "cycle" and len(behind) == len(steps):
        behind = steps = _from_the_programs(steps, cycle, words)
    placed = _placed(behind, rank, cycle, words)
    chain = [holder for _, holder in placed]
    in_cycle = 0
    if rank == "cycle" and len(behind) == len(steps):
        out = next((i for i, step in enumerate(steps) if id(step[1]) not in cycle), len(steps))
        in_cycle = max(sum(at < out for at, _ in placed), 1)
    if steps and scope.returned is not None and steps[0][1] is scope.returned:
        chain.insert(0, Holder("object", "what the function returned"))
    elif rank == "hidden" and works and steps[0][0] == "tensor":
        chain = _perhaps(works) + chain
    elif rank in ("hidden", "none") and scope.target is not None and not chain:
        chain = [Holder("frame", "variables of running functions that are the tensor itself, as far as can be seen")]
    elif rank == "hidden":
        chain.insert(0, Holder("unknown", "C or C++ that cannot be seen"))
    elif rank == "none":
        chain = _perhaps(works) + chain
    if chain and used and used < size:
        chain[-1] = replace(chain[-1], text=f"{chain[-1].text}, which uses {used} of {size} bytes")
    if chain and chain[-1].kind in ("tensor", "saved"):
        chain[-1] = words.sized(chain[-1], size)
    created = _created(address) if scope.traced and address else None
    name = str(dtype).removeprefix("torch.")
    described = Leak(shape, name, device, size, storage, len(tensors), "alive", created, chain, others, in_cycle)
    return Found(described, rank, address)


def _from_the_programs(steps: list[Step], before: dict[int, Step], words: Words) -> list[Step]:
    """A chain that begins in a cycle; if it has no place of the program's, from the cycle's most telling one on."""
    if not before or any(map(_is_the_programs, words.holders(steps)[:-1])):
        return steps
    longer, seen = list(steps), {id(steps[0][1])}
    while (one := before.get(id(longer[0][1]))) is not None and id(one[1]) not in seen and len(seen) < _LONGEST_CYCLE:
        seen.add(id(one[1]))
        longer.insert(0, one)
    added = len(longer) - len(steps)
    of_program = [
        (at, holder) for at, holder in words.placed_holders(longer) if at < added and _is_the_programs(holder)
    ]
    for kind in _TELLING_OF_CYCLES:
        if places := [at for at, holder in of_program if holder.kind == kind]:
            return longer[places[-1] :]
    return steps


def _is_the_programs(holder: Holder) -> bool:
    return holder.kind in _TELLING_OF_CYCLES and holder.where is not None and not holder.is_library


def _placed(steps: list[Step], rank: str, before: dict[int, Step], words: Words) -> list[tuple[int, Holder]]:
    """The steps as holders. The dictionary of a tensor or node in a cycle is described as theirs, by who comes
    ``before`` each member of the cycle, by identities."""
    if rank == "cycle" and steps and type(steps[0][1]) is dict:
        owner = before.get(id(steps[0][1]))
        if owner is not None and owner[0] in ("tensor", "node"):
            return [(at - 1, holder) for at, holder in words.placed_holders([owner, *steps]) if at > 0]
    return words.placed_holders(steps)


def _perhaps(works: list[list[Holder]]) -> list[Holder]:
    """Of memory that nothing visible holds: works hold tensors and do not tell which."""
    if not works:
        return [Holder("unknown", "C or C++ that cannot be seen")]
    count = f"one of {len(works)} works, say " if len(works) > 1 else ""
    *before, work = works[0]
    return [*before, Holder("work", f"{count}{work.text}, which does not tell what it holds", work.where)]


def _created(address: int) -> str | None:
    """The innermost line that is neither torch's nor ours; else the innermost."""
    trace = _C.trace_of(address)
    for filename, _, line in trace:
        if not filename.startswith(_OWN_CODE):
            return _source.place(filename, line)
    return _source.place(trace[0][0], trace[0][2]) if trace else None


def _behind(steps: list[Step], trimmed: set[int]) -> list[Step]:
    if not trimmed:
        return steps
    last = max((i for i, step in enumerate(steps[:-1]) if step[1] is not None and id(step[1]) in trimmed), default=0)
    return steps[last:]


def _cycles(given: list[tuple[list[Step], list[int]]], found: dict[int, Found], words: Words) -> list[Cycle]:
    """Those that leaks hang on, the most bytes first, those that read alike as one. What hangs on a library's own is
    excused in ``found``."""
    alike: dict[str, Cycle] = {}
    for steps, storages in given:
        held = sum(found[storage].leak.bytes for storage in storages if storage in found)
        if not held:
            continue
        first = next((i for i, step in enumerate(steps) if not _is_part(step[1])), 0)
        turned = [*steps[first:], *steps[:first]]
        holders = words.holders([*turned, turned[0]])[:-1]
        text = " -> ".join([*map(_with_line, holders), "back"])
        if _excused.is_a_librarys_own(holders):
            for storage in storages:
                if storage in found:
                    found[storage] = replace(found[storage], excused=text)
            continue
        before = alike.get(plain(text))
        alike[plain(text)] = (
            Cycle(text, holders, held)
            if before is None
            else replace(before, bytes=before.bytes + held, count=before.count + 1)
        )
    return sorted(alike.values(), key=lambda cycle: -cycle.bytes)


def _is_part(thing: Any) -> bool:
    """What belongs to something else, and says little without it."""
    return any(type(thing) is part for part in (tuple, dict, CellType))


def _with_line(holder: Holder) -> str:
    line = _source.line_at(holder.where)
    return f"{holder.text} ({holder.where}: {line})" if line else str(holder)
