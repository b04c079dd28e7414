"""The picture of a report: a tree from the outermost holders on the left to the tensors on the right.

Note [What the picture shows]

Chains that begin alike share their beginning. Of a long chain the middle is one box, of many branches the largest few
are shown. Python's objects are square, autograd nodes and groups hexagons, tensors round; each family has its colour. A
cycle is a row of its own, with an arrow back.
"""

from __future__ import annotations

from pathlib import Path

from zbpipe.leaks._draw.figure import write_figure
from zbpipe.leaks._draw.page import page_of
from zbpipe.leaks._draw.tree import Drawable, cycle_row, place, tree_of


def draw(report: Drawable, path: Path, max_leaks: int) -> Path:
    """See :meth:`Report.draw`."""
    if max_leaks < 1:
        raise ValueError(f"max_leaks is {max_leaks}; expected 1 or more")
    suffix = path.suffix.lower()
    if suffix not in (".png", ".svg", ".html"):
        raise ValueError(
            f"a picture cannot be written to {path.name!r}; expected a name that ends in .png, .svg or .html"
        )
    roots = tree_of(report, max_leaks)
    cycles = [cycle_row(cycle.steps, cycle.bytes) for cycle in report.cycles[:max_leaks]]
    rows = place(roots, cycles)
    if suffix == ".html":
        path.write_text(page_of(report, roots, cycles, rows), encoding="utf-8")
    else:
        write_figure(report, roots, cycles, rows, path)
    return path
