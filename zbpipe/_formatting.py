"""Bytes, FLOPs, tables, names and wrong arguments as text."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

_BYTES = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))
OPERATIONS = ((10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP"), (10**3, "kFLOP"), (1, "FLOP"))
_WORDS_AND_NUMBERS = (str, int, float, bool, type(None))


def argument(value: object) -> str:
    """A wrong argument, for an error: a str or a number as it is, all else by its type, since a repr may be long."""
    return repr(value) if type(value) in _WORDS_AND_NUMBERS else f"a {type(value).__name__}"


def refuse_what_runs_later(function: Any) -> None:
    """Raises TypeError for a function to decorate whose body runs after its call has returned."""
    later = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    bodies = [function, type(function).__call__] if callable(function) else []
    if any(runs_later(body) for runs_later in later for body in bodies):
        name = getattr(function, "__qualname__", argument(function))
        raise TypeError(
            f"{name} runs after its call has returned (a coroutine or generator function); write a with block inside it"
        )


def described(tensor: Any) -> str:
    """A tensor as "float32 [3, 4]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def enumeration(names: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


class Unit(NamedTuple):
    """A unit of bytes (bytes, kB, MB, GB of 10^9) or of operations (FLOP to TFLOP). A call formats a count in it."""

    size: int
    name: str

    @classmethod
    def of(cls, most: int, units: Sequence[tuple[int, str]] = _BYTES) -> Unit:
        """The unit that fits ``most`` and all smaller numbers."""
        return cls(*next(unit for unit in units if most >= unit[0] or unit[0] == 1))

    def __call__(self, count: int) -> str:
        return f"{count / self.size:.3f}" if self.size > 1 else str(count)

    def words(self, count: int) -> str:
        """As "3.200 MB"."""
        return f"{self(count)} {self.name}"


def in_words(count: int) -> str:
    """Bytes as "3.200 MB"; exact counts are in the attributes."""
    return Unit.of(count).words(count)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A text table: the first ``left`` columns are aligned to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, rows)])
