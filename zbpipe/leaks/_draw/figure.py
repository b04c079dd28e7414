"""The picture as a file that matplotlib writes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from zbpipe.leaks._draw.tree import FAMILIES, Box, Drawable, all_of, lines_of, title_of

_STEP_X, _STEP_Y = 2.75, 0.72  # inches between boxes
_BOX_X, _BOX_Y = 2.35, 0.56


def write_figure(report: Drawable, roots: list[Box], cycles: list[list[Box]], rows: float, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Polygon
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "draw() needs matplotlib for .png and .svg, which is not installed; pip install matplotlib, or draw .html",
            name="matplotlib",
        ) from error

    boxes = [*all_of(roots), *(box for cycle in cycles for box in cycle)]
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
            "\n".join(lines_of(box)),
            ha="center",
            va="center",
            fontsize=6.2,
            parse_math=False,
        )
    for box in all_of(roots):
        for child in box.children:
            arrow(box, child)
    for cycle in cycles:
        for begin, end in itertools.pairwise(cycle):
            arrow(begin, end)
        arrow(cycle[-1], cycle[0], curve=-0.12)
    axes.text(0.2, 0.2, title_of(report), fontsize=9, va="center", fontweight="bold")
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
