"""What a check has found, for people, files and pictures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from zbpipe._text import table
from zbpipe.leaks._draw import draw
from zbpipe.leaks._results import Cycle, Leak, held_by

SHOWN_LEAKS = 20  # in the text; more are counted


@dataclass
class Report:
    """What a check found. True if there are leaks; ``str()`` is the text for people.

    ``leaks`` are sorted by bytes, the most first. ``cycles`` are those that they hang on. ``unseen`` says, a line each,
    what could not be looked at. ``visited`` counts the objects that were.
    """

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
        lines += _held_by(shown)
        if self.cycles:
            lines += ["", "cycles"]
            lines += [f"  {cycle.bytes} bytes: {cycle.text}" for cycle in self.cycles]
        return "\n".join(lines) + self._unseen()

    def _unseen(self) -> str:
        return "".join(f"\n  not seen: {what}" for what in self.unseen)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for ``json.dumps``."""
        leaks = [{**asdict(leak), "blame": leak.blame and asdict(leak.blame)} for leak in self.leaks]
        return {"bytes": self.bytes, **asdict(self), "leaks": leaks}

    def draw(self, path: str | PathLike[str], max_leaks: int = 10) -> Path:
        """Draw the graph of the holders of the ``max_leaks`` largest leaks. Returns the path.

        Args:
            path: ``.png`` or ``.svg`` (need matplotlib), or ``.html``: a page that needs nothing else.

        Raises:
            ValueError: another suffix, or ``max_leaks`` below 1.
            ModuleNotFoundError: matplotlib is needed and not installed.
        """
        return draw(self, Path(path), max_leaks)


def _held_by(leaks: list[Leak]) -> list[str]:
    """Leaks that are held alike share their lines; ``leaks`` are numbered as they come."""
    found: dict[tuple[str, ...], dict[str, list[int]]] = {}
    for number, leak in enumerate(leaks, 1):
        lines = held_by(leak)
        way = lines.pop()[len("  -> ") :] if lines[-1].startswith("  -> ") else ""
        more = f" (and {leak.chains_more} more reference{'s' * (leak.chains_more > 1)})" if leak.chains_more else ""
        found.setdefault(tuple(lines), {}).setdefault(f"{way}{more}", []).append(number)
    shown: list[str] = []
    for (holder, *rest), ways in found.items():
        size = sum(leaks[number - 1].bytes for numbers in ways.values() for number in numbers)
        shown += [f"  {holder}: {size} bytes", *(f"  {line}" for line in rest)]
        for way, numbers in ways.items():
            shown.append(f"    {', '.join(f'#{n}' for n in numbers)}{': ' * bool(way)}{way}")
    return shown
