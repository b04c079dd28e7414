"""The picture of a recording: the curve of live bytes, and above it the phases, in lanes where they overlap.

Names are never printed over one another: a phase's stands in its bar if it fits, in a row above the bars if there is
room, and else not at all; how many have none is said.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from zbpipe._formatting import Unit, in_words
from zbpipe.memory._lanes import Name, in_lanes, named
from zbpipe.memory._results import Path, Phase, Recorded, short

COLOURS = {"forward": "#8fb8de", "I": "#f2b872", "W": "#a5cf9a", "B": "#d8a2b8"}
MORE_COLOURS = ("#b8a9d9", "#8ecfc9", "#e6d17a", "#c9b79c", "#e39a8b", "#a9b8c4")
OTHER = "#d5d8dc"
LINE = "#1f3b57"
POINTS = 4000
"""Of the curve at most, each the highest level of its part: peaks stay."""

_WIDTH, _DPI, _SMALL = 12.0, 120, 7  # inches, dots per inch, points
_LEFT, _RIGHT, _BOTTOM, _CURVE = 0.85, 0.3, 0.55, 3.2  # inches
_LANE, _HEAD = 0.17, 0.62  # inches: a lane of phases or a row of names; title and legend
_ROWS = 2  # of names above the bars
_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"))


def plot(recording: Recorded, path: Path, title: str = "") -> None:
    """See :meth:`Recording.plot`."""
    draw(recording, title).savefig(path)


def draw(recording: Recorded, title: str = "") -> Any:
    """The figure."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.font_manager import FontProperties
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot() needs matplotlib, which is not installed; pip install matplotlib, or export() the recording",
            name="matplotlib",
        ) from error

    points = curve(recording)
    phases = recording.phases
    lanes = in_lanes(phases)
    begin = min([time for time, _ in points[1:2]] + [p.begin_ns for p in phases], default=0)
    end = max([time for time, _ in points[-1:]] + [p.end_ns for p in phases], default=0)
    span = max(end - begin, 1)
    bars = _LANE * (len(lanes) + _ROWS) if phases else 0.0
    height = _BOTTOM + _CURVE + bars + _HEAD

    def place(low: float, tall: float) -> tuple[float, float, float, float]:
        return _LEFT / _WIDTH, low / height, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, tall / height

    # Without pyplot, which would choose a backend for the whole process, and without a layout engine: what fits is
    # known before anything is drawn.
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI)
    canvas = FigureCanvasAgg(figure)
    font = FontProperties(size=_SMALL)

    @functools.cache
    def width_of(text: str) -> float:
        """In pixels."""
        renderer: Any = canvas.get_renderer()  # type: ignore[no-untyped-call]
        return float(renderer.get_text_width_height_descent(text, font, False)[0])

    colours = _colours(phases)
    axes = figure.add_axes(place(_BOTTOM, _CURVE))
    _draw_curve(axes, points, begin, span, recording)
    unnamed = len(phases) - sum(map(len, lanes))
    if phases:
        _draw_bars(axes, phases, (0, axes.get_ylim()[1]), colours, alpha=0.18, lw=0)
        strip = figure.add_axes(place(_BOTTOM + _CURVE, bars), sharex=axes)
        pixels = (_WIDTH - _LEFT - _RIGHT) * _DPI
        names, without = named(lanes, begin, span, pixels, width_of, _ROWS)
        unnamed += without
        _draw_phases(strip, lanes, colours, span / pixels, names)
    _draw_head(figure, recording, title, unnamed, colours, width_of, height)
    return figure


def curve(recording: Recorded) -> list[tuple[int, int]]:
    """Times in ns and live bytes, from (0, 0) on, thinned to :data:`POINTS` with the peaks kept."""
    points: list[tuple[int, int]] = []
    part = 1  # events that are one point, the highest of them
    highest = last = (0, -1)
    for count, (time, _, _, live) in enumerate(recording.own_events(), start=1):
        last = (time, live)
        if live > highest[1]:
            highest = last
        if count % part == 0:
            points.append(highest)
            highest = (0, -1)
            if len(points) >= POINTS:
                by_height = operator.itemgetter(1)
                points = [max(points[i : i + 2], key=by_height) for i in range(0, len(points), 2)]
                part *= 2
    rest = [point for point in (highest, last) if point[1] >= 0 and point not in points[-1:]]
    return [(0, 0), *points, *dict.fromkeys(rest)]


