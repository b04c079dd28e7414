"""What is private in autograd and in tensors: views, versions, classes, what nodes saved."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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


# What has a C++ object of autograd's or storage behind it: bases of classes, without those of nodes in C++.
NATIVE_CLASSES = (torch._C.TensorBase, torch.UntypedStorage, torch._C._FunctionBase)
FUNCTION_NODE = torch._C._FunctionBase
SAVED_TENSOR = torch._C._autograd.SavedTensor


# Tensors.


def is_view(tensor: torch.Tensor) -> bool:
    return tensor._is_view()


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What the tensor is a view of; None if it is none."""
    return tensor._base


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor's memory was changed in place. Raises RuntimeError for inference tensors."""
    return tensor._version


def alias_of_class(cls: type, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory and version counter as an instance of a subclass that has no dispatch of its own."""
    return torch.Tensor._make_subclass(cls, tensor)


def parameter_like(parameter: torch.nn.Parameter) -> Any:
    """The parameter's memory as a new leaf of its class, without its attributes, gradient and hooks."""
    bare = parameter.detach()
    if not has_dispatch(type(parameter)):
        return torch.Tensor._make_subclass(type(parameter), bare, parameter.requires_grad)
    return bare.requires_grad_(parameter.requires_grad)  # a class with a dispatch of its own


def has_dispatch(cls: Any) -> bool:
    """Whether it is a class of tensors that have a dispatch of their own."""
    return bool(cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)


def has_forward_gradient(tensor: torch.Tensor) -> bool:
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def holders_of(tensor: torch.Tensor) -> int:
    """Who holds the tensor in C++, besides its Python object: nodes, views, sends."""
    return int(tensor._use_count()) - 1  # type: ignore[attr-defined]


def holders_of_memory(tensor: torch.Tensor) -> tuple[int, bool]:
    """How many hold the tensor's storage besides it, and whether Python names its storage."""
    other = torch.empty(0)  # whose storage nobody else holds
    theirs, mine = other.untyped_storage(), tensor.untyped_storage()
    in_python = sys.getrefcount(mine) > sys.getrefcount(theirs)
    more = torch._C._storage_Use_Count(mine._cdata) - torch._C._storage_Use_Count(theirs._cdata)
    return more + in_python, in_python


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """The Python objects exchange what they are in C++. Raises RuntimeError where C++ refers to one of them weakly."""
    torch._C._swap_tensor_impl(one, other)


def memory_of(tensor: torch.Tensor) -> int | None:
    """The same for all tensors on one storage; None if the tensor has no such thing."""
    try:
        return storage_id(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):  # sparse, say, or a wrapper of functorch's
        return None


def storage_id(storage: torch.UntypedStorage) -> int:
    """The same for all Python objects of one storage."""
    return int(storage._cdata)


# Nodes.


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
