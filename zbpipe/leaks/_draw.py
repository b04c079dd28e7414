"""The picture of a report: a tree from the outermost holders on the left to the tensors on the right.

Note [What the picture shows]

Chains that begin alike share their beginning. Of a long chain the middle is one box, of many branches the largest few
are shown. Python's objects are square, autograd nodes and groups hexagons, tensors round; each family has its colour. A
cycle is a row of its own, with an arrow back.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zbpipe.leaks._report import Holder, Leak, Report, shortened

LONGEST_CHAIN = 7
BRANCHES = 5
CHARACTERS = 34

FAMILIES = {
    "python": ("#cfe0f1", "#33658f", "Python object"),
    "node": ("#d3e8cc", "#46783a", "autograd node, parameter group"),
    "tensor": ("#f7d9a8", "#a5691b", "tensor"),
    "unknown": ("#e3e4e6", "#70757c", "not visible"),
}
"""Fill, line and name of each family."""

_FAMILY = {
    "node": "node",
    "accumulator": "node",
    "group": "node",
    "work": "node",
    "tensor": "tensor",
    "saved": "tensor",
    "unknown": "unknown",
}


@dataclass
class Box:
    """A holder in the picture; ``column`` and ``row`` are its place. One that is to blame has a thick line."""

    text: str
    family: str
    detail: str
    bytes: int = 0
    blamed: bool = False
    children: list[Box] = field(default_factory=list)
    column: int = 0
    row: float = 0.0


def draw(report: Report, path: Path, max_leaks: int) -> Path:
    """See :meth:`Report.draw`."""
    if max_leaks < 1:
        raise ValueError(f"max_leaks is {max_leaks}; expected 1 or more")
    suffix = path.suffix.lower()
    if suffix not in (".png", ".svg", ".html"):
        raise ValueError(
            f"a picture cannot be written to {path.name!r}; expected a name that ends in .png, .svg or .html"
        )
    roots = tree(report, max_leaks)
    cycles = [cycle_row(cycle.steps, cycle.bytes) for cycle in report.cycles[:max_leaks]]
    rows = place(roots, cycles)
    if suffix == ".html":
        path.write_text(_page(report, roots, cycles, rows), encoding="utf-8")
    else:
        _figure(report, roots, cycles, rows, path)
    return path


# ---- the tree


def tree(report: Report, max_leaks: int) -> list[Box]:
    """The boxes of the largest leaks, without places."""
    roots: list[Box] = []
    for leak in report.leaks[:max_leaks]:
        boxes = roots
        for holder in shortened(leak.chain, LONGEST_CHAIN)[:-1]:
            box = next((b for b in boxes if (b.text, b.detail) == (_short(holder), str(holder))), None)
            if box is None:
                box = _box(holder)
                boxes.append(box)
            box.bytes += leak.bytes
            box.blamed |= holder is leak.blame
            boxes = box.children
        boxes.append(_leaf(leak))
    for box in _all(roots):
        _thin(box)
    return roots


def cycle_row(steps: list[Holder], size: int) -> list[Box]:
    row = [_box(holder) for holder in shortened(steps, LONGEST_CHAIN)]
    row[0].bytes = size
    return row


def place(roots: list[Box], cycles: list[list[Box]]) -> float:
    """Gives each box its place. Returns the number of rows."""
    row = 0.0
    for root in roots:
        row = _place(root, 0, row)
    for cycle in cycles:
        row += 0.4
        for column, box in enumerate(cycle):
            box.column, box.row = column, row
        row += 1.4  # and the way back below
    return row


def _place(box: Box, column: int, row: float) -> float:
    box.column = column
    if not box.children:
        box.row = row
        return row + 1
    for child in box.children:
        row = _place(child, column + 1, row)
    box.row = (box.children[0].row + box.children[-1].row) / 2
    return row


def _box(holder: Holder) -> Box:
    return Box(_short(holder), _FAMILY.get(holder.kind, "python"), str(holder))


def _leaf(leak: Leak) -> Box:
    holder = leak.chain[-1] if leak.chain else Holder("unknown", leak.name)
    created = f", created at {leak.created}" if leak.created else ""
    family = "tensor" if leak.views else "unknown"
    return Box(_short(holder), family, f"{holder}\n{leak.bytes} bytes, {leak.fate}{created}", leak.bytes)


def _thin(box: Box) -> None:
    if len(box.children) > BRANCHES:
        box.children.sort(key=lambda child: -child.bytes)
        rest = box.children[BRANCHES - 1 :]
        size = sum(child.bytes for child in rest)
        more = Box(f"... {len(rest)} more ...", "tensor", "\n".join(child.detail for child in rest), size)
        box.children[BRANCHES - 1 :] = [more]


def _all(boxes: list[Box]) -> Iterator[Box]:
    todo = list(boxes)
    while todo:
        box = todo.pop()
        yield box
        todo += box.children


def _short(holder: Holder) -> str:
    return holder.text if len(holder.text) <= 2 * CHARACTERS else holder.text[: 2 * CHARACTERS - 3] + "..."


def _lines(box: Box) -> list[str]:
    """The text of a box in at most three lines."""
    text = box.text
    if len(text) > CHARACTERS:
        cut = max(text.rfind(" ", 0, CHARACTERS), text.rfind(".", 0, CHARACTERS))
        cut = cut + 1 if cut > CHARACTERS // 2 else CHARACTERS
        lines = [text[:cut].strip(), text[cut:].strip()]
    else:
        lines = [text]
    return [*lines, f"{box.bytes} bytes"] if box.bytes else lines


def _title(report: Report) -> str:
    return f"{len(report.leaks)} leaked storages, {report.bytes} bytes; a thick line: look there first"


# ---- with matplotlib

_STEP_X, _STEP_Y = 2.75, 0.72  # inches between boxes
_BOX_X, _BOX_Y = 2.35, 0.56


def _figure(report: Report, roots: list[Box], cycles: list[list[Box]], rows: float, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Polygon
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "draw() needs matplotlib for .png and .svg, which is not installed; pip install matplotlib, or draw .html",
            name="matplotlib",
        ) from error

    boxes = [*_all(roots), *(box for cycle in cycles for box in cycle)]
    columns = max((box.column for box in boxes), default=0) + 1
    width, height = columns * _STEP_X + 0.2, max(rows, 1) * _STEP_Y + 1.1
    # Without pyplot: it would choose a backend for the whole process.
    figure = Figure(figsize=(width, height), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")

    def corner(box: Box) -> tuple[float, float]:
        return 0.2 + box.column * _STEP_X, 0.75 + box.row * _STEP_Y

    def arrow(begin: Box, end: Box, curve: float = 0.0) -> None:
        (x0, y0), (x1, y1) = corner(begin), corner(end)
        start, stop = (x0 + _BOX_X, y0 + _BOX_Y / 2), (x1, y1 + _BOX_Y / 2)
        if curve:
            start, stop = (x0 + _BOX_X * 0.7, y0 + _BOX_Y), (x1 + _BOX_X * 0.3, y1 + _BOX_Y)
            curve = -0.5 if begin is end else curve
        style = f"arc3,rad={curve}"
        axes.add_patch(
            FancyArrowPatch(
                start, stop, arrowstyle="-|>", mutation_scale=9, color="#555b62", lw=0.9, connectionstyle=style
            )
        )

    for box in boxes:
        x, y = corner(box)
        fill, line, _ = FAMILIES[box.family]
        style: dict[str, Any] = {"facecolor": fill, "edgecolor": line, "linewidth": 2.6 if box.blamed else 1.1}
        if box.family == "unknown":
            style["linestyle"] = "--"
        if box.family == "tensor":
            axes.add_patch(FancyBboxPatch((x, y), _BOX_X, _BOX_Y, boxstyle="round,pad=0,rounding_size=0.24", **style))
        elif box.family == "node":
            tip = 0.16
            corners = [(x, y + _BOX_Y / 2), (x + tip, y), (x + _BOX_X - tip, y)]
            corners += [(x + _BOX_X, y + _BOX_Y / 2), (x + _BOX_X - tip, y + _BOX_Y), (x + tip, y + _BOX_Y)]
            axes.add_patch(Polygon(corners, closed=True, **style))
        else:
            axes.add_patch(FancyBboxPatch((x, y), _BOX_X, _BOX_Y, boxstyle="square,pad=0", **style))
        axes.text(
            x + _BOX_X / 2,
            y + _BOX_Y / 2,
            "\n".join(_lines(box)),
            ha="center",
            va="center",
            fontsize=6.2,
            parse_math=False,
        )
    for box in _all(roots):
        for child in box.children:
            arrow(box, child)
    for cycle in cycles:
        for begin, end in itertools.pairwise(cycle):
            arrow(begin, end)
        arrow(cycle[-1], cycle[0], curve=-0.12)
    axes.text(0.2, 0.2, _title(report), fontsize=9, va="center", fontweight="bold")
    families = {box.family for box in boxes}
    patches = [Patch(facecolor=f, edgecolor=e, label=n) for family, (f, e, n) in FAMILIES.items() if family in families]
    if patches:
        axes.legend(
            handles=patches,
            loc="upper left",
            bbox_to_anchor=(0.2 / width, 1 - 0.3 / height),
            ncols=4,
            fontsize=6.5,
            frameon=False,
        )
    figure.savefig(path)


# ---- as a page of its own

_PX, _PY, _BX, _BY = 270, 62, 232, 46

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color: #1d2126; }}
pre {{ background: #f5f6f7; padding: .8em; overflow: auto; }}
.picture {{ overflow: auto; border: 1px solid #d9dce0; }}
svg text {{ font-size: 10.5px; text-anchor: middle; dominant-baseline: central; }}
g.box {{ cursor: pointer; }} g.box:hover > :first-of-type {{ stroke-width: 2.5; }}
svg.picked g.box, svg.picked path.edge {{ opacity: .22; }}
svg.picked g.box.on, svg.picked path.edge.on {{ opacity: 1; }}
details {{ margin: .3em 0; }} summary {{ cursor: pointer; }} li {{ margin: .15em 0; }}
.key {{ display: inline-block; width: 1em; height: 1em; vertical-align: -.15em; margin: 0 .4em 0 1em;
  border: 1px solid; }}
</style></head><body>
<h1>{title}</h1>
<p>Click a box to see what it holds and what holds it; click beside it to see all.{keys}</p>
<div class="picture">{svg}</div>
<h2>Leaks</h2>
{leaks}
<details><summary>The report as text</summary><pre>{text}</pre></details>
<script>
const svg = document.querySelector("svg"), parts = [...svg.querySelectorAll("[data-path]")];
svg.addEventListener("click", event => {{
  const box = event.target.closest("g.box");
  svg.classList.toggle("picked", !!box);
  if (!box) return;
  const path = box.dataset.path;
  for (const part of parts) {{
    const other = part.dataset.path;
    part.classList.toggle("on", other === path || other.startsWith(path + ".") || path.startsWith(other + "."));
  }}
}});
</script></body></html>
"""


