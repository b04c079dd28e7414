"""Host time of the split backward on a deep stack of tiny transformer blocks.

The tensors are so small that the kernels cost next to nothing. So the times are those of the walk, the plan, the engine
and the bookkeeping. In one process these take turns: an unsplit ``torch.autograd.backward``, zbpipe's I and W, torch's
own I and W, those of layers with a store (store.py). torch's passes take ``module.parameters()``, as its stage does,
so the walk over the modules counts. zbpipe's passes take None, as from a patched stage. A ratio is the median of the
ratios of each run to its unsplit backward.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import zbpipe
from bench.results import Spread, now, spread
from bench.stages import Block
from bench.store import Store
from zbpipe._torch.pipelining import BACKWARD

WIDTH, HEADS, BATCH, TOKENS = 16, 2, 2, 4


class Times(NamedTuple):
    """Seconds; an unsplit backward has its time in ``first``."""

    first: float
    second: float

    @property
    def total(self) -> float:
        return self.first + self.second


class Layer(nn.Module):
    """A product with a weight that is not a node of its own: einsum transposes it, a view lies before it."""

    def __init__(self, weights: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.is_einsum = weights == "einsum"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.einsum("bi,oi->bo", x, self.weight) if self.is_einsum else x @ self.weight.view(WIDTH, WIDTH)
        return product.relu()


class Experts(nn.Module):
    """Two grouped products, whose rows are sorted by expert, and as many for each."""

    ends: torch.Tensor

    def __init__(self, dtype: torch.dtype, experts: int = HEADS, width: int = WIDTH, rows: int = TOKENS) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width, dtype=dtype) / width)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width, dtype=dtype) / width)
        self.register_buffer("ends", torch.arange(1, experts + 1, dtype=torch.int32) * rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch._grouped_mm(x, self.up, offs=self.ends)
        return torch._grouped_mm(hidden.relu(), self.down, offs=self.ends)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(HEADS, HEADS, 3, padding=1), nn.ReLU(), nn.Conv2d(HEADS, HEADS, 3, padding=1), nn.ReLU()
    )


# What W computes by operations of other kinds.
OPERATIONS: dict[str, Callable[[], nn.Module]] = {
    "experts, bfloat16": lambda: Experts(torch.bfloat16),
    "experts, float32": lambda: Experts(torch.float32),
    "convolutions": convolutions,
}


class Stage:
    """A stack of blocks, and the arguments of its backward. With a store its layers are the store's.

    weights: "plain", "tied" (each odd block has the matrices of the block before it), "hooked" (a hook on each
    weight), "autocast" (to bfloat16), "einsum" or "view" (a block is one such product), or one of OPERATIONS. The
    engine sums the gradients of tied and hooked weights, so W costs more there.
    """

    def __init__(self, blocks: int, store: Store | None = None, weights: str = "plain", device: str = "cpu") -> None:
        torch.manual_seed(0)
        is_rows = weights in ("einsum", "view")
        make = OPERATIONS.get(weights, lambda: Layer(weights) if is_rows else Block(WIDTH, HEADS))
        stack: list[Any] = [make() for _ in range(blocks)]
        if weights == "tied":
            for block, before in zip(stack[1::2], stack[::2], strict=True):
                block.up.weight, block.down.weight = before.up.weight, before.down.weight
                block.qkv.weight, block.out.weight = before.qkv.weight, before.out.weight
        self.module: nn.Module = nn.Sequential(*stack).to(device)
        self.device = device
        if weights == "hooked":
            for parameter in self.module.parameters():
                parameter.register_hook(lambda grad: None)  # type: ignore[no-untyped-call]
        if store is not None:
            store.prepare(self.module)
        shape: tuple[int, ...] = (BATCH, TOKENS, WIDTH)
        if weights == "convolutions":
            shape = (BATCH, HEADS, TOKENS, TOKENS)
        elif is_rows or weights.startswith("experts"):
            shape = (BATCH * TOKENS, WIDTH)
        dtype = torch.bfloat16 if weights.endswith("bfloat16") else torch.float32
        self.x = torch.randn(shape, device=device, dtype=dtype)
        self.grad = torch.ones_like(self.x)
        self.is_cast = weights == "autocast"

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x.clone().requires_grad_()
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.is_cast):
            return x, self.module(x)

    def unsplit(self) -> Times:
        _, output = self.forward()
        start = now(self.device)
        torch.autograd.backward([output], [self.grad])
        del output
        return Times(now(self.device) - start, 0.0)

    def weights(self, passes: Any) -> Iterator[torch.Tensor] | None:
        return None if passes is zbpipe else self.module.parameters()

    def split(self, passes: Any) -> Times:
        x, output = self.forward()
        start = now(self.device)
        _, groups = passes.stage_backward_input([output], [self.grad], [x], self.weights(passes))
        middle = now(self.device)
        passes.stage_backward_weight(self.weights(passes), groups)
        del groups
        return Times(middle - start, now(self.device) - middle)


def measure(blocks: int, repeat: int, device: str = "cpu", weights: str = "plain") -> dict[str, dict[str, Spread]]:
    """Milliseconds of each half, and the ratio of their sum to the unsplit backward's time, of each side. A store
    knows plain weights."""
    stage, store = Stage(blocks, device=device, weights=weights), Store()
    torchs = importlib.import_module(BACKWARD)
    sides: dict[str, Callable[[], Times]] = {
        "unsplit": stage.unsplit,
        "zbpipe": lambda: stage.split(zbpipe),
        "torch": lambda: stage.split(torchs),
    }
    if weights == "plain":
        stored = Stage(blocks, store, device=device)
        sides["store"] = lambda: stored.split(store)
    # torch's W is quadratic: a few runs of a deep stack are enough.
    repeats = dict.fromkeys(sides, repeat) | {"torch": min(repeat, max(3, repeat // max(1, blocks // 8)))}
    for _ in range(2):
        for run in sides.values():
            run()
    times: dict[str, list[Times]] = {name: [] for name in sides}
    for i in range(repeat):
        for name, run in sides.items():
            if i < repeats[name]:
                times[name].append(run())
    return {
        name: {
            "first_ms": spread(1e3 * t.first for t in runs),
            "second_ms": spread(1e3 * t.second for t in runs),
            "ratio": spread(t.total / u.total for t, u in zip(runs, times["unsplit"], strict=False)),
        }
        for name, runs in times.items()
    }
