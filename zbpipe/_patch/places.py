"""Places in torch, and in modules that imported from it by name, where patch() puts zbpipe's functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from zbpipe._stage import state

Function = Callable[..., Any]


class Place(NamedTuple):
    """A name in a module's namespace or in a class, its value before the patch, and its value under the patch."""

    where: str
    name: str
    holder: dict[str, Any] | type
    original: Function
    replacement: Function

    def __str__(self) -> str:
        return f"{self.where}.{self.name}"

    def replace(self) -> None:
        self._put(self.replacement)

    def restore(self) -> bool:
        """Whether the original is back: False, and nothing is changed, if other code has rebound the name meanwhile."""
        now = (self.holder if isinstance(self.holder, dict) else vars(self.holder)).get(self.name)
        if now is not self.replacement:
            return False
        self._put(self.original)
        return True

    def _put(self, function: Function) -> None:
        if isinstance(self.holder, dict):  # not by setattr(), which wakes lazy modules
            self.holder[self.name] = function
        else:
            setattr(self.holder, self.name, function)


def holding(originals: dict[str, Function], replacements: dict[str, Function]) -> Iterator[Place]:
    """Every place in a module that holds one of `originals`, under whatever name."""
    names = {id(function): name for name, function in originals.items()}
    for module, namespace in namespaces():
        for attribute, value in list(namespace.items()):
            name = names.get(id(value))
            if name is not None:
                yield Place(module, attribute, namespace, value, replacements[name])


def wrapping(owner: Any, name: str, wrapper: Function) -> Iterator[Place]:
    """The place of a method or function to wrap; none where the owner does not define it, or only as abstract."""
    original = vars(owner).get(name)
    if original is None or getattr(original, "__isabstractmethod__", False):
        return
    where = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    holder = owner if isinstance(owner, type) else vars(owner)
    yield Place(where, name, holder, original, _wrapped(original, wrapper))


def restore(places: list[Place]) -> tuple[list[Place], list[Place]]:
    """Restores the places, and names by which modules of torch have imported a replacement meanwhile. The restored
    places, and those that other code has rebound, which are left."""
    restored = [place for place in places if place.restore()]
    taken_over = {id(place.replacement): place for place in places if isinstance(place.holder, dict)}
    for module, namespace in namespaces():
        if module.split(".")[0] == "torch":
            for name, value in list(namespace.items()):
                if (place := taken_over.get(id(value))) is not None:
                    namespace[name] = place.original
    return restored, [place for place in places if place not in restored]


def namespaces() -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the namespace of each loaded module but zbpipe's own, without waking lazy ones."""
    seen = set()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "zbpipe" or module is None:
            continue
        try:
            namespace = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        if isinstance(namespace, dict) and id(namespace) not in seen:
            seen.add(id(namespace))
            yield name, namespace


def _wrapped(original: Function, wrapper: Function) -> Function:
    """``wrapper(original, ...)`` while torch is patched, and ``original`` for those who call it later."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs) if state.in_force else original(*args, **kwargs)

    return replacement


_REPLACEMENT: CodeType = _wrapped(lambda: None, lambda: None).__code__


def is_in_step() -> bool:
    """Whether this thread is within what was wrapped: a method of a stage, or the schedules' function."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _REPLACEMENT:
        frame = frame.f_back
    return frame is not None
