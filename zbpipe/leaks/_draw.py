"""The picture of a report, for Graphviz: from the outermost holders on the left to the tensors on the right.

Note [What the picture shows]

Chains that begin alike share their beginning; of a long chain the middle is left out. The holder to look at first has a
thick line. Autograd nodes and groups are hexagons, tensors round, what cannot be seen is dashed. A cycle has an arrow
back.
"""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from zbpipe.leaks._results import Cycle, Holder, Leak, shortened

ENDINGS = (".dot", ".svg", ".png")
_LONGEST_CHAIN = 7
_CHARACTERS = 34  # of a line in a box
_LONGEST_TEXT = 120
_LOOKS = {"node": "node", "accumulator": "node", "group": "node", "work": "node", "tensor": "tensor", "saved": "tensor"}
_ATTRIBUTES = {
    "python": 'shape=box fillcolor="#cfe0f1" color="#33658f"',
    "node": 'shape=hexagon fillcolor="#d3e8cc" color="#46783a"',
    "tensor": 'shape=box fillcolor="#f7d9a8" color="#a5691b" style="filled,rounded"',
    "unknown": 'shape=box fillcolor="#e3e4e6" color="#70757c" style="filled,dashed"',
}


class Drawable(Protocol):
    """A report, as the drawing reads it."""

    leaks: list[Leak]
    cycles: list[Cycle]

    @property
    def bytes(self) -> int: ...


def draw(report: Drawable, path: Path, max_leaks: int) -> Path:
    """See :meth:`Report.draw`."""
    if max_leaks < 1:
        raise ValueError(f"max_leaks is {max_leaks}; expected 1 or more")
    if refusal := refusal_of(path):
        raise (FileNotFoundError if path.suffix in ENDINGS else ValueError)(refusal)
    text = dot_of(report, max_leaks)
    if path.suffix == ".dot":
        path.write_text(text, encoding="utf-8")
    else:
        command = ["dot", f"-T{path.suffix[1:]}", f"-o{path}"]
        subprocess.run(command, input=text, encoding="utf-8", check=True, capture_output=True)
    return path


def refusal_of(path: Path) -> str | None:
    """Why nothing can be drawn under this name, if so."""
    if path.suffix not in ENDINGS:
        return f"{path.name} is no name of a picture; expected one that ends in {', '.join(ENDINGS)}"
    if path.suffix != ".dot" and not can_render():
        return f"{path.name} needs Graphviz's program dot, which is not there; install Graphviz, or write a .dot file"
    return None


def can_render() -> bool:
    return shutil.which("dot") is not None


def dot_of(report: Drawable, max_leaks: int) -> str:
    names: dict[tuple[str, Holder | int], str] = {}  # a box is its holder, and the box before it
    lines = [
        "digraph leaks {",
        'rankdir=LR node [style=filled fontname="sans-serif" fontsize=10] edge [color="#555b62"]',
        f'label="{len(report.leaks)} leaked storages, {report.bytes} bytes; a thick line: look there first" labelloc=t',
    ]
    for number, leak in enumerate(report.leaks[:max_leaks]):
        chain = shortened(leak.chain, _LONGEST_CHAIN) or [Holder("unknown", leak.name)]
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
        lines += _cycle(f"c{number}_", shortened(cycle.steps, _LONGEST_CHAIN), cycle.bytes)
    return "\n".join([*lines, "}", ""])


def _cycle(name: str, steps: list[Holder], size: int) -> Iterable[str]:
    for place, holder in enumerate(steps):
        yield _box(f"{name}{place}", holder, "" if place else f"{size} bytes", False)
        yield f"{name}{place} -> {name}{(place + 1) % len(steps)}"


def _box(name: str, holder: Holder, more: str, is_to_blame: bool) -> str:
    look = _LOOKS.get(holder.kind, "unknown" if holder.kind == "unknown" else "python")
    text = "\n".join(
        [*textwrap.wrap(textwrap.shorten(str(holder), _LONGEST_TEXT), _CHARACTERS), *([more] if more else [])]
    )
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{name} [label="{quoted}" {_ATTRIBUTES[look]}{" penwidth=3" if is_to_blame else ""}]'
