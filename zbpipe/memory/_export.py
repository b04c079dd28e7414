"""What is made of a recording: tables, and files as the events are read: a million are never in memory at once."""

from __future__ import annotations

import gzip
import json
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from zbpipe._formatting import Unit, in_words, table
from zbpipe._version import __version__
from zbpipe.memory._log import AtPeak, Phase

_AT_ONCE = 20_000  # pieces that one write takes
_GZIP_LEVEL = 3  # a million events: 5.7 MB; 4.8 MB in 2.4 times the time at level 9
COLOURS = {"forward": "#8fb8de", "I": "#f2b872", "W": "#a5cf9a", "B": "#d8a2b8"}  # of the project's other pictures, too
_OTHER, _LINE = "#b8a9d9", "#1f3b57"
_POINTS = 4000  # of the curve, and of as many parts at most the highest level
_MOST_ROWS = 12  # of kinds of phases; what is left shares one more
_MS = 1e6
_CHARACTER = 0.006  # of the width, at font size 6
SHOWN_AT_PEAK = 10  # rows

Events = Iterable[tuple[Any, ...]]  # the fields of each Allocation
Path = str | os.PathLike[str]


def export(path: Path, device: str, phases: Sequence[Phase], events: Events) -> None:
    """See :meth:`Recording.export`."""
    name = os.fspath(path)
    if not name.endswith((".json", ".json.gz")):
        raise ValueError(f"{name!r} does not say which format to write; end it in .json or .json.gz")
    rest = _chrome_trace(device, phases, events)
    with gzip.open(name, "wb", _GZIP_LEVEL) if name.endswith(".gz") else open(name, "wb") as file:
        while pieces := list(islice(rest, _AT_ONCE)):
            file.write("".join(pieces).encode())


