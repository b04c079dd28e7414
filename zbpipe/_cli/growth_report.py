"""What grew on one rank, as data; and what grew on all of them, as text."""

from __future__ import annotations

from typing import Any

from zbpipe._cli.ranks import heading, numbered, told_by_themselves
from zbpipe._formatting import table
from zbpipe.leaks._alike import numbered_spans
from zbpipe.leaks._grown import Grown, lines_of, told
from zbpipe.leaks._growth import Growth


def of_rank(head: str, growth: Growth | None, grown: list[Grown], looked_at: int) -> dict[str, Any]:
    """For json.dumps: this rank's headline, its numbers after each step, and what grew."""
    if growth is None:
        return {"head": head, "counts": [], "bytes": [], **told([], [], [])}
    numbers = {"counts": growth.counts, "bytes": growth.bytes, "table": growth.counts_table(), "looked_at": looked_at}
    return {"head": head, **numbers, **told(grown, growth.filling, growth.cycles)}


def text_of(reports: dict[int, dict[str, Any]], missing: list[int], world: int) -> str:
    """The reports of some of `world` ranks; of those that are missing it says so."""
    counted = [report for report in reports.values() if report["counts"]]
    if world == 1:
        lines = [report["head"] for report in reports.values()] + [report["table"] for report in counted]
    else:
        heads = {rank: report["head"].removeprefix("zbpipe leaks: ") for rank, report in reports.items()}
        lines = heading("leaks", heads, world)
        lines += ["", _table_of_ranks(reports)] if counted else []
        lines += ["", told_by_themselves(missing)] if missing else []
    if not counted:
        return "\n".join(lines)
    said = lines_of(reports, numbered if world > 1 else None)
    if said and world == 1:
        said.append(f"(as of step {counted[0]['looked_at']})")
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
