"""What it takes to add a weight's products: those of eight microbatches in one sweep, and 16-bit ones in float32.

Weights of 1,024 x 1,024, on one thread, in processor time; the ways are measured in turn, round after round, and each
figure is the ratio of a round's to what it is held against. W of several microbatches together, to one after the
other, with one weight, whose gradient a cache may hold, and with sixteen, whose gradients it does not. W of one
microbatch with policy(wide=True), to a product, a cast and an addition by hand.

    python benchmarks/sweep.py --json benchmarks/results
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import zbpipe
from zbpipe._bench.results import Spread, add_argument, spread, write
from zbpipe._text import table

SIZE = 1024
MICROBATCHES = 8
SWEEPS = {"one weight": 1, "sixteen weights": 16}
SWEPT_TOKENS = (16, 64)
WIDE_TOKENS = (64, 256, 1024)


def ratios(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Spread]:
    """Of each way to the first."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):  # the first is to warm up
        for name, way in ways.items():
            begin = time.thread_time()
            way()
            taken[name].append(time.thread_time() - begin)
    base, *others = taken
    return {name: spread(a / b for a, b in zip(taken[name][1:], taken[base][1:], strict=True)) for name in others}


def groups_of(w: nn.Parameter, tokens: int) -> tuple[list[zbpipe.ParamGroup], torch.Tensor, torch.Tensor]:
    """What I of one microbatch leaves, and the two factors of the product."""
    x = torch.randn(tokens, SIZE).to(w.dtype).requires_grad_()
    out = F.linear(x, w)
    grad = torch.randn_like(out)
    return zbpipe.stage_backward_input([out], [grad], [x], [w])[1], grad.t(), x.detach()


def swept(count: int, tokens: int, rounds: int) -> dict[str, Spread]:
    weights = [nn.Parameter(torch.randn(SIZE, SIZE)) for _ in range(count)]
    for w in weights:
        w.grad = torch.zeros_like(w)
    microbatches = [[g for w in weights for g in groups_of(w, tokens)[0]] for _ in range(MICROBATCHES)]
    together = [group for groups in microbatches for group in groups]

    def after_each_other(fused: bool) -> None:
        with zbpipe.policy(fused=fused):
            for groups in microbatches:
                zbpipe.stage_backward_weight(weights, groups, retain_graph=True)

    def sweep(fused: bool) -> None:
        with zbpipe.policy(fused=fused):
            zbpipe.stage_backward_weight(weights, together, retain_graph=True)

    return ratios(
        {
            "one after the other": lambda: after_each_other(False),
            "together": lambda: sweep(False),
            "fused, one after the other": lambda: after_each_other(True),
            "fused, together": lambda: sweep(True),
        },
        rounds,
    )


def widened(dtype: torch.dtype, tokens: int, rounds: int) -> dict[str, Spread]:
    w: Any = nn.Parameter(torch.randn(SIZE, SIZE).to(dtype))
    w.main_grad = torch.zeros(SIZE, SIZE)
    groups, left, right = groups_of(w, tokens)

    def weight_pass(wide: bool) -> None:
        with zbpipe.policy(main_grad=True, wide=wide):
            zbpipe.stage_backward_weight([w], groups, retain_graph=True)

    return ratios(
        {
            "by hand": lambda: w.main_grad.add_(left.mm(right).to(torch.float32)),
            "default": lambda: weight_pass(False),
            "wide": lambda: weight_pass(True),
        },
        rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    add_argument(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sweeps = {n: {str(t): swept(count, t, args.rounds) for t in SWEPT_TOKENS} for n, count in SWEEPS.items()}
    wide = {
        name: {str(t): widened(getattr(torch, name), t, args.rounds) for t in WIDE_TOKENS}
        for name in ("bfloat16", "float16")
    }
    print(f"torch {torch.__version__}, {platform.machine()}")
    for title, found in (("to one after the other", sweeps), ("to a product, a cast and an addition", wide)):
        for name, by_tokens in found.items():
            columns = list(next(iter(by_tokens.values())))
            rows = [[t, *(f"{of[c].median:.2f}x" for c in columns)] for t, of in by_tokens.items()]
            print(f"\n{name}, {title}")
            print(table(["tokens", *columns], rows))
    write(args.json, "sweep", {"sweeps": sweeps, "wide": wide})


if __name__ == "__main__":
    main()
