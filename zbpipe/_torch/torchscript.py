"""What TorchScript keeps: the code that it has compiled lasts as long as the process, and its constants with it."""

from __future__ import annotations

from typing import Any

import torch


def constants() -> list[torch.Tensor]:
    """The tensors in the graphs of all that was compiled or traced in this process."""
    unit = getattr(getattr(torch.jit, "_state", None), "_python_cu", None)
    functions = unit.get_functions() if unit is not None else []
    return [node.t("value") for function in functions for node in _constants_of(function) if _is_a_tensors(node)]


def _constants_of(function: Any) -> list[Any]:
    try:
        return list(function.graph.findAllNodes("prim::Constant", recurse=True))
    except (AttributeError, RuntimeError):  # no graph, or none yet
        return []


def _is_a_tensors(node: Any) -> bool:
    return bool(node.hasAttribute("value") and node.kindOf("value") == "t")
