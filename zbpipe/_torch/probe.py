"""Whether this torch has the private parts that zbpipe needs.

Note [What is probed]

``NEEDS`` (needs.py) is the table of all needs: names in torch, and what zbpipe does if one differs. Signatures are
compared by the names of their parameters. Attributes are compared without an instance: one is there if the class
defines or annotates it, or if a method assigns it. Where releases of torch differ, a need has several ways, and one of
them must be there whole. What torch has decides, not its version number.

patch() asks for the needs of its changes. It refuses a torch with which gradients would be wrong. If only the gradients
of some stages would be wrong (data parallel ones, main_grad), it refuses these stages when they come. If only memory
depends on a need, it goes without and warns once. Other parts of zbpipe fail where a need of theirs is used;
:func:`report` has these needs, too.
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

from zbpipe._torch.needs import NEEDS, Need, Thing, Way

_MISSING = object()

ADVICE = "use a torch that zbpipe knows, or a newer zbpipe"  # where a need is not met


class Row(NamedTuple):
    """A row of the report: a thing, the expected and the found state, and the need of it."""

    name: str
    expected: str
    found: str
    ok: bool
    releases: str
    need: Need


_BY_NAME = {need.name: need for need in NEEDS}


def unread() -> list[Need]:
    """The needs that take seconds to probe, since nothing has imported the module that they name."""
    return [need for need in NEEDS if need.slow and need.slow not in sys.modules]


def report(leave_out: Collection[Need] = ()) -> list[Row]:
    """The table for this torch: a row per thing of each need, of the way that this torch has, or of the nearest one.

    It imports the modules. A module that this torch does not have counts as missing.
    """
    return [row for need in NEEDS if need not in leave_out for row in _rows(need)]


def differences(name: str) -> list[str]:
    """This torch's differences from the need of this name, each as a clause; empty if the need is met."""
    return [f"{row.name} {row.found}" for row in _rows(_BY_NAME[name]) if not row.ok]


@functools.cache  # what torch has does not change within a process
def refusal(name: str) -> str | None:
    """The consequence and the differences as a sentence, if the need of this name is not met; else None."""
    found = differences(name)
    return f"{_BY_NAME[name].consequence}: {'; '.join(found)}" if found else None


def release_of(version: str) -> tuple[int, int] | None:
    """The release of torch that a version belongs to; None if it is no version."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


def parameters_of(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters; ("?",) if it does not tell."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ("?",)


def _rows(need: Need) -> list[Row]:
    tried = [[_row(need, way, thing) for thing in way.things] for way in need.ways]
    return max(tried, key=lambda rows: sum(row.ok for row in rows) / len(rows))  # of equal ones, the first


def _row(need: Need, way: Way, thing: Thing) -> Row:
    found = _difference(thing)
    name = thing.name.replace(":", ".")
    return Row(name, str(thing), found or "as expected", found is None, way.releases, need)


def _difference(thing: Thing) -> str | None:
    """How this torch differs in a thing, as the rest of a sentence; None if it does not."""
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
    """As ``_difference``, for attributes of instances: those of the class that can be assigned, and those that its
    methods assign."""
    if isinstance(value, property) and value.fset is None:
        return "is a read-only property where zbpipe knows an attribute"
    if value is not _MISSING:
        return None
    with contextlib.suppress(Exception):  # a name in an annotation need not exist when it is evaluated
        if any(name in getattr(kind, "__annotations__", ()) for kind in owner.__mro__):
            return None
    functions = [function for kind in owner.__mro__ for function in vars(kind).values() if inspect.isfunction(function)]
    return None if any(name in _assigned(function.__code__) for function in functions) else "is missing"


@functools.lru_cache(maxsize=1024)
def _assigned(code: types.CodeType) -> frozenset[str]:
    """The names of all attributes that code assigns."""
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")


def _owner(dotted: str) -> tuple[Any, str]:
    """The object that holds the last part of a name, or None, and that part."""
    module, _, path = dotted.partition(":")
    *parts, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return None, name
    for part in parts:
        owner = inspect.getattr_static(owner, part, None)
    return owner, name
