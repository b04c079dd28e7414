"""W as training loops with schedules of their own do it: layers that put their weights' products into a queue.

The third side of the benchmarks, beside torch's module and zbpipe: the design of zero bubble's reference implementation
and of Megatron-LM's ``delay_wgrad_compute``, written anew here. The model must be made of such layers. Other weights
(of norms, of products within an expression) get their gradients in I. Hooks on weights and accumulators do not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class _Later(torch.autograd.Function):
    """``linear``, whose backward puts the weight's product into ``waiting``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, waiting: list[Callable[[], None]]
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.waiting = waiting
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        ctx.waiting.append(functools.partial(_add_product, weight, rows, x.reshape(-1, x.shape[-1])))
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight if ctx.needs_input_grad[0] else None, None, of_bias, None


def _add_product(weight: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> None:
    if weight.grad is None:
        weight.grad = rows.t() @ x
    else:
        weight.grad.addmm_(rows.t(), x)


class Store:
    """Modules that :meth:`prepare` has changed, and the passes over them, named as zbpipe's."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def prepare(self, module: nn.Module) -> nn.Module:
        """Makes every ``nn.Linear`` within put its product here; returns the module."""
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                vars(layer)["forward"] = functools.partial(self._linear, layer)
        return module

    def _linear(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Later.apply(x, layer.weight, layer.bias, self._waiting)  # type: ignore[no-untyped-call]
        return result

    def stage_backward_input(
        self,
        outputs: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        weights: object,
    ) -> tuple[tuple[torch.Tensor | None, ...], list[Callable[[], None]]]:
        torch.autograd.backward(outputs, grads)
        taken = self._waiting[:]
        self._waiting.clear()
        return tuple(x.grad for x in inputs), taken

    def stage_backward_weight(self, weights: object, groups: list[Callable[[], None]]) -> None:
        while groups:
            groups.pop(0)()
