"""What a check has found, for people, and as a picture for Graphviz.

In the picture the outermost holders are on the left and the tensors on the right. Chains that begin alike share their
beginning; long ones lose their middle. A thick line marks the holder to look at first; a cycle has an arrow back.
"""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from zbpipe._formatting import table
from zbpipe.leaks._alike import by_holder, held_lines, numbered
from zbpipe.leaks._judge import what_next
from zbpipe.leaks._results import COLLECTED, Cycle, Holder, Leak, listed, shortened

SHOWN_LEAKS = 20  # in the table; more are counted
SHOWN_GROUPS = 20  # of holders, and of cycles
_ENDINGS = (".dot", ".svg", ".png")
_LONGEST_CHAIN = 7
_CHARACTERS = 34  # of a line in a box
_LONGEST_TEXT = 120
_OF_PYTHON = 'shape=box fillcolor="#cfe0f1" color="#33658f"'
_LOOKS = {
    **dict.fromkeys(("node", "accumulator", "group", "work"), 'shape=hexagon fillcolor="#d3e8cc" color="#46783a"'),
    **dict.fromkeys(("tensor", "saved"), 'shape=box fillcolor="#f7d9a8" color="#a5691b" style="filled,rounded"'),
    "unknown": 'shape=box fillcolor="#e3e4e6" color="#70757c" style="filled,dashed"',
}


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

    def __post_init__(self) -> None:
        self.places: dict[int, tuple[int, ...]] = {}  # of the chains' holders in the search, by the leaks' storages

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
        lines = [head, "", *self._table(), "", "held by", *_held_by(self.leaks, self.places)]
        for part in (listed("cycles", self.cycles, SHOWN_GROUPS), what_next(self.leaks)):
            lines += ["", *part] if part else []
        return "\n".join(lines) + self._asides()

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
        """Draws the holders of the ``max_leaks`` largest leaks as a graph.

        Args:
            path: a ``.dot`` file, or ``.svg`` or ``.png``, for which Graphviz's program ``dot`` must be there.
            max_leaks: how many leaks to draw, 1 or more.

        Returns:
            The path.

        Raises:
            ValueError: another suffix, or ``max_leaks`` below 1.
            FileNotFoundError: ``dot`` is needed and not there.
        """
        path = Path(path)
        if max_leaks < 1:
            raise ValueError(f"max_leaks is {max_leaks}; expected 1 or more")
        if refusal := refusal_of(path):
            raise (FileNotFoundError if path.suffix in _ENDINGS else ValueError)(refusal)
        text = _dot_of(self, max_leaks)
        if path.suffix == ".dot":
            path.write_text(text, encoding="utf-8")
        else:
            command = ["dot", f"-T{path.suffix[1:]}", f"-o{path}"]
            subprocess.run(command, input=text, encoding="utf-8", check=True, capture_output=True)
        return path


def _held_by(leaks: list[Leak], places_of: dict[int, tuple[int, ...]]) -> list[str]:
    """What each holder has, the most bytes first; numbered as in the table."""
    groups = [
        (mark, places, sum(leaks[place].bytes for place in places))
        for mark, places in by_holder(leaks, places_of).values()
    ]
    groups.sort(key=lambda group: -group[2])
    lines = []
    for mark, places, size in groups[:SHOWN_GROUPS]:
        those = [leaks[place] for place in places]
        more = sum(leak.chains_more for leak in those)
        also = f", and {more} more reference{'s' * (more > 1)}" if more else ""
        lines.append(f"  {size} bytes, {numbered([place + 1 for place in places])}{also}")
        lines += [f"    {line}" for line in held_lines(those, mark)]
    if others := groups[SHOWN_GROUPS:]:
        count, size = sum(len(places) for _, places, _ in others), sum(size for _, _, size in others)
        lines.append(f"  {size} bytes in {count} more, held by {len(others)} others")
    return lines


def refusal_of(path: Path) -> str | None:
    """Why nothing can be drawn under this name, if so."""
    if path.suffix not in _ENDINGS:
        return f"{path.name} is no name of a picture; expected one that ends in {', '.join(_ENDINGS)}"
    if path.suffix != ".dot" and shutil.which("dot") is None:
        return f"{path.name} needs Graphviz's program dot, which is not there; install Graphviz, or write a .dot file"
    return None


def _dot_of(report: Report, max_leaks: int) -> str:
    names: dict[tuple[str, Holder | int], str] = {}  # a box is its holder, and the box before it
    lines = [
        "digraph leaks {",
        'rankdir=LR node [style=filled fontname="sans-serif" fontsize=10] edge [color="#555b62"]',
        f'label="{len(report.leaks)} leaked storages, {report.bytes} bytes; a thick line: look there first" labelloc=t',
    ]
    for number, leak in enumerate(report.leaks[:max_leaks]):
        chain = shortened(leak.chain, _LONGEST_CHAIN, leak.place_of_blame) or [Holder("unknown", leak.name)]
        before = ""
        for place, holder in enumerate(chain):
            is_last = place == len(chain) - 1
            key = before, number if is_last else holder
            if key not in names:
                names[key] = f"n{len(names)}"
                more = f"{leak.bytes} bytes, {leak.fate}" if is_last else ""
                lines.append(_box(names[key], holder, more, holder is leak.blame))
                lines += [f"{before} -> {names[key]}"] if before else []
            before = names[key]
    for number, cycle in enumerate(report.cycles[:max_leaks]):
        steps = shortened(cycle.steps, _LONGEST_CHAIN, 0)
        for place, holder in enumerate(steps):
            lines.append(_box(f"c{number}_{place}", holder, "" if place else f"{cycle.bytes} bytes", False))
            lines.append(f"c{number}_{place} -> c{number}_{(place + 1) % len(steps)}")
    return "\n".join([*lines, "}", ""])


def _box(name: str, holder: Holder, more: str, is_to_blame: bool) -> str:
    look = _LOOKS.get(holder.kind, _OF_PYTHON)
    lines = textwrap.wrap(textwrap.shorten(str(holder), _LONGEST_TEXT), _CHARACTERS) + ([more] if more else [])
    quoted = "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return f'{name} [label="{quoted}" {look}{" penwidth=3" if is_to_blame else ""}]'
