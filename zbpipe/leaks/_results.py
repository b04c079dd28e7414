"""What a search has found, as plain data: nothing in it refers to a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

SHOWN_HOLDERS = 7  # of a chain; longer ones lose their middle


@dataclass(frozen=True)
class Holder:
    """A link of a chain.

    ``kind`` is "module", "frame", "traceback", "thread", "cell", "function", "attribute", "dict", "list", "object",
    "hook", "node", "saved" (a tensor that a node has saved), "accumulator", "group", "work", "tensor", "unknown", or
    "more" (the middle of a very long chain). ``text`` says in one line what it is and how it holds what comes next.
    ``where`` is the ``file:line`` that made it so, or None. ``bytes`` are a tensor's or a group's own, else 0.
    """

    kind: str
    text: str
    where: str | None = None
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.text} ({self.where})" if self.where else self.text


@dataclass(frozen=True)
class Leak:
    """A storage that outlived what made it.

    ``shape``, ``dtype`` and ``device`` are those of the tensor at the chain's end, one of the ``views`` tensors on the
    storage; without any visible tensor ``views`` is 0, ``shape`` is empty and ``dtype`` is "". ``bytes`` are the
    storage's, ``storage`` its identity while it lived. ``fate`` is "alive" or "freed by the collector". ``created`` is
    the ``file:line`` that made it, where creation was traced. ``chain`` leads from the outermost holder, the one to
    blame, to the tensor; ``chains_more`` counts further references to its tensors.
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

    def __str__(self) -> str:
        made = f", created at {self.created}" if self.created else ""
        more = f"\n  and {self.chains_more} more reference{'s' * (self.chains_more > 1)}" if self.chains_more else ""
        lines = [f"{self.name}: {self.bytes} bytes, {self.fate}{made}", *held_by(self)]
        return "\n  ".join(lines) + more

    @property
    def blame(self) -> Holder | None:
        """The last place with a name in the program before the chain goes through what autograd, a parameter group, a
        work or an exception holds, or the hook that hangs there; else the outermost holder. None without a chain."""
        return self.chain[_place_of_blame(self.chain)] if self.chain else None

    @property
    def name(self) -> str:
        """As "float32 [4, 8] on cpu"."""
        return f"{self.dtype} {list(self.shape)} on {self.device}" if self.views else f"a block on {self.device}"


@dataclass(frozen=True)
class Cycle:
    """References in a circle that only the collector opens.

    ``steps`` are its links, in order, ``text`` the same in one line. ``bytes`` are those of the leaks that hang on it.
    """

    text: str
    steps: list[Holder]
    bytes: int


_NAMED = {"module", "frame", "thread", "cell", "function", "attribute"}
_TELLING = {"hook", "group", "work", "traceback"}
_OF_AUTOGRAD = {"node", "accumulator", "saved"}


def _place_of_blame(chain: list[Holder]) -> int:
    place = 0
    for i, (holder, after) in enumerate(pairwise(chain)):
        of_autograd = holder.kind in _OF_AUTOGRAD or (holder.kind == "tensor" and after.kind in _OF_AUTOGRAD)
        if holder.kind in _NAMED:
            place = i
        elif holder.kind == "hook":
            return i
        elif (of_autograd or holder.kind in _TELLING) and after.kind != "hook":
            return place
    return place


def held_by(leak: Leak) -> list[str]:
    """Lines that begin with who is to blame: who holds that, and how it leads to the tensor."""
    if not leak.chain:
        return ["nothing that can be seen"]
    place = _place_of_blame(leak.chain)
    held = [f"  which hangs on {words(leak.chain[:place])}"] if place else []
    return [
        str(leak.chain[place]),
        *held,
        *([f"  -> {words(leak.chain[place + 1 :])}"] if leak.chain[place + 1 :] else []),
    ]


def words(chain: list[Holder]) -> str:
    """A chain, or a part of one, in one line; a long one without what tells least."""
    return " -> ".join(map(str, shortened(chain, SHOWN_HOLDERS)))


def shortened(chain: list[Holder], most: int) -> list[Holder]:
    """A chain with at most so many of its own holders, and one of kind "more" for each gap."""
    if len(chain) <= most:
        return chain
    last = len(chain) - 1
    by_weight = [0, last, _place_of_blame(chain)]
    by_weight += [i for i, holder in enumerate(chain) if holder.kind in _TELLING]
    by_weight += [last - 1, *range(1, last)]
    kept = sorted(list(dict.fromkeys(by_weight))[:most])
    shown = [chain[0]]
    for before, place in pairwise(kept):
        hidden = chain[before + 1 : place]
        shown += [Holder("more", f"... {len(hidden)} more ...")] if len(hidden) > 1 else hidden
        shown.append(chain[place])
    return shown
