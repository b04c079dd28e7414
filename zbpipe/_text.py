"""Bytes and tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def megabytes(count: int) -> str:
    """Bytes as megabytes (10^6) with three decimals; exact counts are in the attributes."""
    return f"{count / 1e6:.3f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lines with columns of equal width: the first ``left`` columns to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, rows)])
