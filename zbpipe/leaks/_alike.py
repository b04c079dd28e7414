"""Chains that differ in numbers alone: the items of one list, the links of one growing list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from zbpipe.leaks._results import Holder, Leak

_NUMBER = re.compile(r"\b\d+\b")
_ITEM = re.compile(r"(.*\bitem) (\d+)")


def plain(text: str) -> str:
    """A text without its numbers."""
    return _NUMBER.sub("*", text)


class Likeness:
    """Equal for chains of the same holders, but for numbers and repetitions.

    Remembers holders by their identities: the chains must live as long.
    """

    def __init__(self) -> None:
        self._plain: dict[int, str] = {}

    def __call__(self, chain: Iterable[Holder]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._of(holder) for holder in chain if holder.kind != "more"))

    def _of(self, holder: Holder) -> str:
        text = self._plain.get(id(holder))
        if text is None:
            text = self._plain[id(holder)] = plain(str(holder))
        return text


def grouped(leaks: Sequence[Leak]) -> list[list[int]]:
    """Places of the leaks that are held alike together, by their bytes, the most first."""
    likeness = Likeness()
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, leak in enumerate(leaks):
        groups.setdefault((leak.place_of_blame, leak.views > 0, *likeness(leak.chain)), []).append(place)
    return sorted(groups.values(), key=lambda places: -sum(leaks[place].bytes for place in places))


def merged(chains: Sequence[list[Holder]]) -> list[Holder]:
    """One chain for those that are alike: that of the first, with the items of all where they differ in these."""
    first = chains[0]
    chains = [chain for chain in chains if len(chain) == len(first)]
    return [_merged(holders) for holders in zip(*chains, strict=True)]


def _merged(holders: tuple[Holder, ...]) -> Holder:
    first = holders[0]
    texts = dict.fromkeys(holder.text for holder in holders)
    if len(texts) == 1:
        return first
    items = [_ITEM.fullmatch(text) for text in texts]
    prefixes = {item[1] for item in items if item}
    if all(items) and len(prefixes) == 1:
        numbers = sorted(int(item[2]) for item in items if item)
        return Holder(first.kind, f"{prefixes.pop()}s {numbered_spans(numbers)}", first.where, 0, first.is_library)
    return Holder(first.kind, f"{first.text} and {len(texts) - 1} like it", first.where, 0, first.is_library)


def numbered_spans(numbers: list[int]) -> str:
    """As "0 to 3, 7"; of more than three spans the first two and the last."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    said = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    return ", ".join(said) if len(said) <= 3 else f"{said[0]}, {said[1]}, ... {said[-1]} ({len(numbers)} of them)"


def numbered(numbers: list[int]) -> str:
    """As "#1 to #3, #7"."""
    return re.sub(r"\b(?=\d)", "#", numbered_spans(numbers).partition(" (")[0])
