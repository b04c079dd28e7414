"""Blocks of Llama 3's kind, at any size: (batch, tokens, width) to the same."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from bench.stages import Stage


class Sizes(NamedTuple):
    width: int
    heads: int
    kv_heads: int  # each is shared by heads / kv_heads queries
    hidden: int


LLAMA_3_8B = Sizes(width=4096, heads=32, kv_heads=8, hidden=14336)
TINY = Sizes(width=64, heads=4, kv_heads=2, hidden=160)


class Block(nn.Module):
    """``angles``: (tokens, width / heads / 2), by which rotary embeddings turn queries and keys."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, sizes: Sizes, angles: torch.Tensor) -> None:
        super().__init__()
        self.sizes = sizes
        of_kv = sizes.width // sizes.heads * sizes.kv_heads
        self.norm1, self.norm2 = (nn.RMSNorm(sizes.width, eps=1e-5) for _ in range(2))
        self.q, self.out = (nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(sizes.width, of_kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[-2]
        cos, sin = self.cos[:tokens], self.sin[:tokens]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        heads = (self.sizes.heads, self.sizes.kv_heads, self.sizes.kv_heads)
        q, k, v = (
            product(h).unflatten(-1, (count, -1)).transpose(1, 2)
            for product, count in zip((self.q, self.k, self.v), heads, strict=True)
        )
        mixed = self.attention(self.turned(q), self.turned(k), v)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        h = self.norm2(x)
        out: torch.Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return out


def stage(
    blocks: int,
    sizes: Sizes,
    tokens: int,
    device: str,
    dtype: torch.dtype,
    checkpointed: bool = False,
    kind: type[Block] = Block,
) -> Stage:
    """Blocks with random weights, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        half = sizes.width // sizes.heads // 2
        angles = torch.outer(torch.arange(tokens), 1e4 ** -(torch.arange(half) / half))
        made = Stage([kind(sizes, angles) for _ in range(blocks)], (1, tokens, sizes.width), checkpointed)
    return made.to(dtype)