def _page(report: Report, roots: list[Box], cycles: list[list[Box]], rows: float) -> str:
    boxes = [*_all(roots), *(box for cycle in cycles for box in cycle)]
    columns = max((box.column for box in boxes), default=0) + 1
    parts: list[str] = []
    for number, root in enumerate(roots):
        parts += _svg_tree(root, str(number))
    for number, cycle in enumerate(cycles, len(roots)):
        parts += _svg_cycle(cycle, str(number))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * _PX + 20}" '
        f'height="{round(max(rows, 1) * _PY) + 30}">'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555b62"/></marker></defs>' + "".join(parts) + "</svg>"
    )
    keys = "".join(
        f'<span class="key" style="background:{fill};border-color:{line}"></span>{name}'
        for fill, line, name in FAMILIES.values()
    )
    leaks = "".join(_details(leak) for leak in report.leaks)
    return _PAGE.format(
        title=html.escape(_title(report)), keys=keys, svg=svg, leaks=leaks, text=html.escape(str(report))
    )


def _details(leak: Leak) -> str:
    texts = [(html.escape(str(holder)), holder is leak.blame) for holder in leak.chain]
    items = "".join(f"<li><b>{text}</b></li>" if blamed else f"<li>{text}</li>" for text, blamed in texts)
    created = f", created at {html.escape(leak.created)}" if leak.created else ""
    more = f"<p>and {leak.chains_more} more references</p>" if leak.chains_more else ""
    return (
        f"<details><summary>{leak.bytes} bytes: {html.escape(leak.name)}, {leak.fate}{created}</summary>"
        f"<ol>{items}</ol>{more}</details>"
    )


