"""FLOPs of the products that W runs, by their shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping

_FACTORS = {"AddmmBackward": (1, 2), "MmBackward": (0, 1), "BmmBackward": (0, 1), "BaddbmmBackward": (1, 2)}
"""The edges of a product's two factors, by its node's name without the 0 at its end."""


def of_product(
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
        given = next((s for s in shapes.get("saved", ()) if len(s) == len(grad)), grad)
        # Of a convolution the weight's first size is the output's channels, of a transposed one the input's.
        counts = {2 * size * math.prod(over) // over[1] for over in (grad, given) if over[1] == shape[0]}
        return "convolution", counts.pop() if len(counts) == 1 else None
    if name.startswith("GroupedMmBackward"):
        return "grouped product", 2 * math.prod(shape[-2:]) * grad[0] if len(grad) == 2 and len(shape) == 3 else None
    factors = _FACTORS.get(name.removesuffix("0"))
    if factors is not None:
        if slot not in factors:
            return "", 0  # the added matrix
        is_left = slot == factors[0]
        inner = grad[-1] if is_left else grad[-2]
        batch = list(shape[:-2])
        left, right = ([*batch, shape[-2], inner], [*batch, inner, shape[-1]])
        return f"{left} @ {right}", 2 * inner * size
    return "", 0
