"""What grew on one rank, as data; and what grew on all of them, as text."""

from __future__ import annotations

from typing import Any

from zbpipe._cli.ranks import heading, numbered, told_by_themselves
from zbpipe._formatting import table
from zbpipe.leaks._alike import numbered_spans, plain
from zbpipe.leaks._grown import SHOWN_CYCLES, SHOWN_HOLDERS, Grown, cycle_line
from zbpipe.leaks._growth import Growth

_KINDS = {
    "grown": "grew, and is held by",
    "filling": "grew, and may be a window that is not full yet",
    "cycles": "reference cycles, which at most the collector opens",
}


def of_rank(head: str, growth: Growth | None, grown: list[Grown], looked_at: int) -> dict[str, Any]:
    """For json.dumps: this rank's headline, its numbers after each step, and what grew."""
    if growth is None:
        return {"head": head, "counts": [], "bytes": [], "looked_at": 0, **{kind: [] for kind in _KINDS}}
    return {
        "head": head,
        "counts": growth.counts,
        "bytes": growth.bytes,
        "table": growth.counts_table(),
        "looked_at": looked_at,
        "grown": [_of_group(group) for group in grown],
        "filling": [_of_group(group) for group in growth.filling],
        "cycles": [
            {"head": cycle_line(cycle).strip(), "lines": [], "bytes": cycle.bytes}
            for cycle in growth.cycles[:SHOWN_CYCLES]
        ],
    }


def _of_group(group: Grown) -> dict[str, Any]:
    return {"head": group.headline, "lines": group.held_by, "bytes": group.bytes}


def text_of(reports: dict[int, dict[str, Any]], missing: list[int], world: int) -> str:
    """The reports of some of `world` ranks; of those that are missing it says so."""
    if world == 1:
        (report,) = reports.values()
        lines = [report["head"], *([report["table"]] if report["counts"] else [])]
    else:
        heads = {rank: report["head"].removeprefix("zbpipe leaks: ") for rank, report in reports.items()}
        lines = heading("leaks", heads, world)
        if any(report["counts"] for report in reports.values()):
            lines += ["", _table_of_ranks(reports)]
        if missing:
            lines += ["", told_by_themselves(missing)]
    if not any(report["counts"] for report in reports.values()):
        return "\n".join(lines)
    said = [line for kind in _KINDS for line in _alike(kind, reports, world > 1)]
    if said and world == 1:
        said.append(f"(as of step {next(iter(reports.values()))['looked_at']})")
    return "\n".join([*lines, "", *(said or ["nothing grew"])])


def _table_of_ranks(reports: dict[int, dict[str, Any]]) -> str:
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, report in sorted(reports.items()):
        counts, sizes = report["counts"] or [0], report["bytes"] or [0]
        row = (str(len(report["counts"])), str(counts[0]), str(counts[-1]), str(sizes[0]), str(sizes[-1]))
        ways = len(report["grown"]) + len(report["filling"])
        alike.setdefault((*row, f"{ways} ways" if ways else "nothing"), []).append(rank)
    header = ["rank", "steps", "tensors, first", "last", "bytes, first", "last", "grew"]
    return table(header, [[numbered_spans(ranks), *row] for row, ranks in alike.items()])


def _alike(kind: str, reports: dict[int, dict[str, Any]], with_ranks: bool) -> list[str]:
    """What grew alike on several ranks once."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    first: dict[tuple[str, ...], dict[str, Any]] = {}
    for rank, report in sorted(reports.items()):
        for group in report[kind]:
            key = (plain(group["head"]), *map(plain, group["lines"]))
            ranks.setdefault(key, []).append(rank)
            first.setdefault(key, group)
    lines = [_KINDS[kind]] if ranks else []
    keys = sorted(ranks, key=lambda key: -first[key]["bytes"] * len(ranks[key]))
    for key in keys[:SHOWN_HOLDERS]:
        each = f"{numbered(ranks[key])}{', each' if len(ranks[key]) > 1 else ''}: " if with_ranks else ""
        lines += [f"  {each}{first[key]['head']}", *(f"    {line}" for line in first[key]["lines"])]
    return lines + ([f"  and {len(keys) - SHOWN_HOLDERS} more"] if len(keys) > SHOWN_HOLDERS else [])
