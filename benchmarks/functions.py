"""What policy(split_functions=True) costs and brings: a stack of linear layers, each a Function that says nothing.

Per layer, of I and of W, in turn, round after round: torch's own module, zbpipe as it is (each Function runs whole, in
I), with the policy, and with Functions that call zbpipe.defer. With tiny tensors what is measured is host time, with
large ones where the products run. Each figure is the ratio of a round's to that of an unsplit backward.

    python benchmarks/functions.py --json benchmarks/results
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import time
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import _backward as torchs

import zbpipe
from zbpipe._bench.results import Spread, add_argument, spread, write
from zbpipe._text import table

LAYERS = 32
SIZES = {"tiny": (8, 16), "large": (256, 512)}  # tokens, width


class Silent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class Deferring(Silent):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, zbpipe.defer(lambda grad, x: grad.t() @ x, 1, (grad, x))


class Side(NamedTuple):
    function: Any
    passes: Any = zbpipe
    splits: bool = False


SIDES = {
    "torch": Side(Silent, torchs),
    "zbpipe": Side(Silent),
    "split_functions": Side(Silent, splits=True),
    "defer": Side(Deferring),
}


def forward(function: Any, weights: list[nn.Parameter], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, weights[0].shape[1], requires_grad=True)
    y = x
    for w in weights:
        y = function.apply(y, w)
    return x, y


def measure(tokens: int, width: int, rounds: int) -> dict[str, dict[str, Any]]:
    weights = [nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(LAYERS)]
    grad = torch.randn(tokens, width)
    whole: list[float] = []
    halves: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    for _ in range(rounds + 1):  # the first is to warm up
        x, y = forward(Silent, weights, tokens)
        begin = time.perf_counter()
        y.backward(grad)
        whole.append(time.perf_counter() - begin)
        for name, side in SIDES.items():
            x, y = forward(side.function, weights, tokens)
            with zbpipe.policy(split_functions=True) if side.splits else contextlib.nullcontext():
                begin = time.perf_counter()
                _, groups = side.passes.stage_backward_input([y], [grad], [x], iter(weights))
                middle = time.perf_counter()
            side.passes.stage_backward_weight(iter(weights), groups)
            halves[name].append((middle - begin, time.perf_counter() - middle))
    return {
        "unsplit": {"microseconds": spread(1e6 * t / LAYERS for t in whole[1:])},
        **{name: _figures(pairs[1:], whole[1:]) for name, pairs in halves.items()},
    }


def _figures(pairs: list[tuple[float, float]], whole: list[float]) -> dict[str, Spread]:
    return {
        "i": spread(i / t for (i, _), t in zip(pairs, whole, strict=True)),
        "w": spread(w / t for (_, w), t in zip(pairs, whole, strict=True)),
        "both": spread((i + w) / t for (i, w), t in zip(pairs, whole, strict=True)),
        "more_microseconds": spread(1e6 * (i + w - t) / LAYERS for (i, w), t in zip(pairs, whole, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    add_argument(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {name: measure(*size, args.rounds) for name, size in SIZES.items()}
    print(f"torch {torch.__version__}, {platform.machine()}, {LAYERS} layers")
    for name, (tokens, width) in SIZES.items():
        sides = found[name]
        print(
            f"\n{tokens} tokens, {width} x {width}: {sides['unsplit']['microseconds'].median:.0f} us a layer, unsplit"
        )
        rows = []
        for side in SIDES:
            ratios = (f"{sides[side][key].median:.2f}x" for key in ("i", "w", "both"))
            rows.append([side, *ratios, f"{sides[side]['more_microseconds'].median:+.1f}"])
        print(table(["", "I", "W", "I + W", "us more a layer"], rows))
    write(args.json, "functions", {"sizes": {name: list(size) for name, size in SIZES.items()}, "measured": found})


if __name__ == "__main__":
    main()
