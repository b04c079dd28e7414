"""Who watches zbpipe's passes: nobody, or what zbpipe.memory puts here while something records.

A module of its own, so that neither the passes nor ``import zbpipe`` need zbpipe.memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from zbpipe._C import ParamGroup


class Observer(Protocol):
    """Runs the passes as ``_C.input_pass``, ``_C.weight_pass`` and ``torch.autograd.backward`` do."""

    def input_pass(
        self, outputs: Any, output_grads: Any, inputs: Any, weights: Any, /
    ) -> tuple[tuple[torch.Tensor | None, ...], list[ParamGroup]]: ...

    def weight_pass(
        self, weights: Any, param_groups: Iterable[ParamGroup], retain_graph: bool, fuse: bool, /
    ) -> Sequence[torch.Tensor]: ...

    def backward(self, tensors: Any, /, *, grad_tensors: Any) -> None: ...


current: Observer | None = None