def _draw_curve(axes: Any, points: Sequence[tuple[int, int]], begin: int, span: int, recording: Recorded) -> None:
    times = [max(time, begin) for time, _ in points] + [begin + span]
    levels = [level for _, level in points] + [points[-1][1]]
    axes.step(times, levels, where="post", color=LINE, lw=1.1)
    axes.fill_between(times, levels, step="post", color=LINE, alpha=0.15, lw=0)
    most = max(levels)
    axes.set_xlim(begin, begin + span)
    axes.set_ylim(0, most * 1.06 or 1)
    per, unit = next(((per, unit) for per, unit in _TIMES if span >= 10 * per), _TIMES[-1])
    ticks = _ticks(span / per)
    axes.set_xticks([begin + tick * per for tick in ticks], ticks.values())
    axes.set_xlabel(f"{unit}, from {begin / per:.6g} {unit} after the recording began")
    size = Unit.of(most)
    ticks = _ticks(max(most, 1) / size.size)
    axes.set_yticks([tick * size.size for tick in ticks], ticks.values())
    axes.set_ylabel(f"live on {recording.device}, {size.name}")
    axes.spines[["top", "right"]].set_visible(False)


def _ticks(most: float) -> dict[float, str]:
    """Round numbers from 0 to ``most``, at most nine steps apart, and as texts."""
    power = 10.0 ** math.floor(math.log10(most / 9))
    step = next(step for step in (power, 2 * power, 2.5 * power, 5 * power, 10 * power) if most / step <= 9)
    return {i * step: f"{i * step:.6g}" for i in range(int(most / step) + 1)}


def _draw_phases(
    axes: Any, lanes: list[list[Phase]], colours: dict[str, str], per_pixel: float, names: list[Name]
) -> None:
    for lane, phases in enumerate(lanes):
        wide = [phase.end_ns - phase.begin_ns > 4 * per_pixel for phase in phases]
        edges = ["white" if is_wide else colours[p.kind] for p, is_wide in zip(phases, wide, strict=True)]
        _draw_bars(axes, phases, (lane + 0.08, 0.84), colours, edgecolors=edges, lw=0.6)
    for name in names:
        if name.leads_from is not None:
            axes.plot([name.at, max(name.at, name.left)], [name.leads_from, name.row + 0.12], color="#9aa5b1", lw=0.5)
        axes.text(name.centre, name.row + 0.45, name.text, ha="center", va="center", fontsize=_SMALL, parse_math=False)
    axes.set_ylim(0, len(lanes) + _ROWS)
    axes.set_axis_off()


def _draw_bars(
    axes: Any, phases: Sequence[Phase], rows: tuple[float, float], colours: dict[str, str], **look: Any
) -> None:
    """From ``rows[0]`` on, ``rows[1]`` high. In one call: there may be thousands."""
    spans = [(phase.begin_ns, phase.end_ns - phase.begin_ns) for phase in phases]
    axes.broken_barh(spans, rows, facecolors=[colours[phase.kind] for phase in phases], **look)


def _draw_head(
    figure: Any,
    recording: Recorded,
    title: str,
    unnamed: int,
    colours: dict[str, str],
    width_of: Callable[[str], float],
    height: float,
) -> None:
    """The title, and below it the colours of the phases, as many as there is room for."""
    from matplotlib.patches import Rectangle

    peak = f"peak {in_words(recording.peak)}"
    head = f"{short(title, 100)}: {peak}" if title else f"{peak} on {recording.device}"
    left, right = _LEFT / _WIDTH, 1 - _RIGHT / _WIDTH
    upper, lower = 1 - 0.24 / height, 1 - 0.48 / height
    small = {"fontsize": _SMALL, "va": "center", "parse_math": False}
    figure.text(left, upper, head, fontsize=10, va="center", parse_math=False)
    note = f"{unnamed} phases are too short to be named here; print the recording for all" if unnamed else ""
    figure.text(right, lower, note, ha="right", color="#667078", **small)
    end = right - (width_of(note) + 100) / (_WIDTH * _DPI)
    at = left
    for i, (kind, colour) in enumerate(colours.items()):
        text = short(kind)
        if at + (width_of(text) + 34) / (_WIDTH * _DPI) > end:
            figure.text(at, lower, f"and {len(colours) - i} more", **small)
            break
        corner, wide, tall = (at, lower - 0.05 / height), 0.14 / _WIDTH, 0.1 / height
        figure.add_artist(Rectangle(corner, wide, tall, color=colour, transform=figure.transFigure))
        figure.text(at + 0.18 / _WIDTH, lower, text, **small)
        at += (width_of(text) + 34) / (_WIDTH * _DPI)


def _colours(phases: Sequence[Phase]) -> dict[str, str]:
    """A colour per kind, in the order in which they begin."""
    kinds = list(dict.fromkeys(phase.kind for phase in phases))
    others = iter(MORE_COLOURS)
    return {kind: COLOURS.get(kind) or next(others, OTHER) for kind in kinds}
