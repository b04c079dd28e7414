"""What is private in autograd and in tensors: views and versions, hooks, what nodes saved, which node and run it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node


def without_torch_functions() -> Any:
    """A context in which tensors' subclasses do not answer in the place of torch's functions."""
    return torch._C.DisableTorchFunctionSubclass()


def without_autocast() -> Any:
    """A context in which no autocast is in force, on any device."""
    return torch._C._DisableAutocast()


def cached_by_autocast() -> int:
    """Bytes per element of what autocast makes of weights on the CPU and keeps; 0 where it is off or keeps nothing."""
    if not torch.is_autocast_enabled("cpu") or not torch.is_autocast_cache_enabled():
        return 0
    return torch.get_autocast_dtype("cpu").itemsize


# Tensors.


def is_view(tensor: torch.Tensor) -> bool:
    return tensor._is_view()


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What the tensor is a view of; None if it is none."""
    return tensor._base


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor's memory was changed in place. Raises RuntimeError for inference tensors."""
    return tensor._version


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def alias_of_class(cls: type, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory and version counter as an instance of a subclass that has no dispatch of its own."""
    return torch.Tensor._make_subclass(cls, tensor)


def storage_id(storage: torch.UntypedStorage) -> int:
    """The same for all Python objects of one storage."""
    return int(storage._cdata)


def hooks_of(leaf: torch.Tensor) -> list[dict[int, Any]]:
    """The dictionaries of the hooks that Python has put on a leaf: tensor hooks, and those after accumulation."""
    return [held for held in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks) if held is not None]


def hook_kinds(leaf: torch.Tensor) -> tuple[bool, bool]:
    """Whether a leaf has a dictionary of tensor hooks, and one of those after accumulation."""
    return leaf._backward_hooks is not None, leaf._post_accumulate_grad_hooks is not None


def drop_hooks(leaf: torch.Tensor, but: tuple[bool, bool]) -> None:
    """Take a leaf's dictionaries of hooks away, but for the kinds that it had before, as ``hook_kinds`` told."""
    had_own, had_post = but
    if not had_own and leaf._backward_hooks is not None:
        leaf._backward_hooks = None
    if not had_post and leaf._post_accumulate_grad_hooks is not None:
        leaf._post_accumulate_grad_hooks = None  # type: ignore[assignment]


# Nodes and runs.


def running_node() -> Node | None:
    """The node that the engine runs in this thread."""
    node: Node | None = torch._C._current_autograd_node()
    return node


def zeros_for(node: Node, index: int) -> torch.Tensor:
    """A gradient for one of a node's outputs, of its shape, dtype and device."""
    metadata = node._input_metadata[index]
    return torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)


def is_transposed(node: Node | None) -> bool:
    """Whether it is the node of a transposed convolution."""
    return bool(getattr(node, "_saved_transposed", False))


def saved_by(node: Node) -> Iterator[tuple[str, Any]]:
    """What a node saved, by name, each a SavedTensor of torch's: no hook runs."""
    prefix = "_raw_saved_"
    for attribute in dir(type(node)):
        if not attribute.startswith(prefix):
            continue
        try:
            saved = getattr(node, attribute)
        except RuntimeError:  # a backward has released it
            continue
        for one in saved if isinstance(saved, (tuple, list)) else [saved]:
            yield attribute.removeprefix(prefix), one
