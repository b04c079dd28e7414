"""What a check has found, for people, files and pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from zbpipe._formatting import table
from zbpipe.leaks._alike import grouped, merged, numbered
from zbpipe.leaks._draw import draw
from zbpipe.leaks._results import COLLECTED, Cycle, Holder, Leak, chain_lines

SCHEMA = 2  # of as_dict(); 1 had each chain's holders in the chain
SHOWN_LEAKS = 20  # in the table; more are counted
SHOWN_GROUPS = 20  # of holders, and of cycles


@dataclass
class Report:
    """What a check found. True if there are leaks; ``str()`` is the text for people.

    ``leaks`` are sorted by bytes, the most first. ``cycles`` are those that they hang on, those that read alike as one.
    ``notes`` say, a line each, what outlived the check and is no leak: what hangs on a library's own cycles, autocast's
    weight cache, DDP's buckets. ``unseen`` says, a line each, what could not be looked at. ``visited`` counts the
    objects that were.
    """

    leaks: list[Leak] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    visited: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Of all leaks, each storage once."""
        return sum(leak.bytes for leak in self.leaks)

    def __bool__(self) -> bool:
        return bool(self.leaks)

    def __str__(self) -> str:
        if not self.leaks:
            return "no tensor outlived the check" + self._asides()
        count, collected = len(self.leaks), sum(leak.fate == COLLECTED for leak in self.leaks)
        head = f"{count} storage{'s' * (count > 1)} ({self.bytes} bytes) outlived the check"
        if collected:
            head += f"; {collected} of them only the garbage collector freed"
        lines = [head, "", *self._table(), "", "held by", *_held_by(self.leaks)]
        if self.cycles:
            shown = self.cycles[:SHOWN_GROUPS]
            lines += ["", "cycles"]
            lines += [f"  {cycle.bytes} bytes: {_times(cycle.count)}{cycle.text}" for cycle in shown]
            lines += [f"  and {len(self.cycles) - len(shown)} more"] if len(self.cycles) > len(shown) else []
        return "\n".join([*lines, *_what_next(self.leaks)]) + self._asides()

    def _table(self) -> list[str]:
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
        more = len(self.leaks) - len(shown)
        return [table(header, rows, left=len(header) - 2), *([f"and {more} smaller ones"] if more else [])]

    def _asides(self) -> str:
        notes = "".join(f"\n  no leak: {note}" for note in self.notes)
        return notes + "".join(f"\n  not seen: {what}" for what in self.unseen)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for ``json.dumps``: the attributes of the report, its leaks and cycles by their names.

        ``holders`` has each holder once; ``chain``, ``blame`` and ``steps`` are places in it (``blame`` None without a
        chain). ``schema`` is 2: another number means other keys.
        """
        places: dict[Holder, int] = {}
        known: dict[int, int] = {}  # by identity, which is quicker to look up

        def place_of(holder: Holder) -> int:
            place = known[id(holder)] = places.setdefault(holder, len(places))
            return place

        def places_of(chain: list[Holder]) -> list[int]:
            return [known[id(holder)] if id(holder) in known else place_of(holder) for holder in chain]

        leaks = []
        for leak in self.leaks:
            chain = places_of(leak.chain)
            data = {name: getattr(leak, name) for name in Leak.__slots__}
            leaks.append({**data, "chain": chain, "blame": chain[leak.place_of_blame] if chain else None})
        cycles = [
            {"text": cycle.text, "steps": places_of(cycle.steps), "bytes": cycle.bytes, "count": cycle.count}
            for cycle in self.cycles
        ]
        holders = [{name: getattr(holder, name) for name in Holder.__slots__} for holder in places]
        return {
            "schema": SCHEMA,
            "bytes": self.bytes,
            "leaks": leaks,
            "cycles": cycles,
            "notes": list(self.notes),
            "unseen": list(self.unseen),
            "visited": self.visited,
            "holders": holders,
        }

    def draw(self, path: str | PathLike[str], max_leaks: int = 10) -> Path:
        """Draw the graph of the holders of the ``max_leaks`` largest leaks. Returns the path.

        Args:
            path: ``.dot``, or ``.svg`` or ``.png``, which Graphviz's program ``dot`` makes of it.

        Raises:
            ValueError: another suffix, or ``max_leaks`` below 1.
            FileNotFoundError: ``dot`` is needed and not there.
        """
        return draw(self, Path(path), max_leaks)


def _held_by(leaks: list[Leak]) -> list[str]:
    """Leaks that are held alike share their lines, those with the most bytes first; numbered as in the table."""
    groups = grouped(leaks)
    lines = []
    for places in groups[:SHOWN_GROUPS]:
        size = sum(leaks[place].bytes for place in places)
        more = sum(leaks[place].chains_more for place in places)
        also = f", and {more} more reference{'s' * (more > 1)}" if more else ""
        lines.append(f"  {size} bytes, {numbered([place + 1 for place in places])}{also}")
        chain = merged([leaks[place].chain for place in places])
        lines += [f"    {line}" for line in chain_lines(chain, leaks[places[0]].place_of_blame)]
    left = groups[SHOWN_GROUPS:]
    if left:
        size = sum(leaks[place].bytes for places in left for place in places)
        lines.append(f"  {size} bytes in {sum(map(len, left))} more, held in {len(left)} other ways")
    return lines


def _times(count: int) -> str:
    return f"{count} like this: " if count > 1 else ""


def _what_next(leaks: list[Leak]) -> list[str]:
    """What to try where nobody is to be seen."""
    if not any(leak.chain and leak.chain[leak.place_of_blame].kind == "unknown" for leak in leaks):
        return []
    said = ["", "where the holder cannot be seen"]
    if not any(leak.created for leak in leaks):
        said.append("  check again with trace=True: it says which line made the memory")
    return [*said, "  let go of what you suspect (del it, clear it) inside the check: what then goes, that held"]
