"""What zbpipe expects of torch's private parts, and whether the torch at hand has it.

Note [What is probed]

``NEEDS`` (needs.py) is the table: what zbpipe does, the things of torch that it needs for that, by dotted name, and
what becomes of it where a thing differs. Signatures are compared by their parameters' names. The state behind methods
is looked at too, without an instance: an attribute is there if the class defines or annotates it, or if one of its
methods assigns it. Where releases of torch differ, a need has several ways, and holds if one of them is there whole:
the state decides, not the version number.

patch() asks for what it is about to change. What numbers depend on it refuses without, in one sentence that names it;
where only some stages' numbers do (data parallel ones, main_grad), those are refused when they come; where only memory
does, it goes without and says so once. What it knows, it does not talk about. Needs of other parts of zbpipe are for
:func:`report`, and fail where they are used.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Collection
from typing import Any, NamedTuple

from zbpipe._torch.needs import NEEDS, TESTED, Need, Thing, Way

_MISSING = object()


class Row(NamedTuple):
    """A line of the report: a thing, what was expected and what was found, and what depends on it."""

    name: str
    expected: str
    found: str
    ok: bool
    releases: str
    need: str
    consequence: str


_BY_NAME = {need.name: need for need in NEEDS}


def unread() -> list[Need]:
    """The needs that take seconds to look at, as nobody has imported what they name."""
    return [need for need in NEEDS if need.slow and need.slow not in sys.modules]


def report(leave_out: Collection[Need] = ()) -> list[Row]:
    """The table for the torch at hand: a row per thing of each need, of the way that is there, or that is nearest.

    Imports what it looks at; a module that this torch does not have counts as missing.
    """
    return [row for need in NEEDS if need not in leave_out for row in _rows(need)]


def was_tested(version: str) -> bool:
    """Whether the tests have run on this very torch, be it built for the CPU or for a GPU."""
    return version.partition("+")[0] in TESTED


def differences(name: str) -> list[str]:
    """What is not as the need of this name expects it, each as a clause of a sentence; empty where it is met."""
    return [f"{row.name} {row.found}" for row in _rows(_BY_NAME[name]) if not row.ok]


def refusal(name: str) -> str | None:
    """What is not so where the need of this name is not met, and what differs, as a sentence; None where it is."""
    found = differences(name)
    return f"{_BY_NAME[name].consequence}: {'; '.join(found)}" if found else None


def release_of(version: str) -> tuple[int, int] | None:
    """The release of torch that a version belongs to; None for what is no version."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


def parameters_of(function: Any) -> tuple[str, ...]:
    """The names of what a function takes; ("?",) if it does not tell."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ("?",)


def _rows(need: Need) -> list[Row]:
    tried = [[_row(need, way, thing) for thing in way.things] for way in need.ways]
    return max(tried, key=lambda rows: sum(row.ok for row in rows) / len(rows))  # the first of those that are as good


def _row(need: Need, way: Way, thing: Thing) -> Row:
    found = _difference(thing)
    consequence = f"{need.weight.value}: {need.consequence}"
    name = thing.name.replace(":", ".")
    return Row(name, str(thing), found or "as expected", found is None, way.releases, need.name, consequence)


def _difference(thing: Thing) -> str | None:
    """What there is in the thing's place, as the rest of a sentence; None where it is as expected."""
    owner, name = _owner(thing.name)
    value = _MISSING if owner is None else inspect.getattr_static(owner, name, _MISSING)
    if thing.kind == "attribute" and inspect.isclass(owner):
        return _attribute_difference(owner, name, value)
    if value is _MISSING:
        return None if thing.may_be_missing else "is missing"
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if thing.kind == "property" and not isinstance(value, property):
        return f"is a {type(value).__name__} where zbpipe knows a property"
    if thing.kind in ("callable", "function") and not callable(value):
        return f"is a {type(value).__name__} where zbpipe knows a function"
    if thing.kind == "function" and (parameters := parameters_of(value)) != thing.parameters:
        return f"takes ({', '.join(parameters)}) where zbpipe knows ({', '.join(thing.parameters)})"
    return None


def _attribute_difference(owner: type, name: str, value: Any) -> str | None:
    """Instances have what their class has, but for what nobody can assign, and what its methods assign."""
    if isinstance(value, property) and value.fset is None:
        return "is a read-only property where zbpipe knows an attribute"
    if value is not _MISSING:
        return None
    with contextlib.suppress(Exception):  # what annotations name need not be there when they are evaluated
        if any(name in getattr(kind, "__annotations__", ()) for kind in owner.__mro__):
            return None
    functions = [function for kind in owner.__mro__ for function in vars(kind).values() if inspect.isfunction(function)]
    return None if any(name in _assigned(function.__code__) for function in functions) else "is missing"


@functools.lru_cache(maxsize=1024)
def _assigned(code: types.CodeType) -> frozenset[str]:
    """The attributes that code assigns, of whatever object."""
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")


def _owner(dotted: str) -> tuple[Any, str]:
    """What holds the last part of a name, and that part; None in its place if there is no such thing."""
    module, _, path = dotted.partition(":")
    *parts, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return None, name
    for part in parts:
        owner = inspect.getattr_static(owner, part, None)
    return owner, name
