"""What a check has found, as plain data: nothing in it refers to a tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from zbpipe.memory._format import table

SHOWN_LEAKS = 20  # in the text; more are counted
SHOWN_HOLDERS = 7  # of a chain; longer ones lose their middle


@dataclass(frozen=True)
class Holder:
    """A link of a chain.

    ``kind`` is "module", "frame", "thread", "cell", "function", "dict", "list", "object", "hook", "node", "saved" (a
    tensor that a node has saved), "accumulator", "group", "work", "tensor" or "unknown". ``text`` says in one line what
    it is and how it holds what comes next. ``where`` is the ``file:line`` that made it so, or None. ``bytes`` are a
    tensor's or a group's own, else 0.
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
        return f"{self.name}: {self.bytes} bytes, {self.fate}{made}\n  {words(self.chain)}{more}"

    @property
    def name(self) -> str:
        """As "float32 [4, 8] on cpu"."""
        return f"{self.dtype} {list(self.shape)} on {self.device}" if self.views else f"a block on {self.device}"


@dataclass(frozen=True)
class Cycle:
    """References in a circle that only the collector opens. ``bytes`` are those of the leaks that hang on it."""

    text: str
    steps: list[Holder]
    bytes: int


@dataclass
class Report:
    """What a check found. True if there are leaks; ``str()`` is the text for people."""

    leaks: list[Leak] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    visited: int = 0

    @property
    def bytes(self) -> int:
        """Of all leaks, each storage once."""
        return sum(leak.bytes for leak in self.leaks)

    def __bool__(self) -> bool:
        return bool(self.leaks)

    def __str__(self) -> str:
        if not self.leaks:
            return "no tensor outlived the check" + self._unseen()
        count, collected = len(self.leaks), sum(leak.fate != "alive" for leak in self.leaks)
        head = f"{count} storage{'s' * (count > 1)} ({self.bytes} bytes) outlived the check"
        if collected:
            head += f"; {collected} of them only the garbage collector freed"
        shown = self.leaks[:SHOWN_LEAKS]
        rows = [
            [
                str(number),
                f"{leak.dtype} {list(leak.shape)}" if leak.views else "(no visible tensor)",
                leak.device,
                leak.fate,
                leak.created or "",
                str(leak.views),
                str(leak.bytes),
            ]
            for number, leak in enumerate(shown, 1)
        ]
        header = ["#", "tensor", "device", "fate", "created", "views", "bytes"]
        if not any(leak.created for leak in shown):
            header = header[:4] + header[5:]
            rows = [row[:4] + row[5:] for row in rows]
        lines = [head, "", table(header, rows, left=len(header) - 2)]
        if count > len(shown):
            lines.append(f"and {count - len(shown)} smaller ones")
        lines += ["", "held by"]
        for chain, numbers in _by_chain(shown):
            lines.append(f"  {', '.join(f'#{n}' for n in numbers)}: {chain}")
        if self.cycles:
            lines += ["", "cycles"]
            lines += [f"  {cycle.bytes} bytes: {cycle.text}" for cycle in self.cycles]
        return "\n".join(lines) + self._unseen()

    def _unseen(self) -> str:
        return "".join(f"\n  not seen: {what}" for what in self.unseen)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for ``json.dumps``."""
        return {"bytes": self.bytes, **asdict(self)}

    def draw(self, path: str | PathLike[str], max_leaks: int = 10) -> Path:
        """Draw the graph of the holders of the ``max_leaks`` largest leaks. Returns the path.

        Args:
            path: ``.png`` or ``.svg`` (need matplotlib), or ``.html``: a page that needs nothing else.

        Raises:
            ValueError: another suffix, or ``max_leaks`` below 1.
            ModuleNotFoundError: matplotlib is needed and not installed.
        """
        from zbpipe.leaks._draw import draw

        return draw(self, Path(path), max_leaks)


def words(chain: list[Holder]) -> str:
    """A chain in one line, a long one without its middle."""
    if not chain:
        return "nothing that can be seen"
    shown = [str(holder) for holder in chain]
    if len(shown) > SHOWN_HOLDERS:
        head, tail = SHOWN_HOLDERS // 2 + 1, SHOWN_HOLDERS // 2 - 1
        shown = [*shown[:head], f"... {len(shown) - head - tail} more ...", *shown[-tail:]]
    return " -> ".join(shown)


def _by_chain(leaks: list[Leak]) -> list[tuple[str, list[int]]]:
    """Leaks with equal chains share a line."""
    found: dict[str, list[int]] = {}
    for number, leak in enumerate(leaks, 1):
        more = f" (and {leak.chains_more} more references)" if leak.chains_more else ""
        found.setdefault(words(leak.chain) + more, []).append(number)
    return list(found.items())
