"""I and W of a compiled stage, beside the whole backward that torch compiles.

On transformer blocks in float32, these take turns in one process: the ordinary backward of `torch.compile`; I and W of
a stage compiled by `torch.compile`, whose backward zbpipe runs whole, in I; I and W of a stage compiled by
`zbpipe.compile`; I and W of eager code. A figure is the median of the ratios to the same run's ordinary backward.

    python benchmarks/compile.py --backend inductor
"""

import argparse
import platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from bench.results import add_argument, spread, write
from bench.stages import Block
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zbpipe


class Times(NamedTuple):
    """Seconds; an ordinary backward has its time in ``first``."""

    first: float
    second: float


class Stage:
    """`blocks` blocks of `width`, called with (1, tokens, width)."""

    def __init__(self, blocks: int, width: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(*(Block(width, 4) for _ in range(blocks)))
        self.weights = list(self.module.parameters())
        self.x = torch.randn(1, tokens, width)
        self.grad = torch.ones(1, tokens, width)

    def whole(self, forward: Callable[..., torch.Tensor]) -> Times:
        output = forward(self.x.clone().requires_grad_())
        start = time.perf_counter()
        torch.autograd.backward([output], [self.grad])
        return Times(time.perf_counter() - start, 0.0)

    def split(self, forward: Callable[..., torch.Tensor]) -> Times:
        x = self.x.clone().requires_grad_()
        output = forward(x)
        start = time.perf_counter()
        _, groups = zbpipe.stage_backward_input([output], [self.grad], [x], self.weights)
        middle = time.perf_counter()
        zbpipe.stage_backward_weight(self.weights, groups)
        return Times(middle - start, time.perf_counter() - middle)

    def held(self, forward: Callable[..., torch.Tensor]) -> int:
        x = self.x.clone().requires_grad_()
        _, groups = zbpipe.stage_backward_input([forward(x)], [self.grad], [x], self.weights)
        return sum(group.bytes_held for group in groups)

    def flops_in_w(self, forward: Callable[..., torch.Tensor]) -> float:
        """The part of the weight products' FLOPs that the profiler sees in W."""
        x = self.x.clone().requires_grad_()
        _, groups = zbpipe.stage_backward_input([forward(x)], [self.grad], [x], self.weights)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as prof:
            zbpipe.stage_backward_weight(self.weights, groups)
        rows = self.x.numel() // self.x.shape[-1]
        wanted = sum(2 * rows * w.numel() for w in self.weights if w.dim() == 2)
        return sum(event.flops or 0 for event in prof.events()) / wanted


def measure(stage: Stage, backend: str, repeat: int) -> dict[str, dict[str, Any]]:
    """Per side: I and W as ratios to the ordinary compiled backward, bytes held, part of the FLOPs in W."""
    theirs = torch.compile(stage.module, backend=backend, dynamic=False)
    ours = zbpipe.compile(stage.module, backend=backend, dynamic=False)
    sides: dict[str, Callable[..., torch.Tensor]] = {
        "torch.compile": theirs,
        "zbpipe.compile": ours,
        "eager": stage.module,
    }
    for _ in range(3):
        stage.whole(theirs)
        for forward in sides.values():
            stage.split(forward)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(repeat):
        unit = stage.whole(theirs).first
        for name, forward in sides.items():
            run = stage.split(forward)
            times[name].append((run.first / unit, run.second / unit))
    return {
        name: {
            "I": spread(first for first, _ in runs),
            "W": spread(second for _, second in runs),
            "sum": spread(first + second for first, second in runs),
            "held_bytes": stage.held(sides[name]),
            "flops_in_w": stage.flops_in_w(sides[name]),
        }
        for name, runs in times.items()
    }


def print_table(results: dict[str, dict[str, Any]], title: str) -> None:
    print(f"torch {torch.__version__}, {platform.machine()}, one thread; {title}")
    print(f"{'compiled by':>15} {'I':>6} {'W':>6} {'I + W':>6} {'held, MB':>9} {'FLOPs in W':>11}")
    for name, side in results.items():
        print(
            f"{name:>15} {side['I'].median:5.2f}x {side['W'].median:5.2f}x {side['sum'].median:5.2f}x"
            f" {side['held_bytes'] / 1e6:9.2f} {side['flops_in_w']:11.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=20, help="runs of each side")
    add_argument(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(Stage(args.blocks, args.width, args.tokens), args.backend, args.repeat)
    print_table(results, f"{args.blocks} blocks, width {args.width}, {args.tokens} tokens, {args.backend}")
    write(args.json, "compile", results)


if __name__ == "__main__":
    main()
