"""For ``_C.defer``: an alias to hold in the place of a tensor subclass. The C part imports this module by name."""

import copyreg

import torch

from zbpipe._torch import autograd


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """An alias with the tensor's memory, version counter, class and attributes, and no history."""
    cls = type(tensor)
    with autograd.without_torch_functions(), torch.no_grad():
        alias = tensor.detach() if autograd.has_dispatch(cls) else autograd.alias_of_class(cls, tensor)
        if isinstance(alias, cls):
            _copy_attributes(tensor, alias)
    return alias


def _copy_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies the attributes that the target lacks."""
    for name, value in getattr(source, "__dict__", {}).items():
        target.__dict__.setdefault(name, value)
    for name in copyreg._slotnames(type(source)):  # type: ignore[attr-defined]
        if hasattr(source, name) and not hasattr(target, name):
            setattr(target, name, getattr(source, name))