def _at(box: Box) -> tuple[float, float]:
    return 10 + box.column * _PX, 10 + box.row * _PY


def _svg_tree(root: Box, path: str) -> Iterator[str]:
    todo = [(root, path)]
    while todo:
        box, here = todo.pop()
        yield _svg_box(box, here)
        for number, child in enumerate(box.children):
            below = f"{here}.{number}"
            yield _svg_edge(box, child, below)
            todo.append((child, below))


def _svg_cycle(cycle: list[Box], path: str) -> Iterator[str]:
    for begin, end in itertools.pairwise(cycle):
        yield _svg_edge(begin, end, path)
    (x0, y0), (x1, y1) = _at(cycle[-1]), _at(cycle[0])
    low = y0 + _BY + 14
    way = f"M{x0 + _BX * 0.6:.0f} {y0 + _BY:.0f}V{low:.0f}H{x1 + _BX * 0.4:.0f}V{y1 + _BY:.0f}"
    yield _svg_line(way, path)
    for box in cycle:
        yield _svg_box(box, path)


def _svg_edge(begin: Box, end: Box, path: str) -> str:
    (x0, y0), (x1, y1) = _at(begin), _at(end)
    x0, y0, y1 = x0 + _BX, y0 + _BY / 2, y1 + _BY / 2
    middle = (x0 + x1) / 2
    way = f"M{x0:.0f} {y0:.0f}C{middle:.0f} {y0:.0f} {middle:.0f} {y1:.0f} {x1:.0f} {y1:.0f}"
    return _svg_line(way, path)


