"""What is private in dispatch and in operators: modes, wrapper subclasses, trees of arguments, what operators say of
themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "ATTENTION_BACKWARD_ON_CPU",
    "ATTENTION_ON_CPU",
    "GROUPED_MM",
    "TorchDispatchMode",
    "decomposed",
    "has_effects",
    "is_mutable",
    "is_operator",
    "is_traceable_wrapper_subclass",
    "makes_view",
    "operator_name",
    "packet_of",
    "pytree",
]

pytree = _pytree

_aten = torch.ops.aten
GROUPED_MM = _aten._grouped_mm
ATTENTION = _aten._scaled_dot_product_flash_attention
ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_backward
ATTENTION_ON_CPU = _aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD_ON_CPU = _aten._scaled_dot_product_flash_attention_for_cpu_backward


def packet_of(operator: Any) -> Any:
    """The operator with all its overloads, such as ``torch.ops.aten.mm``."""
    return operator._overloadpacket


def is_operator(target: Any) -> bool:
    """Whether it is an overload of an operator, not one that takes functions, or a Python function."""
    return isinstance(target, torch._ops.OpOverload)


def operator_name(operator: Any) -> str:
    """``"mm"`` of ``torch.ops.aten.mm.default``."""
    return str(operator._schema.name).rsplit("::", 1)[-1]


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
