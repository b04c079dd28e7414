"""What grew, by the place in the program that has it, and what is known of that."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from zbpipe.leaks._alike import Key, by_holder, held_lines
from zbpipe.leaks._judge import bounded_blocks, what_next
from zbpipe.leaks._results import Cycle, Leak, listed
from zbpipe.leaks._search import Found


@dataclass
class Grown:
    """Leaks that one place in the program holds, however they hang below it.

    ``leaks`` is empty if no holder of what grew can be seen. ``steps`` are the steps that allocated the leaks.
    ``is_larger`` is True if the tensors became larger, but not more. ``nodes`` counts the nodes of the autograd graph
    on the first leak, on which the others hang, if the nodes became more. ``known`` says in words what else is known.
    ``mark`` is the position in the chains (with ``nodes``, in the first) at which the holder of all leaks stands, and
    ``place`` that holder in words. ``keys`` are those of :class:`Growth`; none of what is made anew.
    """

    leaks: list[Leak] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    is_larger: bool = False
    known: str = ""
    nodes: int = 0
    mark: int = 0
    place: Key = ()
    keys: set[int] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        """Of all its leaks."""
        return sum(leak.bytes for leak in self.leaks)

    @property
    def is_of_library(self) -> bool:
        """Whether the holder that is marked is."""
        chain = self.leaks[0].chain if self.leaks else []
        return bool(chain) and chain[self.mark].is_library

    @property
    def held_by(self) -> list[str]:
        """Lines: the chain to its tensors from top to bottom, the holder of what grew marked by ``>>``."""
        by_bytes = self.leaks[:1] if self.nodes else sorted(self.leaks, key=lambda leak: -leak.bytes)
        return held_lines(by_bytes, self.mark) if by_bytes else ["nobody that can be seen"]

    @property
    def headline(self) -> str:
        """How much grew, and when, in a line."""
        count = len(self.leaks) - (self.nodes > 0)
        known = f", {self.known}" if self.known else ""
        tensors = f"{count} tensor{'s' * (count > 1)}"
        when = f" from steps {self.steps[0]} to {self.steps[-1]}" if self.steps else ""
        if self.nodes:
            return f"a graph of {self.nodes} autograd nodes{known}{f', with {tensors}{when}' if count else ''}:"
        if not self.leaks:
            return f"memory that none of the tensors explains{known}:"
        when = ", larger than any of earlier steps" if self.is_larger else when
        return f"{tensors} ({self.bytes} bytes){when}{known}:"

    def add_graph(self, graph: Grown) -> bool:
        """Takes over the mark of what holds most of a graph, if all leaks here hang on one tensor's graph."""
        ends = [next((at for at, one in enumerate(leak.chain) if one.kind == "node"), 0) for leak in self.leaks]
        above = {tuple(one.text for one in leak.chain[:at]) for leak, at in zip(self.leaks, ends, strict=True)}
        if self.nodes or len(above) != 1 or above == {()}:
            return False
        self.leaks, self.nodes, self.mark = [*graph.leaks, *self.leaks], graph.nodes, graph.mark
        return True

    def __str__(self) -> str:
        return "\n    ".join([self.headline, *self.held_by])


_COLLECTION = re.compile(r"(?:(?:(?! item ).)*?: )??(?:(?!tuple )(\S+) item |member of a set$)")  # which can be cleared
ANEW = "made anew, and more than before"


class Group(NamedTuple):
    """A holder by the chain down to it, where it stands in the chains, and what it has."""

    place: Key
    mark: int
    found: list[Found]


def groups_of(found: list[Found]) -> list[Group]:
    places = {entry.leak.storage: entry.places for entry in found}
    groups = by_holder([entry.leak for entry in found], places, {entry.leak.storage: entry.born for entry in found})
    return [Group(place, mark, [found[at] for at in places]) for place, (mark, places) in groups.items()]


def grown_of(group: Group, instead: str | None = None, is_larger: bool = False) -> Grown:
    """Of what hangs at one place; ``instead``: what is said of it in the place of "never cleared", if not None."""
    place, mark, found = group
    known = _known(mark, found, instead)
    steps = sorted(entry.born for entry in found)
    keys = set[int]() if is_larger or instead == ANEW else {entry.key for entry in found}
    return Grown([entry.leak for entry in found], steps, is_larger, known, 0, mark, place, keys)


def _known(mark: int, found: list[Found], instead: str | None) -> str:
    if any(entry.rank == "cycle" or entry.excused for entry in found):
        return "in reference cycles that the collector has not met"
    unseen = {entry.size for entry in found if entry.rank == "none"}
    if like := {holder for size, (_, holder) in (bounded_blocks() if unseen else {}).items() if size in unseen}:
        return f"some as large as {min(like)}"
    if all(entry.rank == "none" for entry in found):
        return "nobody that can be seen holds them"
    chains = [entry.leak.chain for entry in found if entry.leak.chain]
    if all(chain[-1].text.startswith("Parameter ") for chain in chains):
        return "parameters of modules"
    if instead is not None:
        return instead
    below = [holder.text for holder in chains[0][mark + 1 : mark + 2] if holder.kind in ("list", "dict")]
    collection = _COLLECTION.match(below[0]) if below and len(found) > 1 else None
    return f"held by a {collection[1] or 'set'} that was never cleared" if collection else ""


def lines_of(grown: list[Grown], filling: list[Grown], cycles: list[Cycle]) -> list[str]:
    """What grew and who holds it, for people; empty if nothing grew."""
    return [
        *listed("grew, and is held by", grown, 10),
        *listed("grew, and may be a window that is not full yet", filling, 10),
        *listed("reference cycles, which at most the collector opens", cycles if grown else [], 5),
        *what_next([leak for group in grown for leak in group.leaks]),
    ]
