"""For ``_C.defer``: what a call is given, and how W makes it. The C part imports this module by name."""

import copyreg
from typing import Any

import torch

from zbpipe._torch import autograd


def take(saved: tuple[Any, ...], weights: tuple[torch.Tensor, ...], is_copied: bool) -> tuple[Any, ...]:
    """For W of a group with these weights: the call's arguments, the autocast of now, and the arguments' tensors: those
    with memory of their own, those with a parameter's, and the parameters, of which a compiler's views, whose version
    counters are their own, do not tell when they change. is_copied: an unpack hook may fill its buffers anew."""
    arguments = list(saved)
    own, views, parameters = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    with autograd.without_torch_functions():
        weights_at = autograd.by_memory(weights)
        for i, thing in enumerate(saved):
            if not isinstance(thing, torch.Tensor):
                continue
            # What adds to a parameter's main_grad needs it. A stage input is a leaf as well, but goes when I is over.
            if any(thing is weight for weight in weights) or _is_parameter(thing):
                parameters.append(thing)
                continue
            base = autograd.base_of(thing)  # whose history a view keeps, even one made without grad mode
            viewed = weights_at.get(autograd.memory_of(thing) or 0, [])
            is_free = viewed or (base is not None and _is_parameter(base))
            copies = is_copied and not is_free
            if copies or thing.requires_grad or (base is not None and base.requires_grad):
                arguments[i] = _without_history(thing, copies)
            (views if is_free else own).append(arguments[i])
            parameters += viewed
    return tuple(arguments), autograd.autocast_here(), own, views, parameters


def _is_parameter(tensor: torch.Tensor) -> bool:
    return tensor.is_leaf and type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter)


def _without_history(tensor: torch.Tensor, is_copied: bool) -> torch.Tensor:
    """An alias with the tensor's memory and version counter, or a copy: with its class and attributes, no history."""
    cls = type(tensor)
    if cls in (torch.Tensor, torch.nn.Parameter) and not tensor.__dict__:
        return tensor.detach().clone() if is_copied else tensor.detach()
    with torch.no_grad():
        alias = autograd.alias_of(tensor)
        alias = alias.clone() if is_copied and isinstance(alias, torch.Tensor) else alias
    if not isinstance(alias, torch.Tensor):
        raise TypeError(f"detach() of a {cls.__name__} in saved returned a {type(alias).__name__}; expected a tensor")
    if isinstance(alias, cls):
        for name, value in getattr(tensor, "__dict__", {}).items():
            alias.__dict__.setdefault(name, value)
        for name in copyreg._slotnames(cls):  # type: ignore[attr-defined]
            if hasattr(tensor, name) and not hasattr(alias, name):
                setattr(alias, name, getattr(tensor, name))
    return alias


def run(function: Any, arguments: tuple[Any, ...], autocast: dict[str, torch.dtype], count: int) -> list[Any]:
    """Makes the call under the autocast of the place where it was handed over. The gradients of ``count`` weights."""
    here = autograd.autocast_here()
    dtypes = {device: torch.get_autocast_dtype(device) for device in (*here, *autocast)}
    is_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a cast made here has no history, and the next forward would find it
    try:
        _set_autocast(autocast, {**dtypes, **autocast})
        return gradients_in(function(*arguments), count)
    finally:
        _set_autocast(here, dtypes)
        torch.set_autocast_cache_enabled(is_cached)


def gradients_in(returned: Any, count: int) -> list[Any]:
    """The gradients in what a callable returned, ``count`` of them: tensors and None."""
    if returned is None:
        return [None] * count
    called = "a function given to zbpipe.defer"
    if count == 0:
        raise TypeError(
            f"{called} with weights=None returned a {type(returned).__name__}; expected None, as it adds the gradients "
            "itself"
        )
    grads = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if len(grads) != count:
        raise ValueError(f"{called} returned {len(grads)} gradients; expected {count}, one for each of its weights")
    for i, grad in enumerate(grads):
        if not isinstance(grad, torch.Tensor | None):
            which = "" if count == 1 else f" as gradient {i}"
            raise TypeError(f"{called} returned a {type(grad).__name__}{which}; expected a tensor or None")
    return grads


def _set_autocast(on: dict[str, torch.dtype], dtypes: dict[str, torch.dtype]) -> None:
    for device, dtype in dtypes.items():
        torch.set_autocast_enabled(device, device in on)
        torch.set_autocast_dtype(device, dtype)
