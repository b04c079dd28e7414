"""Host time of the split backward on a deep stack of tiny transformer blocks.

The tensors are so small that the kernels cost next to nothing: what is timed is the walk, the plan,
the engine and the bookkeeping. In one process, run by run in turn: an unsplit
``torch.autograd.backward``, zbpipe's I and W, and torch's own I and W. A ratio is the median of the
run-by-run ratios to the unsplit backward.

    python benchmarks/host_time.py --out host_time.png
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import _backward as torch_backward

import zbpipe

WIDTH, HEADS, BATCH, TOKENS = 16, 2, 2, 4


class Block(nn.Module):
    """A pre-norm transformer block: (BATCH, TOKENS, WIDTH) to the same, float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).view(BATCH, TOKENS, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(heads.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Times(NamedTuple):
    """Seconds; an unsplit backward has its time in ``first``."""

    first: float
    second: float

    @property
    def total(self) -> float:
        return self.first + self.second


class Stage:
    def __init__(self, blocks: int) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(*(Block() for _ in range(blocks)))
        self.weights = list(self.module.parameters())
        self.x = torch.randn(BATCH, TOKENS, WIDTH)
        self.grad = torch.ones(BATCH, TOKENS, WIDTH)

    def unsplit(self) -> Times:
        x = self.x.clone().requires_grad_()
        output = self.module(x)
        start = time.perf_counter()
        torch.autograd.backward([output], [self.grad])
        del output
        return Times(time.perf_counter() - start, 0.0)

    def split(self, passes: object) -> Times:
        x = self.x.clone().requires_grad_()
        output = self.module(x)
        start = time.perf_counter()
        _, groups = passes.stage_backward_input([output], [self.grad], [x], self.weights)  # type: ignore[attr-defined]
        middle = time.perf_counter()
        passes.stage_backward_weight(self.weights, groups)  # type: ignore[attr-defined]
        del groups
        return Times(middle - start, time.perf_counter() - middle)


def measure(blocks: int, repeat: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each half, and the ratio of their sum to the unsplit backward's time."""
    stage = Stage(blocks)
    sides: dict[str, Callable[[], Times]] = {
        "unsplit": stage.unsplit,
        "zbpipe": lambda: stage.split(zbpipe),
        "torch": lambda: stage.split(torch_backward),
    }
    # torch's W is quadratic: a few runs of a deep stack say as much as many.
    repeats = dict.fromkeys(sides, repeat) | {"torch": max(3, repeat // max(1, blocks // 8))}
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
            "first_ms": 1e3 * statistics.median(t.first for t in runs),
            "second_ms": 1e3 * statistics.median(t.second for t in runs),
            "ratio": statistics.median(t.total / u.total for t, u in zip(runs, times["unsplit"], strict=False)),
        }
        for name, runs in times.items()
    }


def print_table(results: dict[int, dict[str, dict[str, float]]]) -> None:
    print(f"torch {torch.__version__}, {platform.machine()}, one thread; milliseconds (median)")
    print(
        f"{'blocks':>6} {'unsplit':>9} | {'zbpipe I':>9} {'W':>8} {'I+W':>6}"
        f" | {'torch I':>9} {'W':>9} {'I+W':>7} | torch / zbpipe"
    )
    for blocks, sides in results.items():
        ours, theirs = sides["zbpipe"], sides["torch"]
        print(
            f"{blocks:6d} {sides['unsplit']['first_ms']:9.2f}"
            f" | {ours['first_ms']:9.2f} {ours['second_ms']:8.2f} {ours['ratio']:5.2f}x"
            f" | {theirs['first_ms']:9.2f} {theirs['second_ms']:9.2f} {theirs['ratio']:6.1f}x"
            f" | {theirs['ratio'] / ours['ratio']:.1f}x"
        )


def draw(results: dict[int, dict[str, dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    blocks = list(results)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, style in (("torch", "s-"), ("unsplit", "o--"), ("zbpipe", "^-")):
        sides = [results[b][name] for b in blocks]
        left.plot(blocks, [s["first_ms"] + s["second_ms"] for s in sides], style, label=name)
        if name != "unsplit":
            right.plot(blocks, [s["ratio"] for s in sides], style, label=name)
    left.set(xscale="log", yscale="log", ylabel="I + W, ms", title="Host time of one backward")
    right.set(xscale="log", yscale="log", ylabel="ratio to unsplit", title="Cost of the split")
    right.axhline(1.0, color="grey", linewidth=1)
    for axis in (left, right):
        axis.set_xticks(blocks, [str(b) for b in blocks])
        axis.set_xlabel("transformer blocks")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--repeat", type=int, default=30, help="runs of each side")
    parser.add_argument("--out", type=Path, help="draw the picture to this PNG file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {blocks: measure(blocks, args.repeat) for blocks in args.blocks}
    print_table(results)
    if args.out:
        draw(results, args.out)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
