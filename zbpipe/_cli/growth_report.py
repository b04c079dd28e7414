"""What grew on one rank, as data; and what grew on all of them, as text."""

from __future__ import annotations

from typing import Any

from zbpipe._cli.ranks import heading, numbered, told_by_themselves
from zbpipe._formatting import table
from zbpipe.leaks._alike import numbered_spans, plain
from zbpipe.leaks._growth import SHOWN_HOLDERS, Grown, Growth, headline


def of_rank(head: str, growth: Growth | None, grown: list[Grown], looked_at: int) -> dict[str, Any]:
    """For json.dumps: this rank's headline, its numbers after each step, and what grew."""
    return {
        "head": head,
        "counts": growth.counts if growth is not None else [],
        "bytes": growth.bytes if growth is not None else [],
        "table": growth.counts_table() if growth is not None else "",
        "looked_at": looked_at,
        "grown": [{"head": headline(group), "lines": group.held_by, "bytes": group.bytes} for group in grown],
    }


def text_of(reports: dict[int, dict[str, Any]], missing: list[int], world: int) -> str:
    """The reports of some of `world` ranks; of those that are missing it says so."""
    if world == 1:
        (report,) = reports.values()
        return "\n".join([report["head"], *_numbers(report), *_grown({0: report}, with_ranks=False)])
    heads = {rank: report["head"].removeprefix("zbpipe leaks: ") for rank, report in reports.items()}
    lines = heading("leaks", heads, world)
    if any(report["counts"] for report in reports.values()):
        lines += ["", _table_of_ranks(reports)]
    if missing:
        lines += ["", told_by_themselves(missing)]
    return "\n".join([*lines, *_grown(reports, with_ranks=True)])


def _numbers(report: dict[str, Any]) -> list[str]:
    return [report["table"]] if report["counts"] else []


def _table_of_ranks(reports: dict[int, dict[str, Any]]) -> str:
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, report in sorted(reports.items()):
        counts, sizes = report["counts"] or [0], report["bytes"] or [0]
        row = (str(len(report["counts"])), str(counts[0]), str(counts[-1]), str(sizes[0]), str(sizes[-1]))
        alike.setdefault((*row, f"{len(report['grown'])} ways" if report["grown"] else "nothing"), []).append(rank)
    header = ["rank", "steps", "tensors, first", "last", "bytes, first", "last", "grew"]
    return table(header, [[numbered_spans(ranks), *row] for row, ranks in alike.items()])


def _grown(reports: dict[int, dict[str, Any]], with_ranks: bool) -> list[str]:
    """What grew alike on several ranks once."""
    alike: dict[tuple[str, ...], list[int]] = {}
    first: dict[tuple[str, ...], dict[str, Any]] = {}
    for rank, report in sorted(reports.items()):
        for group in report["grown"]:
            key = (plain(group["head"]), *map(plain, group["lines"]))
            alike.setdefault(key, []).append(rank)
            first.setdefault(key, group)
    if not alike:
        judged = any(report["counts"] for report in reports.values())
        return ["", "nothing grew"] if judged else []
    lines = ["", "grew, and is held by"]
    keys = sorted(alike, key=lambda key: -first[key]["bytes"] * len(alike[key]))
    for key in keys[:SHOWN_HOLDERS]:
        group, ranks = first[key], alike[key]
        each = ", each" if len(ranks) > 1 else ""
        lines.append(f"  {numbered(ranks)}{each}: {group['head']}" if with_ranks else f"  {group['head']}")
        lines += [f"    {line}" for line in group["lines"]]
    if len(keys) > SHOWN_HOLDERS:
        lines.append(f"  and {len(keys) - SHOWN_HOLDERS} more")
    if not with_ranks:
        lines.append(f"(as of step {next(iter(reports.values()))['looked_at']})")
    return lines
