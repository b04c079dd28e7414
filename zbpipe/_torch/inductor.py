"""What is private in inductor, the import of which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch._functorch.config
from torch import fx
from torch._inductor import config as config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
from torch._inductor.utils import BoxedBool as BoxedBool


def compile_graph(
    graph: fx.GraphModule, inputs: list[Any], inner_compile: Callable[..., Any], patches: dict[str, Any]
) -> Any:
    # A hit in AOTAutograd's cache would bring a backward that was compiled whole.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        return compile_fx(graph, inputs, inner_compile=inner_compile, config_patches=patches or None)
