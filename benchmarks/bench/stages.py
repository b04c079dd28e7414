"""Pipeline stages of four kinds: each maps x to a tensor of x's shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A pre-norm transformer block: (batch, tokens, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return out


class Experts(nn.Module):
    """A mixture of experts with one expert per token, in a loop over the experts: (tokens, width) to the same."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        weight, chosen = self.router(h).softmax(dim=-1).max(dim=-1)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(h[rows]) * weight[rows, None])
        return x + out


class Residual(nn.Module):
    """A residual block of convolutions: (batch, channels, height, width) to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.conv2 = nn.Conv2d(2 * channels, channels, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(nn.functional.silu(self.norm1(x)))
        out: torch.Tensor = x + self.norm2(self.conv2(nn.functional.silu(h)))
        return out


class Stage(nn.Module):
    """Blocks in a row, each checkpointed on request. ``computed`` counts their forwards, recomputations included."""

    def __init__(self, blocks: list[nn.Module], shape: tuple[int, ...], checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.shape = shape
        self.checkpointed = checkpointed
        self.computed = 0

    def compute(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.computed += 1
        out: torch.Tensor = block(x)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(self.compute, block, x, use_reentrant=False) if self.checkpointed else self.compute(block, x)
        return x


def mlp(blocks: int = 4, width: int = 256, tokens: int = 1024, checkpointed: bool = False) -> Stage:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Tanh())

    return Stage([block() for _ in range(blocks)], (tokens, width), checkpointed)


def transformer(
    blocks: int = 4, width: int = 256, tokens: int = 1024, heads: int = 4, checkpointed: bool = False
) -> Stage:
    return Stage([Block(width, heads) for _ in range(blocks)], (1, tokens, width), checkpointed)


def moe(blocks: int = 2, width: int = 128, tokens: int = 1024, experts: int = 4, checkpointed: bool = False) -> Stage:
    return Stage([Experts(width, experts) for _ in range(blocks)], (tokens, width), checkpointed)


def convolution(blocks: int = 3, channels: int = 16, side: int = 32, checkpointed: bool = False) -> Stage:
    return Stage([Residual(channels) for _ in range(blocks)], (4, channels, side, side), checkpointed)


STAGES: dict[str, Callable[..., Stage]] = {
    "mlp": mlp,
    "transformer": transformer,
    "moe": moe,
    "convolution": convolution,
}
