"""What grew, by the place in the program that has it, and what is known of that."""

from __future__ import annotations

from dataclasses import dataclass, field

from zbpipe.leaks._alike import Likeness, by_place, merged
from zbpipe.leaks._results import Cycle, Leak, chain_lines
from zbpipe.leaks._search import Found

SHOWN_HOLDERS = 10
SHOWN_CYCLES = 5
_LEAST = 10  # what is less than a tenth of the largest is not told where the last step made all anew


@dataclass
class Grown:
    """Leaks that one place in the program holds, however they hang below it.

    ``steps`` are those in which they were born. ``is_larger``: they did not become more, but larger. ``nodes``: of the
    autograd graph that hangs on the one leak, where that became more. ``known`` says in words what else is known.
    Without leaks nobody can be seen that has what grew.
    """

    leaks: list[Leak] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    is_larger: bool = False
    known: str = ""
    nodes: int = 0
    mark: int | None = None
    """Where the holder of them all stands in the chains; None if it is the place to blame of each."""

    @property
    def bytes(self) -> int:
        """Of all its leaks."""
        return sum(leak.bytes for leak in self.leaks)

    @property
    def held_by(self) -> list[str]:
        """Lines: the chain to its tensors from top to bottom, the holder of what grew marked by ``>>``."""
        likeness, ways = Likeness(), dict[tuple[str, ...], list[Leak]]()
        for leak in sorted(self.leaks, key=lambda leak: -leak.bytes):
            ways.setdefault(likeness(leak.chain), []).append(leak)
        if not ways:
            return ["nobody that can be seen"]
        most = max(ways.values(), key=lambda leaks: sum(leak.bytes for leak in leaks))
        marked = most[0].place_of_blame if self.mark is None else self.mark
        others = len(ways) - 1
        more = [f"   and in {others} other way{'s' * (others > 1)} from there"] if others else []
        return chain_lines(merged([leak.chain for leak in most]), marked) + more

    @property
    def headline(self) -> str:
        """How much grew, and when, in a line."""
        count = len(self.leaks)
        known = f", {self.known}" if self.known else ""
        if self.nodes:
            return f"a graph of {self.nodes} autograd nodes{known}:"
        head = f"{count} tensor{'s' * (count > 1)} ({self.bytes} bytes)"
        if not self.leaks:
            return "memory that none of the tensors explains:"
        if self.is_larger:
            return f"{head}, larger than any of earlier steps{known}:"
        return f"{head} from steps {self.steps[0]} to {self.steps[-1]}{known}:"


@dataclass
class Member:
    """A leak that the search has found, with its step of birth and the bytes of its block."""

    found: Found
    born: int
    size: int


Group = tuple["int | None", list[Member]]
"""What one holder has, and where that stands in the chains."""


def groups_of(members: list[Member]) -> list[Group]:
    places = by_place([member.found.leak for member in members])
    return [(mark, [members[at] for at in places]) for mark, places in places]


def grown_of(mark: int | None, members: list[Member], is_new: bool = False, is_larger: bool = False) -> Grown:
    """Of members that hang at one place; ``is_new``: the last steps have made them all."""
    known = _known(mark, [member.found for member in members], is_new, is_larger)
    steps = sorted(member.born for member in members)
    return Grown([member.found.leak for member in members], steps, is_larger, known, 0, mark)


def _known(mark: int | None, found: list[Found], is_new: bool, is_larger: bool) -> str:
    if any(entry.rank == "cycle" or entry.excused for entry in found):
        return "in reference cycles that the collector has not met"
    if all(entry.rank == "none" for entry in found):
        return "nobody that can be seen holds them"
    chains = [entry.leak.chain for entry in found if entry.leak.chain]
    if all(chain[-1].text.startswith("Parameter ") for chain in chains):
        return "parameters of modules"
    if is_new:
        return "" if is_larger else "made anew, and more than before"
    below = chains[0][(found[0].leak.place_of_blame if mark is None else mark) + 1 :][:1]
    if len(found) == 1 or not below or below[0].kind not in ("list", "dict") or " item " not in below[0].text:
        return ""
    collection = below[0].text.partition(" item ")[0].rpartition(": ")[2]
    return f"held by a {collection} that was never cleared"


def largest(groups: list[Grown]) -> list[Grown]:
    """Those that may have made a rise, if the last step made all anew."""
    most = max((group.bytes for group in groups), default=0)
    return [group for group in groups if _LEAST * group.bytes > most]


def describe(groups: list[Grown], filling: list[Grown], cycles: list[Cycle]) -> str:
    """What grew and who holds it, for people; empty if nothing grew."""
    lines = []
    for title, some in (("grew, and is held by", groups), ("grew, and may be a window that is not full yet", filling)):
        if some:
            lines += [title, *(line for group in some[:SHOWN_HOLDERS] for line in paragraph(group))]
            lines += [f"  and {len(some) - SHOWN_HOLDERS} more"] if len(some) > SHOWN_HOLDERS else []
    if groups and cycles:
        lines += ["reference cycles, which at most the collector opens", *map(cycle_line, cycles[:SHOWN_CYCLES])]
    return "\n".join(lines)


def paragraph(group: Grown) -> list[str]:
    return [f"  {group.headline}", *(f"    {line}" for line in group.held_by)]


def cycle_line(cycle: Cycle) -> str:
    times = f"{cycle.count} like this: " if cycle.count > 1 else ""
    return f"  {cycle.bytes} bytes: {times}{cycle.text}"
