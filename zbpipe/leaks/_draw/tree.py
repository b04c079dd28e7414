"""The boxes of a picture and their places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from zbpipe.leaks._results import Cycle, Holder, Leak, shortened

LONGEST_CHAIN = 7
BRANCHES = 5
CHARACTERS = 34

FAMILIES = {
    "python": ("#cfe0f1", "#33658f", "Python object"),
    "node": ("#d3e8cc", "#46783a", "autograd node, parameter group"),
    "tensor": ("#f7d9a8", "#a5691b", "tensor"),
    "unknown": ("#e3e4e6", "#70757c", "not visible"),
}
"""Fill, line and name of each family."""

_FAMILY = {
    "node": "node",
    "accumulator": "node",
    "group": "node",
    "work": "node",
    "tensor": "tensor",
    "saved": "tensor",
    "unknown": "unknown",
}


@dataclass
class Box:
    """A holder in the picture; ``column`` and ``row`` are its place. One that is to blame has a thick line."""

    text: str
    family: str
    detail: str
    bytes: int = 0
    blamed: bool = False
    children: list[Box] = field(default_factory=list)
    column: int = 0
    row: float = 0.0


class Drawable(Protocol):
    """A report, as the drawings read it."""

    leaks: list[Leak]
    cycles: list[Cycle]

    @property
    def bytes(self) -> int: ...


def tree_of(report: Drawable, max_leaks: int) -> list[Box]:
    """The boxes of the largest leaks, without places."""
    roots: list[Box] = []
    for leak in report.leaks[:max_leaks]:
        boxes = roots
        for holder in shortened(leak.chain, LONGEST_CHAIN)[:-1]:
            box = next((b for b in boxes if (b.text, b.detail) == (_short(holder), str(holder))), None)
            if box is None:
                box = _box(holder)
                boxes.append(box)
            box.bytes += leak.bytes
            box.blamed |= holder is leak.blame
            boxes = box.children
        boxes.append(_leaf(leak))
    for box in all_of(roots):
        _thin(box)
    return roots


def cycle_row(steps: list[Holder], size: int) -> list[Box]:
    row = [_box(holder) for holder in shortened(steps, LONGEST_CHAIN)]
    row[0].bytes = size
    return row


def place(roots: list[Box], cycles: list[list[Box]]) -> float:
    """Gives each box its place. Returns the number of rows."""
    row = 0.0
    for root in roots:
        row = _place(root, 0, row)
    for cycle in cycles:
        row += 0.4
        for column, box in enumerate(cycle):
            box.column, box.row = column, row
        row += 1.4  # and the way back below
    return row


def _place(box: Box, column: int, row: float) -> float:
    box.column = column
    if not box.children:
        box.row = row
        return row + 1
    for child in box.children:
        row = _place(child, column + 1, row)
    box.row = (box.children[0].row + box.children[-1].row) / 2
    return row


def _box(holder: Holder) -> Box:
    return Box(_short(holder), _FAMILY.get(holder.kind, "python"), str(holder))


def _leaf(leak: Leak) -> Box:
    holder = leak.chain[-1] if leak.chain else Holder("unknown", leak.name)
    created = f", created at {leak.created}" if leak.created else ""
    family = "tensor" if leak.views else "unknown"
    return Box(_short(holder), family, f"{holder}\n{leak.bytes} bytes, {leak.fate}{created}", leak.bytes)


def _thin(box: Box) -> None:
    if len(box.children) > BRANCHES:
        box.children.sort(key=lambda child: -child.bytes)
        rest = box.children[BRANCHES - 1 :]
        size = sum(child.bytes for child in rest)
        more = Box(f"... {len(rest)} more ...", "tensor", "\n".join(child.detail for child in rest), size)
        box.children[BRANCHES - 1 :] = [more]


def all_of(boxes: list[Box]) -> Iterator[Box]:
    todo = list(boxes)
    while todo:
        box = todo.pop()
        yield box
        todo += box.children


def _short(holder: Holder) -> str:
    return holder.text if len(holder.text) <= 2 * CHARACTERS else holder.text[: 2 * CHARACTERS - 3] + "..."


def lines_of(box: Box) -> list[str]:
    """The text of a box in at most three lines."""
    text = box.text
    if len(text) > CHARACTERS:
        cut = max(text.rfind(" ", 0, CHARACTERS), text.rfind(".", 0, CHARACTERS))
        cut = cut + 1 if cut > CHARACTERS // 2 else CHARACTERS
        lines = [text[:cut].strip(), text[cut:].strip()]
    else:
        lines = [text]
    return [*lines, f"{box.bytes} bytes"] if box.bytes else lines


def title_of(report: Drawable) -> str:
    return f"{len(report.leaks)} leaked storages, {report.bytes} bytes; a thick line: look there first"