def _svg_line(way: str, path: str) -> str:
    return f'<path class="edge" data-path="{path}" d="{way}" fill="none" stroke="#555b62" marker-end="url(#tip)"/>'


def _svg_box(box: Box, path: str) -> str:
    x, y = _at(box)
    fill, line, _ = FAMILIES[box.family]
    style = f'fill="{fill}" stroke="{line}"' + (' stroke-width="2.6"' if box.blamed else "")
    if box.family == "node":
        tip = 14
        points = [(x, y + _BY / 2), (x + tip, y), (x + _BX - tip, y)]
        points += [(x + _BX, y + _BY / 2), (x + _BX - tip, y + _BY), (x + tip, y + _BY)]
        shape = f'<polygon points="{" ".join(f"{px:.0f},{py:.0f}" for px, py in points)}" {style}/>'
    else:
        radius = 20 if box.family == "tensor" else 0
        dashes = ' stroke-dasharray="5 3"' if box.family == "unknown" else ""
        shape = f'<rect x="{x:.0f}" y="{y:.0f}" width="{_BX}" height="{_BY}" rx="{radius}" {style}{dashes}/>'
    lines = _lines(box)
    middle = y + _BY / 2 - (len(lines) - 1) * 6.5
    texts = "".join(
        f'<text x="{x + _BX / 2:.0f}" y="{middle + i * 13:.0f}">{html.escape(text)}</text>'
        for i, text in enumerate(lines)
    )
    return f'<g class="box" data-path="{path}"><title>{html.escape(box.detail)}</title>{shape}{texts}</g>'
