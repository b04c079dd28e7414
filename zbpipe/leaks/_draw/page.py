"""The picture as a page that needs nothing else."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator

from zbpipe.leaks._alike import grouped, merged
from zbpipe.leaks._draw.tree import FAMILIES, Box, Drawable, all_of, lines_of, title_of
from zbpipe.leaks._results import Leak

_PX, _PY, _BX, _BY = 270, 62, 232, 46
_SHOWN_GROUPS = 500

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


def page_of(report: Drawable, roots: list[Box], cycles: list[list[Box]], rows: float) -> str:
    boxes = [*all_of(roots), *(box for cycle in cycles for box in cycle)]
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
    groups = [[report.leaks[place] for place in places] for places in grouped(report.leaks)]
    leaks = "".join(map(_details, groups[:_SHOWN_GROUPS]))
    if len(groups) > _SHOWN_GROUPS:
        leaks += f"<p>and {sum(map(len, groups[_SHOWN_GROUPS:]))} smaller ones</p>"
    return _PAGE.format(
        title=html.escape(title_of(report)), keys=keys, svg=svg, leaks=leaks, text=html.escape(str(report))
    )


def _details(alike: list[Leak]) -> str:
    leak = alike[0]
    blamed = leak.place_of_blame
    texts = [html.escape(str(holder)) for holder in merged([each.chain for each in alike])]
    items = "".join(f"<li><b>{text}</b></li>" if i == blamed else f"<li>{text}</li>" for i, text in enumerate(texts))
    created = f", created at {html.escape(leak.created)}" if leak.created else ""
    more = sum(each.chains_more for each in alike)
    others = f" and {len(alike) - 1} like it" if len(alike) > 1 else ""
    return (
        f"<details><summary>{sum(each.bytes for each in alike)} bytes: {html.escape(leak.name)}, {leak.fate}{created}"
        f"{others}</summary><ol>{items}</ol>{f'<p>and {more} more references</p>' if more else ''}</details>"
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
    lines = lines_of(box)
    middle = y + _BY / 2 - (len(lines) - 1) * 6.5
    texts = "".join(
        f'<text x="{x + _BX / 2:.0f}" y="{middle + i * 13:.0f}">{html.escape(text)}</text>'
        for i, text in enumerate(lines)
    )
    return f'<g class="box" data-path="{path}"><title>{html.escape(box.detail)}</title>{shape}{texts}</g>'
