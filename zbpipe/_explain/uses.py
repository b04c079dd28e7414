"""Which uses each parameter has, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from zbpipe import _C
from zbpipe._explain.result import ParameterPlan, Use
from zbpipe._policy import Policy
from zbpipe._tasks import place_of
from zbpipe.memory._held import ParameterRow

_FACTORS = {"AddmmBackward": (1, 2), "MmBackward": (0, 1), "BmmBackward": (0, 1), "BaddbmmBackward": (1, 2)}
"""The edges of a product's two factors, by its node's name without the 0 at its end."""


class Uses:
    """The uses of each parameter, by its name; ``outside``: how nodes outside of I lead to it."""

    def __init__(self, policy: Policy, name_of: Mapping[int, str]) -> None:
        self.policy = policy
        self.name_of = name_of
        self.of: dict[str, list[Use]] = {}
        self.outside: dict[str, dict[str, None]] = {}
        self.flops = 0
        self.unknown = False  # whether W runs more than `flops`
        self.is_within_autocast = False
        self.notes: dict[str, None] = {}

    def add(self, task: tuple[Any, ...]) -> None:
        """One of a group's, as :func:`zbpipe._tasks.tasks_of` has it."""
        node, kind, why, is_packed, faces, tensors = task
        shapes: dict[str, list[tuple[int, ...]]] = {}
        done_in_i: set[int] = set()
        for role, _, _, shape, _, _, weights in tensors:
            shapes.setdefault(role, []).append(shape)
            if role in ("kept gradient", "light gradient"):
                done_in_i.update(id(weight) for weight in weights)
        if is_packed:
            self.notes["the FLOPs of what W computes again of checkpointed regions are not counted"] = None
            self.unknown = True
        runs_in, reason = place_of(node, kind, why, self.policy.defer)
        for slot, shape, outside, weights in faces:
            product, flops = _product(node, kind, slot, shape, shapes) if runs_in == "W" else ("", 0)
            self.flops += flops or 0
            self.unknown = self.unknown or flops is None or outside is not None
            for weight in weights:
                name = self.name_of.get(id(weight), "")
                here = (runs_in, reason, product, flops)
                if kind == "handed over" and id(weight) in done_in_i:
                    here = ("I", f"{node} returns it there, beside what it hands over", "", 0)
                self.of.setdefault(name, []).append(Use(node, *here))
                if outside:
                    self.outside.setdefault(name, {})[outside] = None

    def add_inner(self, weight: torch.Tensor) -> None:
        """For one that has got its gradient within I."""
        why = "it is added within I, by a backward in the backward, as that of a reentrant checkpoint"
        self.of.setdefault(self.name_of[id(weight)], []).append(Use("", "I", why, "", 0))


def plan_of(name: str, parameter: torch.nn.Parameter, found: Uses, row: ParameterRow | None) -> ParameterPlan:
    uses = tuple(found.of.get(name, ()))
    notes = list(found.outside.get(name, ()))
    if not parameter.requires_grad:
        notes.append("frozen")
    elif not uses:
        notes.append("no gradient reaches it")
    elif _C.is_watched(parameter):
        notes.append("hooks watch it")
    size, alone = (row.bytes, row.alone) if row else (0, 0)
    return ParameterPlan(name, tuple(parameter.shape), uses, size, alone, "; ".join(notes))


def _product(
    name: str, kind: str, slot: int, shape: tuple[int, ...], shapes: Mapping[str, list[tuple[int, ...]]]
) -> tuple[str, int | None]:
    """What W multiplies for an edge of a task, and the FLOPs; None if they are not known."""
    if kind in ("handed over", "root"):
        return "", None
    grad = next(iter(shapes.get("output gradient", ())), None)
    if len(shape) < 2 or grad is None:
        return "", 0
    if not grad or min(*grad, *shape) < 0:
        return "", None  # nested, or of sizes that are not numbers
    size = math.prod(shape)
    if name.startswith("LinearBackward"):
        rows = math.prod(grad[:-1])
        return f"{[shape[0], rows]} @ {[rows, shape[1]]}", 2 * rows * size
    if name.startswith("ConvolutionBackward"):
        given = next((s for s in shapes.get("matrix", shapes.get("saved", ())) if len(s) == len(grad)), grad)
        # Of a convolution the weight's first size is the output's channels, of a transposed one the input's.
        counts = {2 * size * math.prod(over) // over[1] for over in (grad, given) if over[1] == shape[0]}
        return "convolution", counts.pop() if len(counts) == 1 else None
    if name.startswith("GroupedMmBackward"):
        return "grouped product", 2 * math.prod(shape[-2:]) * grad[0] if len(grad) == 2 and len(shape) == 3 else None
    factors: tuple[int, ...] = _FACTORS.get(name.removesuffix("0"), ())
    if slot not in factors:  # another operation, or the added matrix
        return "", 0
    inner = grad[-1] if slot == factors[0] else grad[-2]
    *batch, rows, columns = shape
    return f"{[*batch, rows, inner]} @ {[*batch, inner, columns]}", 2 * inner * size
