"""What is private in dispatch and in operators: wrapper subclasses, trees of arguments, operators' schemas."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

pytree = _pytree


def is_operator(target: Any) -> bool:
    """Whether it is an overload of an operator: no higher-order operator, no Python function."""
    return isinstance(target, torch._ops.OpOverload)


def operator_name(operator: Any) -> str:
    """``"mm"`` of ``torch.ops.aten.mm.default``."""
    return str(operator._schema.name).rsplit("::", 1)[-1]


def makes_view(operator: Any) -> bool:
    """Whether it is an operator whose result has an argument's memory, and that does not write to it."""
    if not is_operator(operator):
        return False
    returns = operator._schema.returns
    says_so = any(result.alias_info is not None and not result.alias_info.is_write for result in returns)
    return says_so or operator_name(operator) == "_unsafe_view"


def is_mutable(target: Any) -> bool:
    """Whether it is an operator that writes to an argument."""
    return is_operator(target) and target._schema.is_mutable


def has_effects(target: Any) -> bool:
    """Whether it is the higher-order operator that orders side effects."""
    return isinstance(target, torch._ops.HigherOrderOperator) and "with_effects" in str(target)
