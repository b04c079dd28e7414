"""What is private in dispatch and in operators: modes, wrapper subclasses, trees of arguments, what operators say of
themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "ATTENTION_BACKWARD_ON_CPU",
    "ATTENTION_ON_CPU",
    "CAST",
    "COLLECTIVES",
    "GROUPED_MM",
    "LAYOUT_STEPS",
    "PRODUCTS",
    "PushedMode",
    "TorchDispatchMode",
    "decomposed",
    "disable_dynamo",
    "has_effects",
    "is_mutable",
    "is_operator",
    "is_traceable_wrapper_subclass",
    "makes_view",
    "namespace_of",
    "operator_name",
    "packet_of",
    "pop_mode",
    "push_mode",
    "pytree",
    "wrapper",
]

disable_dynamo = _disable_dynamo
pytree = _pytree

_aten = torch.ops.aten
GROUPED_MM = _aten._grouped_mm
ATTENTION = _aten._scaled_dot_product_flash_attention
ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_backward
ATTENTION_ON_CPU = _aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD_ON_CPU = _aten._scaled_dot_product_flash_attention_for_cpu_backward

CAST = _aten._to_copy.default
LAYOUT_STEPS = frozenset(
    {
        *(_aten.t.default, _aten.transpose.int, _aten.permute.default),
        *(_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default),
        *(_aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
    }
)
"""What lays a tensor out anew, in its own memory."""
COLLECTIVES = "c10d"
"""The namespace of operators that do not say which of their arguments they write to."""


def _of_two(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, dim: int = 2) -> Product | None:
    if a.is_nested or b.is_nested or not a.dim() == b.dim() == dim or a.device != b.device:
        return None  # the operator says what is wrong
    fits = a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2]
    return ((*a.shape[:-1], b.shape[-1]), dtype) if fits else None


def _mm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None, dim: int = 2) -> Product | None:
    if dtype is not None and a.is_cpu:
        return None  # which has no such kernel
    return _of_two(a, b, dtype or a.dtype, dim) if a.dtype == b.dtype else None


def _bmm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> Product | None:
    return _mm(a, b, dtype, dim=3)


def _scaled_product(
    a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, bias: Any = None, result: Any = None, *rest: Any
) -> Product | None:
    is_plain = bias is None and result is None and bool(rest) and isinstance(rest[0], torch.dtype)
    return _of_two(a, b, rest[0]) if is_plain else None


Product = tuple[tuple[int, ...], torch.dtype]
PRODUCTS: dict[Any, Callable[..., Product | None]] = {
    **{
        getattr(packet, name): product
        for packet, product in ((_aten.mm, _mm), (_aten.bmm, _bmm))
        for name in ("default", "dtype")
        if hasattr(packet, name)
    },
    _aten._scaled_mm.default: _scaled_product,
}
"""Matrix products, and what shape and dtype their result has; None for arguments that are better computed."""


def packet_of(operator: Any) -> Any:
    """The operator with all its overloads, such as ``torch.ops.aten.mm``."""
    return operator._overloadpacket


def is_operator(target: Any) -> bool:
    """Whether it is an overload of an operator, not one that takes functions, or a Python function."""
    return isinstance(target, torch._ops.OpOverload)


def operator_name(operator: Any) -> str:
    """``"mm"`` of ``torch.ops.aten.mm.default``."""
    return str(operator._schema.name).rsplit("::", 1)[-1]


def namespace_of(operator: Any) -> str:
    """``"aten"`` of ``torch.ops.aten.mm.default``."""
    return str(operator.namespace)


def decomposed(operator: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator that consists of others, by these; NotImplemented for any other."""
    return operator.decompose(*args, **kwargs) if is_operator(operator) else NotImplemented


def makes_view(operator: Any) -> bool:
    """Whether an operator gives a result that has an argument's memory, without writing to it. False for other things
    than operators."""
    if not is_operator(operator):
        return False
    returns = operator._schema.returns
    says_so = any(result.alias_info is not None and not result.alias_info.is_write for result in returns)
    return says_so or operator_name(operator) == "_unsafe_view"


def is_mutable(target: Any) -> bool:
    """Whether it is an operator that writes to an argument."""
    return is_operator(target) and target._schema.is_mutable


def has_effects(target: Any) -> bool:
    """Whether it is the operator around those whose side effects have an order."""
    return isinstance(target, torch._ops.HigherOrderOperator) and "with_effects" in str(target)


class PushedMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that is not noted in torch's flags, which all threads share and which are wrong when two have overlapped;
    so it is pushed and popped, and is no context. torch.compile compiles within it as without it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:  # nothing that a context would need
        pass

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would be a function around each operator


def push_mode(mode: PushedMode) -> None:
    torch._C._push_on_torch_dispatch_stack(mode)


def pop_mode() -> None:
    torch._C._pop_torch_dispatch_stack(None)


def wrapper(cls: type[Any], size: Sequence[int], strides: Sequence[int] | None, dtype: Any, device: Any) -> Any:
    """A tensor without memory, of a class with a dispatch of its own. ``strides``: None for those of a new tensor."""
    make: Any = torch.Tensor._make_wrapper_subclass
    return make(cls, size, strides=strides, dtype=dtype, device=device)
