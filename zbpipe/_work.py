"""What ``_C.defer`` asks for where what it is to hold is of a subclass. The C part imports this module by its name."""

import copy
import copyreg
from typing import Any

import torch

from zbpipe._torch import autograd


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
