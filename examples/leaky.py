"""A training loop with a leak that everybody has written once, for `python -m zbpipe leaks` to find.

    python -m zbpipe leaks --steps 5 examples/leaky.py
    python -m zbpipe leaks --error examples/leaky.py --mended       the same loop without it

The loop keeps every step's prediction, to say at its end how far they were from the target on average.
"""

import sys

import torch
from torch import nn


class History:
    """What was predicted, step by step."""

    def __init__(self):
        self.seen = []

    def add(self, prediction):
        self.seen.append(prediction)


def main(steps=20, mended=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history = History()
    for _ in range(steps):
        x = torch.randn(32, 64)
        prediction = model(x)
        (prediction - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        history.add(prediction.abs().mean().item() if mended else prediction)
    print(f"predictions of {len(history.seen)} steps")


if __name__ == "__main__":
    main(mended="--mended" in sys.argv[1:])
