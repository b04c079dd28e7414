"""The picture of a recording."""

from __future__ import annotations

from zbpipe.memory._results import Path, Phase, Recorded

COLOURS = {"forward": "#8fb8de", "I": "#f2b872", "W": "#a5cf9a", "B": "#d8a2b8"}
OTHER = "#d5d8dc"
LINE = "#1f3b57"
POINTS = 4000
"""Of the curve at most, each the highest level of its part: peaks stay."""


def plot(recording: Recorded, path: Path, title: str = "") -> None:
    """See :meth:`Recording.plot`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot() needs matplotlib, which is not installed; pip install matplotlib, or export() the recording",
            name="matplotlib",
        ) from error

    times, levels = curve(recording)
    phases = recording.phases
    # Without pyplot: it would choose a backend for the whole process.
    figure = Figure(figsize=(12, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for phase in phases:
        axes.axvspan(phase.begin_ns / 1e6, phase.end_ns / 1e6, color=_colour(phase), alpha=0.45, lw=0)
    axes.step(times, levels, where="post", color=LINE, lw=1.1)
    axes.fill_between(times, levels, step="post", color=LINE, alpha=0.15, lw=0)
    for phase in phases:
        if times[-1] and (phase.end_ns - phase.begin_ns) / 1e6 > times[-1] / 60:
            number = "" if phase.microbatch is None else f" {phase.microbatch}"
            axes.annotate(
                phase.kind + number,
                ((phase.begin_ns + phase.end_ns) / 2e6, 1.0),
                xycoords=("data", "axes fraction"),
                ha="center",
                va="bottom",
                fontsize=7,
            )
    kinds = dict.fromkeys(phase.kind for phase in phases)
    if kinds:
        patches = [Patch(color=COLOURS.get(kind, OTHER), alpha=0.45, label=kind) for kind in kinds]
        axes.legend(handles=patches, loc="upper left", fontsize=8, frameon=False)
    axes.set_xlim(0, times[-1] or 1)
    axes.set_ylim(0, max(levels) * 1.15 or 1)  # room for the legend
    axes.set_xlabel("time, ms")
    axes.set_ylabel(f"live bytes on {recording.device}, MB")
    axes.set_title(title or f"peak {recording.peak / 1e6:.3f} MB", loc="left", fontsize=10, pad=16)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def curve(recording: Recorded) -> tuple[list[float], list[float]]:
    """Times in ms and live megabytes, thinned to :data:`POINTS` with the peaks kept."""
    points = [(0, 0)] + [(event.time_ns, event.live) for event in recording.events() if not event.older]
    part = max(1, -(-len(points) // POINTS))
    if part > 1:
        points = [max(points[i : i + part], key=lambda point: point[1]) for i in range(0, len(points), part)] + points[
            -1:
        ]
    return [time / 1e6 for time, _ in points], [level / 1e6 for _, level in points]


def _colour(phase: Phase) -> str:
    return COLOURS.get(phase.kind, OTHER)
