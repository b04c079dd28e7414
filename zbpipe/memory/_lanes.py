"""Where phases and their names stand in a picture: what overlaps in time is in several lanes, names never overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zbpipe.memory._results import Phase, short

MOST_LANES = 24
_AROUND = 5  # pixels that a name keeps free beside it
_ASIDE = 25  # pixels that a name of the lowest row may begin behind its phase


@dataclass(frozen=True)
class Name:
    """A text in lane or row ``row``, around ``centre``. To one that does not stand in its bar leads a line, from the
    height ``leads_from`` at the time ``at``; ``left`` is where the text begins."""

    text: str
    centre: float
    row: int
    at: float = 0
    left: float = 0
    leads_from: float | None = None


def in_lanes(phases: Sequence[Phase]) -> list[list[Phase]]:
    """Each phase in the first lane where nothing else is at its time; the outer of two before the inner. What finds
    none of :data:`MOST_LANES` is left out."""
    lanes: list[list[Phase]] = []
    for phase in sorted(phases, key=lambda p: (p.begin_ns, -p.end_ns)):
        free = next((lane for lane in lanes if lane[-1].end_ns <= phase.begin_ns), None)
        if free is not None:
            free.append(phase)
        elif len(lanes) < MOST_LANES:
            lanes.append([phase])
    return lanes


def named(
    lanes: Sequence[Sequence[Phase]],
    begin: int,
    span: int,
    pixels: float,
    width_of: Callable[[str], float],
    rows: int,
) -> tuple[list[Name], int]:
    """The names that there is room for, and the number of phases without one. ``rows``: of names above the lanes."""
    per_pixel = span / pixels
    names: list[Name] = []
    without: list[tuple[int, Phase]] = []
    for lane, phases in enumerate(lanes):
        for phase in phases:
            centre = (phase.begin_ns + phase.end_ns) / 2
            room = (phase.end_ns - phase.begin_ns) / per_pixel - 2 * _AROUND
            text = next((text for text in _texts(phase) if width_of(text) <= room), None)
            if text is None:
                without.append((lane, phase))
            else:
                names.append(Name(text, centre, lane))
    taken = [float(begin)] * rows  # how far each row is in use, by names or by the lines to those above
    unnamed = len(without)
    for lane, phase in sorted(without, key=lambda entry: entry[1].begin_ns):
        text = _texts(phase)[0]
        wide = (width_of(text) + 2 * _AROUND) * per_pixel
        at = (phase.begin_ns + phase.end_ns) / 2
        lows = [min(max(end, at - wide / 2), begin + span - wide) for end in taken]
        fitting = [
            row
            for row, low in enumerate(lows)
            if taken[row] <= low <= at + (0 if row else _ASIDE * per_pixel)
            and at <= low + wide
            and all(end <= at for end in taken[:row])
        ]
        if not fitting:
            continue
        row = max(
            fitting, key=lambda row: (-lows[row], row)
        )  # the least moved; then the upper, over which no line goes
        taken[:row] = [at + _AROUND * per_pixel] * row
        taken[row] = lows[row] + wide
        left = lows[row] + _AROUND * per_pixel
        names.append(Name(text, lows[row] + wide / 2, len(lanes) + row, at, left, lane + 0.92))
        unnamed -= 1
    return names, unnamed


def _texts(phase: Phase) -> list[str]:
    """What a phase may be called, the best first: in its bar, whose colour says its kind, its number is enough."""
    name = short(phase.kind)
    return [name] if phase.microbatch is None else [f"{name} {phase.microbatch}", str(phase.microbatch)]
