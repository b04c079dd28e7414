"""Who watches zbpipe's passes: nobody, or what zbpipe.memory puts here while something records.

A module of its own, so that the passes do not need zbpipe.memory, which needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from zbpipe._C import ParamGroup


class Observer(Protocol):
    """Runs the passes as ``_C.input_pass`` and ``_C.weight_pass`` do, and a whole backward as it is told."""

    def input_pass(self, *args: Any) -> tuple[tuple[torch.Tensor | None, ...], list[ParamGroup]]: ...

    def weight_pass(self, *args: Any) -> None: ...

    def backward(self, backward: Callable[..., None], /, *args: Any) -> None: ...


current: Observer | None = None
