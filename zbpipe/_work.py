"""What ``_C.defer`` asks for where what it is to hold is no plain tensor. The C part imports this module by name."""

import copy
import copyreg
from collections.abc import Generator
from typing import Any

import torch

from zbpipe._torch import autograd

_DEEPEST = 500
_PENDING = object()


class _Level:
    """A tuple, list or dict, whose contents are being replaced one by one."""

    def __init__(self, container: Any) -> None:
        is_dict = issubclass(type(container), dict)
        self.container = container
        # No key is looked up: it may have changed since it was put in.
        self.keys = list(dict.keys(container)) if is_dict else None
        self.contents = list(dict.values(container)) if is_dict else list(container)
        self.done = 0
        self.has_changed = type(container) in (list, dict)

    def put(self, replacement: Any) -> None:
        self.has_changed = self.has_changed or replacement is not self.contents[self.done]
        self.contents[self.done] = replacement
        self.done += 1

    def end(self) -> Any:
        """Lists and dicts are copied in any case: theirs may change."""
        if not self.has_changed:
            return self.container
        contents = self.contents if self.keys is None else dict(zip(self.keys, self.contents, strict=True))
        cls = type(self.container)
        return cls(contents) if cls in (tuple, list, dict) else rebuilt(self.container, contents)


def taken(saved: tuple[Any, ...]) -> Generator[torch.Tensor, torch.Tensor, Any]:
    """A copy of `saved`, and of the tuples, lists and dicts in it: yields each tensor, and is sent what replaces it.

    Within one `saved`, what is one object stays one.

    Raises:
        ValueError: a container contains itself, or is nested too deeply.
        TypeError: as `rebuilt`.
    """
    known: dict[int, tuple[Any, Any]] = {}  # the containers so far, which stay alive, and what became of them
    levels = [_Level(saved)]
    levels[0].has_changed = True
    while True:
        level = levels[-1]
        if level.done == len(level.contents):
            result = level.end()
            levels.pop()
            if not levels:
                return result
            known[id(level.container)] = level.container, result
            levels[-1].put(result)
            continue
        item = level.contents[level.done]
        cls = type(item)  # not isinstance(), which would run the code of whoever fakes __class__
        if id(item) in known:
            result = known[id(item)][1]
            if result is _PENDING:
                raise ValueError(
                    f"saved contains a {cls.__name__} that contains itself; "
                    "expected tuples, lists and dictionaries that end somewhere"
                )
            level.put(result)
        elif len(levels) > _DEEPEST + 1:
            raise ValueError(
                f"saved contains a {cls.__name__} within more than {_DEEPEST} others; "
                "expected tuples, lists and dictionaries that are nested less deeply"
            )
        elif issubclass(cls, torch.Tensor):
            level.put((yield item))
        elif issubclass(cls, (tuple, list, dict)):
            known[id(item)] = item, _PENDING
            levels.append(_Level(item))
        else:
            level.put(item)


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory and version counter, its class and attributes, but not its place in the graph."""
    cls = type(tensor)
    with autograd.without_torch_functions(), torch.no_grad():
        wraps = cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        alias = tensor.detach() if wraps else autograd.alias_of_class(cls, tensor)
        if isinstance(alias, cls):
            _copy_attributes(tensor, alias)
    return alias


def rebuilt(container: Any, contents: Any) -> Any:
    """A copy of an instance of a subclass of tuple, list or dict, with what is in the list or dict `contents`.

    Raises:
        TypeError: there is no way to make one.
    """
    cls = type(container)
    try:
        copied: Any
        if isinstance(container, dict):
            copied = copy.copy(container)
            for key, value in contents.items():
                copied[key] = value
        elif isinstance(container, list):
            copied = copy.copy(container)
            copied[:] = contents
        elif hasattr(cls, "_make"):
            copied = cls._make(contents)
            _copy_attributes(container, copied)
        elif hasattr(cls, "n_sequence_fields"):  # torch.return_types
            copied = cls(contents)
        else:
            copied = tuple.__new__(cls, contents)
            _copy_attributes(container, copied)
    except Exception as error:
        raise TypeError(
            f"saved contains a {cls.__name__}, of which no copy without tensors' history can be made ({error}); "
            "pass what is in it in a tuple, list or dict"
        ) from error
    return copied


def _copy_attributes(source: Any, target: Any) -> None:
    """Those that the target has not got when it was made."""
    for name, value in getattr(source, "__dict__", {}).items():
        target.__dict__.setdefault(name, value)
    for name in copyreg._slotnames(type(source)):  # type: ignore[attr-defined]
        if hasattr(source, name) and not hasattr(target, name):
            setattr(target, name, getattr(source, name))
