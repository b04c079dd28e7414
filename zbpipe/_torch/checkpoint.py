"""torch.utils.checkpoint's hooks, frames and reentrant Function. The shim calls this module."""

from __future__ import annotations

import contextlib
from types import FunctionType
from typing import Any

import torch
from torch.utils import checkpoint

from zbpipe._torch import autograd


def is_unpack_hook(hook: object) -> bool:
    """Whether it is torch's own, which computes a region again."""
    return bool(_own_frame(hook))


def read_again(unpack_hook: object) -> list[torch.Tensor] | None:
    """What torch gives a region that it computes again, and those around it: arguments, and what the function has
    closed over but for leaves that require a gradient. None where torch computes one again only once: within a
    GraphExecGroup, and if it is or may be selective. RuntimeError: an argument has been modified already."""
    frames = _frames(unpack_hook)
    is_in_group = getattr(torch._C, "_get_graph_exec_group", lambda: None)() is not None
    # A selective region's, which hands results out, each once. A torch without it cannot tell.
    mode = getattr(checkpoint, "_CachedTorchDispatchMode", object)
    if is_in_group or any(_closed_over(getattr(frame, "recompute_fn", None), mode) for frame in frames):
        return None
    with autograd.without_torch_functions():
        return [tensor for frame in frames for tensor in _read_by(frame)]


def is_reentrant(context: object) -> bool:
    """Whether it is the context of a reentrant checkpoint's node."""
    return getattr(context, "_forward_cls", None) is checkpoint.CheckpointFunction


def _own_frame(unpack_hook: object) -> list[Any]:
    """That of the hook's region; none where the hook is another's."""
    return _closed_over(unpack_hook, getattr(checkpoint, "_CheckpointFrame", ()))[:1]


def _frames(unpack_hook: object) -> list[Any]:
    """Those of the regions around the hook's, and its own last."""
    own = _own_frame(unpack_hook)
    return [f for frame in own for saved in _arguments(frame) for f in _frames(saved.unpack_hook)] + own


def _read_by(frame: Any) -> list[Any]:
    plain = [saved for saved in _arguments(frame) if saved.unpack_hook is None]
    if hasattr(autograd.SAVED_TENSOR, "unpack"):  # from torch 2.13 on
        read = [saved.unpack() for saved in plain]
    else:  # their node unpacks all, and all are plain or none
        read = list(frame.input_saver.grad_fn.saved_tensors) if plain else []
    for held in _closed_over(getattr(frame, "recompute_fn", None)):
        # Named arguments, and what the region's function itself has closed over.
        values = list(held.values()) if type(held) is dict else _closed_over(held)
        read += [v for v in values if issubclass(type(v), torch.Tensor) and not (v.is_leaf and v.requires_grad)]
    return read


def _arguments(frame: Any) -> list[Any]:
    """The region's, as saved tensors: in a list from torch 2.13 on, of a node of their own before."""
    node = getattr(getattr(frame, "input_saver", None), "grad_fn", None)
    listed = getattr(frame, "saved_args", ()) if node is None else node._raw_saved_tensors
    return [saved for saved in listed if isinstance(saved, autograd.SAVED_TENSOR)]


def _closed_over(function: Any, cls: Any = object) -> list[Any]:
    """What a Python function's cells hold of the class, by its type alone: ``__class__`` may run others' code."""
    found = []
    for cell in (function.__closure__ or ()) if type(function) is FunctionType else ():
        with contextlib.suppress(ValueError):  # it is empty
            found += [held for held in (cell.cell_contents,) if issubclass(type(held), cls)]
    return found
