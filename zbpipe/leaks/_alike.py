"""Chains that differ in numbers and keys alone: the items of one collection, the links of one growing list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from zbpipe.leaks._heap import NOBODY
from zbpipe.leaks._results import CONTEXT_VARIABLE, NAMED, Holder, Leak, chain_lines
from zbpipe.leaks._ways import LEFT_OUT

_NUMBER = re.compile(r"\b\d+\b")
_NAME = re.compile(r"(?<=\bitem )(['\"]).*\1|\d+")  # a key, or a number within a name: "step_3"
_BY_NAME = ("attribute", "dict", "list")  # kinds of what is kept under ever new names
_OWN_NAME = re.compile(r"\S+(?= of )|\.\w+$")  # an attribute's or a variable's, or a module global's
_MANY = 4  # names that no line of the source binds: the program makes them, and one holder has what is kept there

Key = tuple[str, ...]


def plain(text: str) -> str:
    """A text without its numbers."""
    return _NUMBER.sub("*", text)


def likeness(chain: Iterable[Holder], known: dict[int, str]) -> Key:
    """Equal for chains of the same holders, but for numbers, keys and repetitions. ``known`` are plain texts of holders
    by their identities: the chains must live as long."""
    for holder in chain:
        if id(holder) not in known:
            pattern = _NAME if holder.kind in _BY_NAME else _NUMBER
            known[id(holder)] = pattern.sub("*", str(holder))
    return tuple(dict.fromkeys(known[id(holder)] for holder in chain if holder.kind != "more"))


def _without_the_name(key: Key) -> Key:
    return (*key[:-1], _OWN_NAME.sub("*", key[-1], count=1))


def by_holder(
    leaks: Sequence[Leak], places_of: Mapping[int, Sequence[int]], born: Mapping[int, int] | None = None
) -> dict[Key, tuple[int, list[int]]]:
    """By the chain down to a holder: where that stands in the chains, and the places of the leaks that it has together,
    however they hang below it.

    It is the program's last one above the lowest collection whose items grow: made over half of the time. If none does,
    it is the last one above the items that differ; if none do, the one to blame. Items are told apart by their places
    in the search, ``places_of`` a leak's holders, by its storage. ``born``: in which step, by the storage too.
    """
    known: dict[int, str] = {}
    alike: dict[Key, tuple[int, list[int]]] = {}
    for at, leak in enumerate(leaks):
        blamed = leak.place_of_blame
        key = likeness(leak.chain[: blamed + 1], known)
        if leak.in_cycle and leak.chain[blamed].kind == "frame":  # its cycle has all variables of that call
            key = _without_the_name(key)
        alike.setdefault(key, (blamed, []))[1].append(at)
    named: dict[Key, list[Key]] = {}
    for key, (blamed, places) in alike.items():
        last = leaks[places[0]].chain[blamed : blamed + 1]
        if last and last[0].kind in ("attribute", "module") and last[0].where is None:
            named.setdefault(_without_the_name(key), []).append(key)
    for first, *others in (keys for keys in named.values() if len(keys) >= _MANY):
        for key in others:
            alike[first][1].extend(alike.pop(key)[1])
    found: dict[Key, tuple[int, list[int]]] = {}
    for blamed, places in alike.values():
        of_group = [leaks[at] for at in places]
        placed = [(leak, places_of.get(leak.storage, ())) for leak in of_group]
        growing = _what_grows(placed, born) if born else None
        at = _what_differs(placed, blamed) if growing is None else growing
        mark = _named_above([leak.chain for leak in of_group], at, blamed)
        found.setdefault(likeness(leaks[places[0]].chain[: mark + 1], known), (mark, []))[1].extend(places)
    return found


_Placed = Sequence[tuple[Leak, Sequence[int]]]


def _what_grows(leaks: _Placed, born: Mapping[int, int]) -> int | None:
    """Where the lowest collection whose items grow stands in the chains."""
    steps = [born[leak.storage] for leak, _ in leaks]
    for at in reversed(range(min(len(places) for _, places in leaks))):
        items: dict[tuple[int, str], dict[int, int]] = {}  # by the collection, and how it holds: the steps of birth
        for (leak, places), step in zip(leaks, steps, strict=True):
            text = leak.chain[at].text
            # A context variable holds a value for each context.
            collection = NOBODY if text.startswith(CONTEXT_VARIABLE) else places[at]
            item = places[at + 1] if at + 1 < len(places) else leak.storage
            if collection != LEFT_OUT:
                of_one = items.setdefault((collection, _NAME.sub("*", text)), {})
                of_one[item] = min(of_one.get(item, step), step)
        spans = [max(of_one.values()) - min(of_one.values()) for of_one in items.values()]
        if max(spans, default=0) and 2 * max(spans) >= max(steps) - min(steps):  # what is full soon does not grow
            return at
    return None


def _what_differs(leaks: _Placed, blamed: int) -> int:
    """Where the holder above the first items that differ stands; where none do, the one to blame."""
    for at in range(1, min(blamed + 1, *(len(leak.chain) for leak, _ in leaks))):
        if len({(leak.chain[at].text, *places[at : at + 1]) for leak, places in leaks}) > 1:
            return at - 1
    return blamed


def _named_above(chains: list[list[Holder]], at: int, blamed: int) -> int:
    """The program's last name down to there; of a list of links, which have several depths, the one above the links. If
    there is none: a bound method below, or what is to blame."""
    longest = max(chains, key=len)
    texts = [one.text for one in longest]
    named = [i for i, one in enumerate(longest[: at + 1]) if one.kind in NAMED and not one.is_library]
    if len({len(chain) for chain in chains}) > 1:
        named = [i for i in named if texts.count(texts[i]) == 1] or named
    methods = (i for i, text in enumerate(texts[:blamed]) if text.startswith("bound method "))
    return named[-1] if named else next(methods, blamed)


def held_lines(leaks: Sequence[Leak], mark: int) -> list[str]:
    """The chain to the most bytes of what one holder has, with that holder marked and the items of all that are held
    alike; and how many other ways there are."""
    known, ways = dict[int, str](), dict[Key, list[Leak]]()
    for leak in leaks:
        ways.setdefault(likeness(leak.chain, known), []).append(leak)
    most = max(ways.values(), key=lambda alike: sum(leak.bytes for leak in alike))
    length, others = len(most[0].chain), len(ways) - 1
    alike = [leak.chain for leak in most if len(leak.chain) == length]
    lines = chain_lines([_merged(holders) for holders in zip(*alike, strict=True)], mark)
    return lines + ([f"   and in {others} other way{'s' * (others > 1)} from there"] if others else [])


def _merged(holders: tuple[Holder, ...]) -> Holder:
    first = holders[0]
    texts = dict.fromkeys(holder.text for holder in holders)
    if len(texts) == 1:
        return first
    collections, _, items = zip(*(text.rpartition(" item ") for text in texts), strict=True)
    text = f"{first.text} and {len(texts) - 1} like it"
    if len({*collections}) == 1 and all(map(str.isdecimal, items)):
        text = f"{collections[0]} items {numbered_spans(sorted(map(int, items)))}"
    return Holder(first.kind, text, first.where, 0, first.is_library)


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
