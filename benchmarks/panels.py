"""Which matrix products can be computed in panels to the bit? What W's choice of panels is made by.

Multiplies random matrices of more than a panel whole and in W's panels, and counts the products of which an element
differs, by the shorter side of the product. W takes panels where none does, and multiplies whole elsewhere: see
`rounds_panels_alike` in csrc/shim/weight_pass.cpp, and tests/passes/test_bits.py for W itself. MKL's other kernels:
set MKL_ENABLE_INSTRUCTIONS=AVX2; more threads than cores: MKL_DYNAMIC=FALSE.

    python benchmarks/panels.py --dtype float32 --threads 1 --seconds 60 --json panels.json
"""

from __future__ import annotations

import argparse
import collections
import os
import platform
import random
import time
from collections.abc import Iterator

import torch

from zbpipe._bench.results import add_argument, write
from zbpipe._text import table

TILE, PANEL = 48, 528  # as in csrc/shim/weight_pass.cpp
SIDES = (1, 2, 16, 48, 96, 256, PANEL)
MOST = 3_000_000_000  # multiplications of one product


def panels(size: int) -> Iterator[tuple[int, int]]:
    """Where the panels of W begin and how long they are."""
    count, tiles, begin = -(-size // PANEL), size // TILE, 0
    for i in range(count):
        end = begin + (tiles // count + (i < tiles % count)) * TILE if i + 1 < count else size
        yield begin, end - begin
        begin = end


def matrix(rows: int, columns: int, dtype: torch.dtype, dice: random.Random) -> torch.Tensor:
    """Row-major or column-major."""
    if dice.random() < 0.5:
        return torch.randn(rows, columns).to(dtype)
    return torch.randn(columns, rows).to(dtype).t()


def differs(dtype: torch.dtype, dice: random.Random) -> tuple[int, bool] | None:
    """The shorter side of a random product, and whether its panels differ from the whole; None if it is too much."""
    inner = int(2 ** dice.uniform(0, dice.choice([6, 9, 12])))
    large = int(dice.choice([dice.uniform(PANEL + 1, 1200), dice.uniform(PANEL + 1, 3000), 2 ** dice.uniform(9.1, 14)]))
    small = int(2 ** dice.uniform(0, 11))
    if large * small * inner > MOST:
        return None
    rows, columns = (large, small) if dice.random() < 0.5 else (small, large)
    left, right = matrix(rows, inner, dtype, dice), matrix(inner, columns, dtype, dice)
    whole = left @ right
    dim = 0 if rows >= columns else 1
    for begin, length in panels(max(rows, columns)):
        if dim == 0:
            panel = left.narrow(0, begin, length) @ right
        else:
            panel = left @ right.narrow(1, begin, length)
        if not torch.equal(panel, whole.narrow(dim, begin, length)):
            return min(rows, columns), True
    return min(rows, columns), False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    add_argument(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    dice = random.Random(args.seed)
    tried: collections.Counter[int] = collections.Counter()
    differing: collections.Counter[int] = collections.Counter()
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        if (result := differs(getattr(torch, args.dtype), dice)) is not None:
            side = max(s for s in SIDES if s <= result[0])
            tried[side] += 1
            differing[side] += result[1]
    rows = [[f"{side} and more", str(tried[side]), str(differing[side])] for side in SIDES]
    print(f"torch {torch.__version__}, {platform.machine()}, {args.dtype}, {args.threads} threads")
    print(table(["shorter side", "products", "differ"], rows))
    found = {side: {"products": tried[side], "differ": differing[side]} for side in SIDES}
    kernels = os.environ.get("MKL_ENABLE_INSTRUCTIONS", "")
    name = "_".join(["panels", args.dtype, str(args.threads), *filter(None, [kernels.lower()])])
    asked = {"dtype": args.dtype, "threads": args.threads, "kernels": kernels, "seed": args.seed}
    write(args.json, name, asked | {"sides": found})


if __name__ == "__main__":
    main()
