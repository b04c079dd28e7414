"""The picture of a report, for Graphviz: from the outermost holders on the left to the tensors on the right.

Chains that begin alike share their beginning; of a long chain the middle is left out. The holder to look at first has a
thick line. Autograd nodes and groups are hexagons, tensors round, what cannot be seen is dashed. A cycle has an arrow
back.
"""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Any

from zbpipe.leaks._results import Holder, shortened

ENDINGS = (".dot", ".svg", ".png")
_LONGEST_CHAIN = 7
_CHARACTERS = 34  # of a line in a box
_LONGEST_TEXT = 120
_OF_PYTHON = 'shape=box fillcolor="#cfe0f1" color="#33658f"'
_NODE = 'shape=hexagon fillcolor="#d3e8cc" color="#46783a"'
_TENSOR = 'shape=box fillcolor="#f7d9a8" color="#a5691b" style="filled,rounded"'
_UNKNOWN = 'shape=box fillcolor="#e3e4e6" color="#70757c" style="filled,dashed"'
_LOOKS = {
    **dict.fromkeys(("node", "accumulator", "group", "work"), _NODE),
    **dict.fromkeys(("tensor", "saved"), _TENSOR),
    "unknown": _UNKNOWN,
}


def refusal_of(path: Path) -> str | None:
    """Why nothing can be drawn under this name, if so."""
    if path.suffix not in ENDINGS:
        return f"{path.name} is no name of a picture; expected one that ends in {', '.join(ENDINGS)}"
    if path.suffix != ".dot" and shutil.which("dot") is None:
        return f"{path.name} needs Graphviz's program dot, which is not there; install Graphviz, or write a .dot file"
    return None


def dot_of(report: Any, max_leaks: int) -> str:
    """The picture of a Report as text."""
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
        steps = shortened(cycle.steps, _LONGEST_CHAIN)
        for place, holder in enumerate(steps):
            lines.append(_box(f"c{number}_{place}", holder, "" if place else f"{cycle.bytes} bytes", False))
            lines.append(f"c{number}_{place} -> c{number}_{(place + 1) % len(steps)}")
    return "\n".join([*lines, "}", ""])


def _box(name: str, holder: Holder, more: str, is_to_blame: bool) -> str:
    look = _LOOKS.get(holder.kind, _OF_PYTHON)
    lines = textwrap.wrap(textwrap.shorten(str(holder), _LONGEST_TEXT), _CHARACTERS) + ([more] if more else [])
    quoted = "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return f'{name} [label="{quoted}" {look}{" penwidth=3" if is_to_blame else ""}]'
