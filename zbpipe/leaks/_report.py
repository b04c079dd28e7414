"""What a check has found, for people and pictures."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from zbpipe._formatting import table
from zbpipe.leaks._alike import by_holder, held_lines, numbered
from zbpipe.leaks._draw import ENDINGS, dot_of, refusal_of
from zbpipe.leaks._results import COLLECTED, Cycle, Leak

SHOWN_LEAKS = 20  # in the table; more are counted
SHOWN_GROUPS = 20  # of holders, and of cycles


@dataclass
class Report:
    """What a check found. A report with leaks is true. ``str()`` gives a text, ``dataclasses.asdict()`` what
    ``json.dumps`` takes.

    ``leaks`` are sorted by bytes, the most first. ``cycles`` are the reference cycles that hold them; cycles that read
    alike are one entry. ``notes`` has a line for each thing that outlived the check and is no leak: what a library's
    own cycles hold, autocast's weight cache, DDP's buckets. ``unseen`` has a line for each thing that could not be
    looked at. ``visited`` is the number of objects that were looked at.
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
            left = len(self.cycles) - SHOWN_GROUPS
            lines += ["", "cycles", *(f"  {cycle}" for cycle in self.cycles[:SHOWN_GROUPS])]
            lines += [f"  and {left} more"] if left > 0 else []
        return "\n".join([*lines, *_what_next(self.leaks)]) + self._asides()

    def _table(self) -> list[str]:
        shown, rows = self.leaks[:SHOWN_LEAKS], []
        traced = ["created"] if any(leak.created for leak in shown) else []
        for number, leak in enumerate(shown, 1):
            what = f"{leak.dtype} {list(leak.shape)}" if leak.views else "(no visible tensor)"
            made = [leak.created or "" for _ in traced]
            rows.append([str(number), what, leak.device, leak.fate, *made, str(leak.views), str(leak.bytes)])
        said = table(["#", "tensor", "device", "fate", *traced, "views", "bytes"], rows, left=4 + len(traced))
        more = len(self.leaks) - SHOWN_LEAKS
        return [said, *([f"and {more} smaller ones"] if more > 0 else [])]

    def _asides(self) -> str:
        notes = "".join(f"\n  no leak: {note}" for note in self.notes)
        return notes + "".join(f"\n  not seen: {what}" for what in self.unseen)

    def draw(self, path: str | PathLike[str], max_leaks: int = 10) -> Path:
        """Draw the graph of the holders of the ``max_leaks`` largest leaks. Returns the path.

        Args:
            path: ``.dot``, or ``.svg`` or ``.png``, which Graphviz's program ``dot`` makes of it.

        Raises:
            ValueError: another suffix, or ``max_leaks`` below 1.
            FileNotFoundError: ``dot`` is needed and not there.
        """
        path = Path(path)
        if max_leaks < 1:
            raise ValueError(f"max_leaks is {max_leaks}; expected 1 or more")
        if refusal := refusal_of(path):
            raise (FileNotFoundError if path.suffix in ENDINGS else ValueError)(refusal)
        text = dot_of(self, max_leaks)
        if path.suffix == ".dot":
            path.write_text(text, encoding="utf-8")
        else:
            command = ["dot", f"-T{path.suffix[1:]}", f"-o{path}"]
            subprocess.run(command, input=text, encoding="utf-8", check=True, capture_output=True)
        return path


def _held_by(leaks: list[Leak]) -> list[str]:
    """What each holder has, the most bytes first; numbered as in the table."""
    groups = [(mark, places, sum(leaks[place].bytes for place in places)) for mark, places in by_holder(leaks)]
    groups.sort(key=lambda group: -group[2])
    lines = []
    for mark, places, size in groups[:SHOWN_GROUPS]:
        more = sum(leaks[place].chains_more for place in places)
        also = f", and {more} more reference{'s' * (more > 1)}" if more else ""
        lines.append(f"  {size} bytes, {numbered([place + 1 for place in places])}{also}")
        lines += [f"    {line}" for line in held_lines([leaks[place] for place in places], mark)]
    if left := groups[SHOWN_GROUPS:]:
        count, size = sum(len(places) for _, places, _ in left), sum(size for _, _, size in left)
        lines.append(f"  {size} bytes in {count} more, held by {len(left)} others")
    return lines


def _what_next(leaks: list[Leak]) -> list[str]:
    """What to try where nobody is to be seen."""
    first = [leak.chain[leak.place_of_blame] for leak in leaks if leak.chain and leak.chain[0].kind == "unknown"]
    if not any(holder.kind == "unknown" for holder in first):
        return []
    said = ["", "where the holder cannot be seen"]
    if not any(leak.created for leak in leaks):
        said.append("  check again with trace=True: it says which line made the memory")
    return [*said, "  let go of what you suspect (del it, clear it) inside the check: what then goes, that held"]
