"""A GPT-like language model over bytes, as a list of pipeline stages."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from demo.config import Config
from demo.text import VOCABULARY


class Embedding(nn.Module):
    """Tokens ``int64 [batch, time]`` to activations ``float [batch, time, width]``, with learned positions."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.token(tokens) + self.position[: tokens.shape[1]]
        return out


class Attention(nn.Module):
    """Causal self-attention on ``float [batch, time, width]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    """A pre-norm transformer block on ``float [batch, time, width]``; ``checkpointed``: it is computed again in the
    backward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.checkpointed = False
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self._run, x, use_reentrant=False) if self.checkpointed else self._run(x)
        return out

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x))
        out: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return out


def build_stages(config: Config) -> list[nn.Sequential]:
    """Builds the whole model, cut into ``config.num_stages`` stages, from ``config.seed`` alone.

    Stage 0 opens with the embedding, the last stage closes with norm and a large head: ``float [batch, time, 256]``
    logits.
    """
    torch.manual_seed(config.seed)
    stages = [
        nn.Sequential(*(Block(config.width, config.heads) for _ in range(config.blocks_per_stage)))
        for _ in range(config.num_stages)
    ]
    stages[0].insert(0, Embedding(config.width, config.context))
    head = [nn.Linear(config.width, config.head_width), nn.GELU(), nn.Linear(config.head_width, VOCABULARY)]
    stages[-1].extend([nn.LayerNorm(config.width), *head])
    return stages


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte: ``[batch, time, 256]`` against ``int64 [batch, time]``, a 0-dim tensor."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
