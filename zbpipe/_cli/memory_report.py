"""The memory of one rank's step, as data; and that of all ranks, as text."""

from __future__ import annotations

from typing import Any

from zbpipe._cli.ranks import heading, numbered, told_by_themselves
from zbpipe._formatting import Unit, in_words, table
from zbpipe.memory import Recording
from zbpipe.memory._results import phase_table, short_label

SHOWN_HIGHEST, SHOWN_LOWEST = 12, 4  # rows of many ranks
_BETWEEN = "none of its phases"


def of_rank(which: str, recording: Recording, before: int) -> dict[str, Any]:
    """For json.dumps: ``which`` step it was, its numbers in bytes, and its phases as a table."""
    phases = [p for p in recording.phases if p.kind != "between" or p.allocations or p.frees]
    highest = next((p for p in phases if p.peak == recording.peak), None)
    return {
        "head": f"{which} on {recording.device}",
        "before": before,
        "highest": short_label(highest) if highest else _BETWEEN,
        **{name: getattr(recording, name) for name in ("peak", "allocated", "allocations", "live", "incomplete")},
        "phases": phase_table(phases) if phases else "",
    }


def without_step(why: str) -> dict[str, Any]:
    return {"head": why}


def text_of(reports: dict[int, dict[str, Any]], missing: list[int], world: int) -> str:
    """The reports of some of `world` ranks; of those that are missing it says so."""
    if world == 1:
        (report,) = reports.values()
        return _of_one(report)
    lines = heading("memory", {rank: report["head"] for rank, report in reports.items()}, world)
    if missing:
        lines.append(told_by_themselves(missing))
    measured = {rank: report for rank, report in reports.items() if "peak" in report}
    if measured:
        most = min(measured, key=lambda rank: _by_most_in_use((rank, measured[rank])))
        lines += ["", _table_of_ranks(measured), *_incomplete(measured)]
        if measured[most]["phases"]:
            whose = f"rank {most}, which has most in use at once" if len(measured) > 1 else f"rank {most}"
            lines += ["", f"{whose}, by phase:", measured[most]["phases"]]
    return "\n".join(lines)


def _of_one(report: dict[str, Any]) -> str:
    if "peak" not in report:
        return f"zbpipe memory: {report['head']}"
    peak, before, allocated, live = (in_words(report[name]) for name in ("peak", "before", "allocated", "live"))
    lines = [
        f"zbpipe memory: {report['head']}",
        f"peak {peak} in {report['highest']}",
        f"above the {before} that were there before",
        f"{allocated} in {report['allocations']} allocations, of which {live} live at its end",
    ]
    lines += [f"incomplete: {report['incomplete']}"] if report["incomplete"] else []
    return "\n".join([*lines, "", report["phases"]] if report["phases"] else lines)


def _by_most_in_use(entry: tuple[int, dict[str, Any]]) -> tuple[int, int]:
    rank, report = entry
    return -(report["before"] + report["peak"]), rank


def _table_of_ranks(reports: dict[int, dict[str, Any]]) -> str:
    """That which has most in use first; of very many ranks the first and the last."""
    columns = ("peak", "before", "live")
    unit = Unit.of(max(report[name] for report in reports.values() for name in columns))
    rows = [
        [str(rank), report["highest"], *(unit(report[name]) for name in columns), str(report["allocations"])]
        for rank, report in sorted(reports.items(), key=_by_most_in_use)
    ]
    header = ["rank", "peak in", *(f"{name}, {unit.name}" for name in columns), "blocks"]
    return table(header, _shortened(rows), left=2)


def _shortened(rows: list[list[str]]) -> list[list[str]]:
    if len(rows) <= SHOWN_HIGHEST + SHOWN_LOWEST + 1:
        return rows
    left_out = ["...", f"{len(rows) - SHOWN_HIGHEST - SHOWN_LOWEST} ranks", *[""] * (len(rows[0]) - 2)]
    return [*rows[:SHOWN_HIGHEST], left_out, *rows[-SHOWN_LOWEST:]]


def _incomplete(reports: dict[int, dict[str, Any]]) -> list[str]:
    why: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        if report["incomplete"]:
            why.setdefault(report["incomplete"], []).append(rank)
    return [f"incomplete on {numbered(ranks)}: {reason}" for reason, ranks in why.items()]
