"""What a search has found, as plain data: nothing in it refers to a tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

COLLECTED = "freed by the collector"  # a fate
CONTEXT_VARIABLE = "context variable "
SHOWN_HOLDERS = 7  # of a chain; longer ones lose their middle


@dataclass(frozen=True, slots=True)
class Holder:
    """A link of a chain.

    ``kind`` is "module", "frame", "traceback", "thread", "cell", "function", "attribute", "dict", "list", "object",
    "hook", "node", "saved" (a tensor that a node has saved), "accumulator", "group", "work", "tensor", "unknown", or
    "more" (the middle of a very long chain). ``text`` says in one line what it is and how it holds what comes next.
    ``where`` is the ``file:line`` that made it so, or None. ``bytes`` are a tensor's or a group's own, else 0.
    ``is_library``: the standard library or an installed package made it so, not the program.
    """

    kind: str
    text: str
    where: str | None = None
    bytes: int = 0
    is_library: bool = False

    def __str__(self) -> str:
        return f"{self.text} ({self.where})" if self.where else self.text


@dataclass(frozen=True, slots=True)
class Leak:
    """A storage that outlived what made it.

    ``views`` counts the tensors on the storage. ``shape``, ``dtype`` and ``device`` are those of the tensor at the end
    of the chain. Without any visible tensor ``views`` is 0, ``shape`` is empty and ``dtype`` is "". ``bytes`` are the
    storage's, ``storage`` its identity while it lived. ``fate`` is "alive", "freed by the collector" or "uncollectable"
    (in a cycle that no collector frees). ``created`` is the ``file:line`` that made it, where creation was traced.
    ``chain`` leads from the outermost holder to the tensor; ``chains_more`` counts further references to its tensors.
    Of a chain that begins in a cycle the first ``in_cycle`` links are the cycle's.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int
    storage: int
    views: int
    fate: str
    created: str | None
    chain: list[Holder]
    chains_more: int
    in_cycle: int = 0

    def __str__(self) -> str:
        made = f", created at {self.created}" if self.created else ""
        more = f"\n  and {self.chains_more} more reference{'s' * (self.chains_more > 1)}" if self.chains_more else ""
        lines = [f"{self.name}: {self.bytes} bytes, {self.fate}{made}", *chain_lines(self.chain, self.place_of_blame)]
        return "\n  ".join(lines) + more

    @property
    def place_of_blame(self) -> int:
        """Where ``blame`` stands in the chain; 0 without a chain."""
        named = [place for place in _named_places(self.chain) if not self.in_cycle or place < self.in_cycle]
        of_the_program = [place for place in named if not self.chain[place].is_library]
        return (of_the_program or named or [0])[-1]

    @property
    def blame(self) -> Holder | None:
        """The holder to look at first. None without a chain.

        It is the last place with a name before the chain goes through autograd, a parameter group, a work or an
        exception. If a hook hangs there, it is the hook; without such a place, the outermost holder. Places in the
        program come before those in the standard library and in packages. If the chain begins in a cycle, it is one of
        the cycle's.
        """
        return self.chain[self.place_of_blame] if self.chain else None

    @property
    def name(self) -> str:
        """As "float32 [4, 8] on cpu"."""
        return f"{self.dtype} {list(self.shape)} on {self.device}" if self.views else f"a block on {self.device}"


@dataclass(frozen=True, slots=True)
class Cycle:
    """References in a circle that only the collector opens.

    ``steps`` are its links, in order, ``text`` the same in one line. ``bytes`` are those of the leaks that hang on it,
    and on the others of the ``count`` cycles that read like it.
    """

    text: str
    steps: list[Holder]
    bytes: int
    count: int = 1

    def __str__(self) -> str:
        return f"{self.bytes} bytes: {f'{self.count} like this: ' if self.count > 1 else ''}{self.text}"


# Files whose cycles are theirs: what imports, traces, mocks and compares, once for each import or call. Never a part of
# torch that a training step runs through: a cycle there is a leak in each step.
_OWN = ("torch/", "unittest/", "importlib/", "<frozen importlib")
_OF_STEPS = re.compile("torch/(distributed/|autograd/|utils/checkpoint|optim/|nn/modules/|nn/parallel/)")
NAMED = {"module", "frame", "thread", "cell", "function", "attribute"}
TELLING = {"hook", "group", "work", "traceback"}
_OF_AUTOGRAD = {"node", "accumulator", "saved"}
_OF_SOMEBODY = {*NAMED, *TELLING, "unknown"}


def _named_places(chain: list[Holder]) -> list[int]:
    found = []
    for i, (holder, after) in enumerate(pairwise(chain)):
        of_autograd = holder.kind in _OF_AUTOGRAD or (holder.kind == "tensor" and after.kind in _OF_AUTOGRAD)
        if holder.kind in NAMED:
            found.append(i)
        elif holder.kind == "hook":
            return [*found, i]
        elif (of_autograd or holder.kind in TELLING) and after.kind != "hook":
            return found
    return found


def is_a_librarys_own(cycle: Iterable[Holder]) -> bool:
    """Whether a cycle belongs wholly to torch, unittest or an import: each link that somebody wrote is theirs."""
    links = [holder for holder in cycle if holder.kind in _OF_SOMEBODY]
    return bool(links) and all(map(_is_own, links))


def _is_own(link: Holder) -> bool:
    if not link.is_library or link.where is None or not link.where.startswith(_OWN):
        return False
    return link.kind == "attribute" or not _OF_STEPS.match(link.where)


def chain_lines(chain: list[Holder], blamed: int) -> list[str]:
    """A chain from top to bottom, a line each, the one to blame marked; of a long one what tells least is left out."""
    if not chain:
        return ["nothing that can be seen"]
    shown = shortened(chain, SHOWN_HOLDERS, blamed)
    at = next(i for i, holder in enumerate(shown) if holder is chain[blamed])  # alike ones may follow
    return [f"{'>> ' if i == at else '   '}{holder}" for i, holder in enumerate(shown)]


def listed(title: str, things: Sequence[object], most: int) -> list[str]:
    """A title and at most so many of the things below it; no line if there are none."""
    more = [f"  and {len(things) - most} more"] if len(things) > most else []
    return [title, *(f"  {thing}" for thing in things[:most]), *more] if things else []


def shortened(chain: list[Holder], most: int, blamed: int) -> list[Holder]:
    """A chain with at most so many of its own holders, and one of kind "more" for each gap. What the program names is
    always shown."""
    if len(chain) <= most:
        return chain
    last = len(chain) - 1
    always = [0, last, blamed]
    always += [i for i, holder in enumerate(chain) if holder.kind in NAMED and not holder.is_library]
    by_weight = [*always, *(i for i, holder in enumerate(chain) if holder.kind in TELLING)]
    by_weight += [last - 1, *range(1, last)]
    kept = sorted({*always, *list(dict.fromkeys(by_weight))[:most]})
    shown = [chain[0]]
    for before, place in pairwise(kept):
        hidden = chain[before + 1 : place]
        shown += [Holder("more", f"... {len(hidden)} more ...")] if len(hidden) > 1 else hidden
        shown.append(chain[place])
    return shown
