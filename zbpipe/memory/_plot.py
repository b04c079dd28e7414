"""The picture of a recording: the curve of live bytes, and above it the phases, a row for each kind."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from zbpipe._formatting import Unit, in_words
from zbpipe.memory._results import Event, Path, Phase, short

COLOURS = {"forward": "#8fb8de", "I": "#f2b872", "W": "#a5cf9a", "B": "#d8a2b8"}
OTHER, LINE = "#b8a9d9", "#1f3b57"
POINTS = 4000
"""Of the curve at most, each the highest level of its part: peaks stay."""
MOST_ROWS = 12  # of kinds; what is left shares one more

_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"))


def plot(path: Path, title: str, device: str, phases: Sequence[Phase], events: Iterable[Event]) -> None:
    """See :meth:`Recording.plot`."""
    draw(title, device, phases, events).savefig(path)


def draw(title: str, device: str, phases: Sequence[Phase], events: Iterable[Event]) -> Any:
    """The figure. Without pyplot, which would choose a backend for the whole process."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot() needs matplotlib, which is not installed; pip install matplotlib, or export() the recording",
            name="matplotlib",
        ) from error

    points = curve(events)
    rows: dict[str, list[Phase]] = {}
    for phase in phases:
        name = short(phase.kind)
        rows.setdefault(name if name in rows or len(rows) < MOST_ROWS else "more", []).append(phase)
    begin = min([time for time, _ in points[1:2]] + [p.begin_ns for p in phases], default=0)
    end = max([time for time, _ in points[-1:]] + [p.end_ns for p in phases], default=0)
    most = max(level for _, level in points)
    size = Unit.of(most)
    per, unit = next(((per, unit) for per, unit in _TIMES if end - begin >= 10 * per), _TIMES[-1])
    bars = 0.2 * len(rows)
    figure = Figure(figsize=(12, 4.2 + bars), dpi=120, layout="constrained")
    strip, axes = figure.subplots(2, 1, sharex=True, height_ratios=(max(bars, 0.01), 3.4))
    times = [max(time, begin) / per for time, _ in points] + [end / per]
    levels = [level / size.size for _, level in points] + [points[-1][1] / size.size]
    axes.step(times, levels, where="post", color=LINE, lw=1.1)
    axes.fill_between(times, levels, step="post", color=LINE, alpha=0.15, lw=0)
    axes.set_xlim(begin / per, max(end, begin + 1) / per)
    axes.set_ylim(0, 1.06 * most / size.size or 1)
    axes.set_xlabel(f"{unit} after the recording began")
    axes.set_ylabel(f"live on {device}, {size.name}")
    for row, (name, those) in enumerate(rows.items()):
        spans = [(p.begin_ns / per, (p.end_ns - p.begin_ns) / per) for p in those]
        # An edge shows what is too short for a pixel.
        colour = COLOURS.get(name, OTHER)
        strip.broken_barh(spans, (row + 0.1, 0.8), facecolors=colour, edgecolors=colour, lw=0.6)
        axes.broken_barh(spans, (0, axes.get_ylim()[1]), facecolors=colour, alpha=0.18)
    strip.set_yticks([row + 0.5 for row in range(len(rows))], list(rows), parse_math=False)
    strip.tick_params(bottom=False, labelbottom=False, left=False)
    strip.set_ylim(max(len(rows), 1), 0)
    peak = f"peak {in_words(most)}"
    strip.set_title(
        f"{short(title, 100)}: {peak}" if title else f"{peak} on {device}", loc="left", fontsize=10, parse_math=False
    )
    for part in (strip, axes):
        part.spines[:].set_visible(False)
    return figure


def curve(events: Iterable[Event]) -> list[tuple[int, int]]:
    """Times in ns and live bytes, from (0, 0) on, thinned to :data:`POINTS` with the peaks kept."""
    points: list[tuple[int, int]] = []
    part = 1  # events that are one point, the highest of them
    highest = last = (0, -1)
    for count, (time, _, _, live, _, _) in enumerate(events, start=1):
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
