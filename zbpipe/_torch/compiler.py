"""What is private in torch.compile: its backends, the context of a compilation, its results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch._guards import CompileContext as CompileContext
from torch._guards import TracingContext as TracingContext
from torch._guards import compile_context as compile_context
from torch._guards import tracing as tracing


def mark_boxed(function: Callable[..., Any]) -> None:
    """Tells AOTAutograd that a function empties the list of arguments that it is called with."""
    function._boxed_call = True  # type: ignore[attr-defined]


def run_as_traced(graph: fx.GraphModule, values: Sequence[Any]) -> Any:
    """The graph as a function of one list, without a compiler."""
    from torch._dynamo.backends.debugging import boxed_nop

    return boxed_nop(graph, list(values))


def compile_with_aot_eager(graph: fx.GraphModule, inputs: list[Any], compile_backward: Callable[..., Any]) -> Any:
    from torch._dynamo.backends.debugging import aot_eager

    with torch._functorch.config.patch(enable_autograd_cache=False):
        return aot_eager(graph, inputs, bw_compiler=compile_backward)


def options_of(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """inductor's configuration for a mode and options of torch.compile. Raises torch.compile's errors."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    return dict(wrapper(mode, dict(options or {}), None).config)


def is_compilation(value: object) -> bool:
    """Whether it has the options of a compiled module or function: such an object compiles a function given to it."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # without it nothing is compiled
    return frames is not None and isinstance(value, frames._TorchDynamoContext)


def compilation_of(value: object) -> tuple[Any, Any] | None:
    """The compiling object and the original of a function made by torch.compile or torch.compiler.disable."""
    if not isinstance(value, FunctionType) or not hasattr(value, "_torchdynamo_orig_callable"):
        return None
    kept = [cell.cell_contents for cell in value.__closure__ or ()]
    found = next(filter(is_compilation, kept), None)
    original = value._torchdynamo_orig_callable
    if getattr(original, "__globals__", {}).get("__name__") == "torch._dynamo.external_utils":
        original = getattr(original, "__wrapped__", original)  # a method of torch's own class, behind dynamo's function
    return None if found is None else (found, original)
