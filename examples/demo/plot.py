"""The picture: loss curves, one step's memory and the ranks' actions in it, bars of time and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from demo.config import SCHEDULES, Config
from demo.report import Result, pairs
from zbpipe.memory._export import COLOURS as ACTIONS

COLOURS = {"torch": "#c4622d", "zbpipe": "#1f6f8b"}
SPANS = {name[0].upper(): colour for name, colour in ACTIONS.items()}
"""Colours of a rank's actions, as in zbpipe's plots of memory."""
WORDS = {"F": "forward", "I": "input pass", "W": "weight pass", "B": "whole backward"}
INK = "#33373d"

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa0a8",
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def draw(results: Sequence[Result], config: Config) -> None:
    """Writes the picture to ``config.out``. A side that failed is left out of its panels."""
    couples = pairs(results)
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(3.4 * max(len(couples), 3), 14), layout="constrained", dpi=120)
        figure.suptitle(
            f"Pipeline training on torch's own split backward and on zbpipe:\n{config.ranks} processes, "
            f"{config.num_stages} stages, {config.microbatches} microbatches",
            fontsize=13,
            fontweight="bold",
        )
        (upper,), (lower,) = figure.subfigures(2, 1, squeeze=False, height_ratios=[3, 1], hspace=0.03)
        panels = upper.subplots(3, len(couples), squeeze=False)
        for row in panels[:2]:
            for axes in row[1:]:
                axes.sharey(row[0])
        for column, couple in enumerate(couples):
            _losses(panels[0][column], couple)
            _memory(panels[1][column], couple)
            _timeline(panels[2][column], couple)
        highest = max((memory.peak for result in results for memory in result.memory), default=0)
        panels[1][0].set_ylim(0, highest / 1e6 * 1.2 or 1)
        panels[0][0].set_ylabel("loss, nats per byte")
        panels[1][0].set_ylabel("live bytes in one step, MB")
        bars = lower.subplots(1, 3)
        _bars(bars[0], couples, "Step time, ms (median)", ".0f", lambda r: r.seconds * 1e3)
        _bars(bars[1], couples, "CPU time, ms (median)", ".0f", lambda r: r.cpu_seconds * 1e3)
        _bars(bars[2], couples, "Peak, MB", ".3g", lambda r: r.peak / 1e6)
        figure.savefig(config.out, format="png")
        plt.close(figure)


def _losses(axes: Axes, couple: Sequence[Result]) -> None:
    """Both curves. torch's is broad, so that zbpipe's is seen on top of it."""
    look: dict[str, dict[str, Any]] = {
        "torch": {"lw": 5.0, "alpha": 0.45},
        "zbpipe": {"lw": 1.6, "marker": "o", "ms": 3.0},
    }
    for result in couple:
        if result.error is None:
            steps = range(1, len(result.losses) + 1)
            axes.plot(steps, result.losses, color=COLOURS[result.side], label=result.side, **look[result.side])
    axes.set_title(_label(couple))
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()


def _label(couple: Sequence[Result]) -> str:
    return SCHEDULES[couple[0].schedule].label


def _timeline(axes: Axes, couple: Sequence[Result]) -> None:
    """Each rank's actions in the step whose memory was recorded, side by side."""
    rows = [(result, rank) for result in couple if result.error is None for rank in range(len(result.memory))]
    for place, (result, rank) in enumerate(rows):
        for name, begin, end in result.memory[rank].spans:
            axes.broken_barh(
                [(begin * 1e3, (end - begin) * 1e3)],
                (place - 0.4, 0.8),
                facecolor=SPANS[name],
                lw=0,
            )
    axes.set_yticks(range(len(rows)), [f"{result.side}, {rank}" for result, rank in rows], fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_title("one recorded step, not the median")
    axes.set_xlabel("ms")
    _legend(axes, [kind for kind in SPANS if any(kind in result.memory[rank].kinds for result, rank in rows)])


def _legend(axes: Axes, kinds: Sequence[str]) -> None:
    handles = [Patch(facecolor=SPANS[kind], label=WORDS[kind]) for kind in kinds]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=7)


def _memory(axes: Axes, couple: Sequence[Result]) -> None:
    """Live bytes over the actions of one step, on the rank where torch (or what ran) has the highest peak."""
    shown = [result for result in couple if result.error is None]
    if not shown:
        return
    rank = max(range(len(shown[0].memory)), key=lambda r: shown[0].memory[r].peak)
    for result in shown:
        memory = result.memory[rank]
        megabytes = [level / 1e6 for level in memory.live]
        axes.plot(memory.position, megabytes, color=COLOURS[result.side], lw=1.4, label=result.side)
        axes.fill_between(memory.position, megabytes, color=COLOURS[result.side], alpha=0.15, lw=0)
    kinds = shown[0].memory[rank].kinds
    for place, kind in enumerate(kinds):
        axes.axvspan(place, place + 1, ymax=0.035, facecolor=SPANS[kind], lw=0)
    axes.set_xlim(0, len(kinds))
    axes.set_xticks([])
    axes.set_title(f"memory on rank {rank}, which has most")
    axes.set_xlabel("its actions in order, coloured as below")
    axes.legend(loc="upper right", ncols=2, fontsize=7)


def _bars(
    axes: Axes,
    couples: Sequence[Sequence[Result]],
    title: str,
    digits: str,
    value: Callable[[Result], float],
) -> None:
    for number, couple in enumerate(couples):
        for offset, result in zip((-0.2, 0.2), couple, strict=True):
            if result.error is None:
                bar = axes.bar(number + offset, value(result), 0.36, color=COLOURS[result.side])
                axes.bar_label(bar, [format(value(result), digits)], padding=2, fontsize=6)
            else:
                axes.text(number + offset, 0, "failed", ha="center", va="bottom", rotation=90, fontsize=8)
    axes.set_xticks(range(len(couples)), [_label(couple).replace(" ", "\n") for couple in couples])
    axes.grid(axis="x", visible=False)
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.15)
    axes.set_title(title)
    axes.legend(handles=[Patch(facecolor=colour, label=side) for side, colour in COLOURS.items()], fontsize=7)