def _chrome_trace(device: str, phases: Sequence[Phase], events: Events) -> Iterator[str]:
    """The trace event format: a counter event per allocation, a complete event per phase; microseconds."""
    process = os.getpid()
    name = {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"zbpipe, memory of {device}"}}
    slices = [
        {"ph": "X", "name": p.label, "cat": p.kind, "pid": process, "tid": p.thread, "ts": p.begin_ns / 1e3}
        | {"dur": (p.end_ns - p.begin_ns) / 1e3, "args": asdict(p)}
        for p in phases
    ]
    yield '{"traceEvents": [' + ",\n".join(map(json.dumps, [name, *slices]))
    # By hand: json.dumps of a dictionary takes six times as long.
    counter = json.dumps(f"live bytes, {device}")
    row = f',\n{{"ph":"C","name":{counter},"pid":{process},"ts":%d.%03d,"args":{{"bytes":%d}}}}'
    yield row % (0, 0, 0)
    for time_ns, _, _, live, _, older in events:
        if not older:
            yield row % (time_ns // 1000, time_ns % 1000, live)
    tail = {"displayTimeUnit": "ms", "otherData": {"producer": f"zbpipe {__version__}"}}
    yield "],\n" + json.dumps(tail)[1:]


def draw(title: str, device: str, phases: Sequence[Phase], events: Events, count: int) -> Any:
    """The picture: the curve of live bytes over ``count`` events with its peak marked, above it the phases, a row for
    each kind, with the stage and the microbatch where there is room. Without pyplot, which would choose a backend for
    the whole process."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot() needs matplotlib, which is not installed; pip install matplotlib, or export() the recording",
            name="matplotlib",
        ) from error

    points = curve(events, count)
    rows: dict[str, list[Phase]] = {}
    for phase in phases:
        name = short(phase.kind)
        rows.setdefault(name if name in rows or len(rows) < _MOST_ROWS else "more", []).append(phase)
    begin = min([time for time, _ in points[1:2]] + [p.begin_ns for p in phases], default=0)
    end = max([time for time, _ in points[-1:]] + [p.end_ns for p in phases])
    at, most = max(points, key=operator.itemgetter(1))
    size = Unit.of(most)
    bars = 0.2 * len(rows)
    figure = Figure(figsize=(12, 4.2 + bars), dpi=120, layout="constrained")
    strip, axes = figure.subplots(2, 1, sharex=True, height_ratios=(max(bars, 0.01), 3.4))
    times = [max(time, begin) / _MS for time, _ in points] + [end / _MS]
    levels = [level / size.size for _, level in [*points, points[-1]]]
    axes.step(times, levels, where="post", color=_LINE, lw=1.1)
    axes.fill_between(times, levels, step="post", color=_LINE, alpha=0.15, lw=0)
    axes.set(xlim=(begin / _MS, max(end, begin + 1) / _MS), ylim=(0, 1.06 * most / size.size or 1))
    axes.set(xlabel="ms after the recording began", ylabel=f"live on {device}, {size.name}")
    for row, (name, those) in enumerate(rows.items()):
        spans = [(p.begin_ns / _MS, (p.end_ns - p.begin_ns) / _MS) for p in those]
        colour = COLOURS.get(name, _OTHER)
        # An edge shows what is too short for a pixel.
        strip.broken_barh(spans, (row + 0.1, 0.8), facecolors=colour, edgecolors=colour, lw=0.6)
        axes.broken_barh(spans, (0, axes.get_ylim()[1]), facecolors=colour, alpha=0.18)
        for phase, (left, width) in zip(those, spans, strict=True):
            numbers = (("s", phase.stage), ("m", phase.microbatch))
            text = " ".join(f"{letter}{number}" for letter, number in numbers if number is not None)
            if text and width > _CHARACTER * len(text) * max(end - begin, 1) / _MS:
                strip.text(left + width / 2, row + 0.5, text, ha="center", va="center", fontsize=6)
    axes.plot([at / _MS], [most / size.size], "o", color=_LINE, ms=4)
    strip.set_yticks([row + 0.5 for row in range(len(rows))], list(rows), parse_math=False)
    strip.tick_params(bottom=False, labelbottom=False, left=False)
    strip.set_ylim(max(len(rows), 1), 0)
    head = f"{short(str(title), 100)}: peak {in_words(most)}" if title else f"peak {in_words(most)} on {device}"
    strip.set_title(head, loc="left", fontsize=10, parse_math=False)
    for part in (strip, axes):
        part.axvline(at / _MS, color=_LINE, lw=0.8, ls=":")
        part.spines[:].set_visible(False)
    return figure


def curve(events: Events, count: int) -> list[tuple[int, int]]:
    """Times in ns and live bytes from (0, 0) on, thinned where there are many: of each part the highest level."""
    points, last = [(0, 0)], (0, 0)
    levels = ((time, live) for time, _, _, live, _, _ in events)
    while part := list(islice(levels, count // _POINTS + 1)):
        points.append(max(part, key=operator.itemgetter(1)))
        last = part[-1]
    return points if last == points[-1] else [*points, last]


def short(name: str, most: int = 28) -> str:
    """A name in one line of at most so many characters."""
    line = " ".join(name.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def phase_table(phases: Sequence[Phase]) -> str:
    """All bytes in one unit, that of the largest."""
    unit = Unit.of(max(p.peak for p in phases))
    header = ("phase", "ms", *(f"{column}, {unit.name}" for column in ("begin", "end", "peak")), "blocks")
    rows = []
    for p in phases:
        sizes = [unit(size) for size in (p.live_begin, p.live_end, p.peak)]
        rows.append((short(p.label, 31), f"{(p.end_ns - p.begin_ns) / 1e6:.2f}", *sizes, str(p.allocations)))
    return table(header, rows)


def peak_table(rows: Sequence[AtPeak]) -> str:
    """The ten largest, all bytes in one unit, that of the largest."""
    unit = Unit.of(rows[0].bytes)
    cells = []
    for row in rows[:SHOWN_AT_PEAK]:
        blame = row.holder.blame if row.holder is not None else None
        held = f"{row.alive}, {blame or 'nothing that can be seen'}" if row.alive else "0"
        cells.append((short(row.phase, 60), row.created or "", held, str(row.blocks), unit(row.bytes)))
    left = rows[SHOWN_AT_PEAK:]
    more = f"\nand {unit.words(sum(row.bytes for row in left))} in {len(left)} smaller rows" if left else ""
    return table(("made in", "at", "alive at the end, and held by", "blocks", unit.name), cells, left=3) + more
