"""The text that the model learns, as bytes, and the batches of a step."""

from __future__ import annotations

from pathlib import Path

import torch

from demo.config import Config

VOCABULARY = 256
"""One token is one byte."""


def load_text() -> torch.Tensor:
    """Returns the whole of Milton's "Paradise Lost" as ``uint8 [length]`` (see ``data/NOTICE.txt``)."""
    raw = (Path(__file__).parent / "data" / "paradise_lost.txt").read_bytes()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def batch(text: torch.Tensor, step: int, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws the sequences of ``step``: the same on every rank, schedule and side.

    Returns ``(tokens, targets)``, both ``int64 [batch, context]``; a target is the byte that follows its token.
    """
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - config.context, (config.batch_size, 1), generator=generator)
    windows = text[starts + torch.arange(config.context + 1)].long()
    return windows[:, :-1].to(config.device), windows[:, 1:].to(config.device)
