"""Memory and time of the split backward: torch's own module beside zbpipe, an unsplit backward as the reference.

Four kinds of stages, float32, on the CPU. Bytes are exact (zbpipe.memory.record) and count from before the forward, so
that neither the weights nor the stage's input are in them; each measured step runs on a stage of its own whose
gradients start from None. What a pipeline would send away (the output, the input's gradient) is dropped before "held"
is read. Times are medians of runs that take turns; ratios are to the unsplit backward's median, or to torch's W.

    python benchmarks/memory.py --png memory.png --json memory.json
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _stages import Stage, convolution, mlp, moe, transformer
from torch import nn
from torch.distributed.pipelining import _backward as torch_backward

import zbpipe


class Side(NamedTuple):
    """Who runs the backward, None for an unsplit one, and under which policy."""

    passes: Any
    choices: dict[str, Any]


SIDES = {"unsplit": Side(None, {}), "torch": Side(torch_backward, {}), "zbpipe": Side(zbpipe, {})}
POLICIES = {
    "unsplit": Side(None, {}),
    "default": Side(zbpipe, {}),
    "defer=all": Side(zbpipe, {"defer": "all"}),
    "defer=nothing": Side(zbpipe, {"defer": "nothing"}),
    "checkpoint=recompute": Side(zbpipe, {"checkpoint": "recompute"}),
    "checkpoint=input_pass": Side(zbpipe, {"checkpoint": "input_pass"}),
}
EXISTING = {**SIDES, "zbpipe, fused": Side(zbpipe, {"fused": True})}

STAGES: dict[str, Callable[[], Stage]] = {
    "MLP": mlp,
    "transformer": transformer,
    "transformer, checkpointed": lambda: transformer(checkpointed=True),
    "transformer of width 1,024": lambda: transformer(blocks=2, width=1024, tokens=512),
    "mixture of experts": moe,
    "convolution": convolution,
}

LAYERS, WIDTH, TOKENS = 4, 1024, (64, 256, 1024)


@dataclass
class Bytes:
    """Of one microbatch. Of an unsplit backward ``peak_input`` is the peak, and ``held`` and ``peak_weight`` are None.

    ``computed`` is how often blocks were computed again, over I and W, per block.
    """

    after_forward: int
    peak_input: int
    held: int | None
    peak_weight: int | None
    computed: float


@dataclass
class Times:
    """Medians in ms. An unsplit backward has its time in ``input_pass``."""

    input_pass: float
    weight_pass: float
    total: float


@dataclass
class Result:
    """One stage on one side; without numbers if it raised, and ``error`` says what."""

    bytes: Bytes | None = None
    times: Times | None = None
    error: str = ""


class Microbatch:
    """One microbatch of a stage, pass by pass."""

    def __init__(self, stage: Stage, side: Side) -> None:
        self.stage, self.passes, self.choices = stage, side.passes, side.choices
        self.weights = list(stage.parameters())
        self.x = torch.randn(stage.shape, requires_grad=True)
        self.grad = torch.randn(stage.shape)
        self.groups: Any = None

    def forward(self) -> None:
        self.y = self.stage(self.x)

    def backward(self) -> None:
        """The whole, or I."""
        if self.passes is None:
            torch.autograd.backward([self.y], [self.grad])
        else:
            with zbpipe.policy(**self.choices):
                _, self.groups = self.passes.stage_backward_input([self.y], [self.grad], [self.x], self.weights)

    def send(self) -> None:
        del self.y
        self.x.grad = None

    def weight_pass(self) -> None:
        if self.passes is not None:
            with zbpipe.policy(**self.choices):
                self.passes.stage_backward_weight(self.weights, self.groups)
        self.groups = None


def count(stage: Stage, side: Side) -> Bytes:
    run = Microbatch(copy.deepcopy(stage), side)
    gc.collect()  # torch's groups are cycles: nothing of an earlier run may die in this one
    gc.disable()
    try:
        with zbpipe.memory.record() as rec:
            run.forward()
            after_forward, computed = rec.live, run.stage.computed
            with rec.phase("I"):
                run.backward()
            run.send()
            held = rec.live
            with rec.phase("W"):
                run.weight_pass()
    finally:
        gc.enable()
    first, second = rec.phases
    split = side.passes is not None
    return Bytes(
        after_forward=after_forward,
        peak_input=first.peak,
        held=held if split else None,
        peak_weight=second.peak if split else None,
        computed=(run.stage.computed - computed) / len(stage.blocks),
    )


def clock(stage: Stage, sides: dict[str, Side], repeat: int) -> dict[str, Times]:
    """With gradients that exist: the sides take turns, on one stage each."""
    runs = {name: Microbatch(copy.deepcopy(stage), side) for name, side in sides.items()}
    taken: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for number in range(repeat + 1):
        for side, run in runs.items():
            run.forward()
            start = time.perf_counter()
            run.backward()
            middle = time.perf_counter()
            run.send()
            begin = time.perf_counter()
            run.weight_pass()
            if number:  # the first one warms up
                taken[side].append((middle - start, time.perf_counter() - begin))
    return {
        side: Times(
            input_pass=1e3 * statistics.median(first for first, _ in pairs),
            weight_pass=1e3 * statistics.median(second for _, second in pairs),
            total=1e3 * statistics.median(first + second for first, second in pairs),
        )
        for side, pairs in taken.items()
    }


def measure(make: Callable[[], Stage], sides: dict[str, Side], repeat: int) -> dict[str, Result]:
    torch.manual_seed(0)
    stage = make()
    results = {}
    for name, side in sides.items():
        results[name] = Result()
        try:
            count(stage, side)  # warms up
            results[name].bytes = count(stage, side)
        except RuntimeError as error:
            results[name].error = str(error).splitlines()[0]
    whole = {name: side for name, side in sides.items() if not results[name].error}
    for name, times in clock(stage, whole, repeat).items():
        results[name].times = times
    return results


def plain_products(net: nn.Sequential, inputs: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """What any W has to do, by hand."""
    for layer, x, grad in zip(net, inputs, grads, strict=True):
        layer.weight.grad += grad.t() @ x  # type: ignore[operator]


def time_existing(tokens: int, repeat: int) -> dict[str, float]:
    """Median ms of W on LAYERS matrices of WIDTH x WIDTH whose gradients exist."""
    torch.manual_seed(0)
    nets = {name: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))) for name in EXISTING}
    x, grad = torch.randn(tokens, WIDTH, requires_grad=True), torch.randn(tokens, WIDTH)
    matrices = [[torch.randn(tokens, WIDTH) for _ in range(LAYERS)] for _ in range(2)]
    taken: dict[str, list[float]] = {name: [] for name in EXISTING}
    for number in range(repeat + 1):
        for name, net in nets.items():
            side, groups = EXISTING[name], None
            if side.passes is not None:
                _, groups = side.passes.stage_backward_input([net(x)], [grad], [x], net.parameters())
            elif number == 0:
                net(x).backward(grad)
            with zbpipe.policy(**side.choices):
                start = time.perf_counter()
                if groups is None:
                    plain_products(net, *matrices)
                else:
                    side.passes.stage_backward_weight(net.parameters(), groups)
                if number:
                    taken[name].append(1e3 * (time.perf_counter() - start))
            del groups
    return {"plain mm and add" if name == "unsplit" else name: statistics.median(t) for name, t in taken.items()}


def megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.2f}"


def rows_of(name: str, sides: dict[str, Result]) -> Iterator[list[str]]:
    reference = sides["unsplit"].times
    for side, result in sides.items():
        b, t = result.bytes, result.times
        if b is None or t is None or reference is None:
            yield [name, side, f"raises: {result.error}", *[""] * 7]
            continue
        is_split = side != "unsplit"
        yield [
            name,
            side,
            megabytes(b.after_forward),
            megabytes(b.peak_input),
            megabytes(b.held),
            megabytes(b.peak_weight),
            f"{b.computed:g}",
            f"{t.input_pass / reference.total:.2f}" if is_split else f"{t.total:.1f} ms",
            f"{t.weight_pass / reference.total:.2f}" if is_split else "",
            f"{t.total / reference.total:.2f}" if is_split else "",
        ]


def print_markdown(header: list[str], rows: list[list[str]], left: int) -> None:
    print("| " + " | ".join(header) + " |")
    print("|" + "|".join("---" if i < left else "---:" for i in range(len(header))) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def print_tables(
    results: dict[str, dict[str, Result]],
    policies: dict[str, dict[str, Result]],
    existing: dict[int, dict[str, float]],
) -> None:
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} thread; MB (10^6 bytes)\n")
    header = ["stage", "backward", "after forward", "peak in I", "held", "peak in W", "computed again"]
    header += ["I / unsplit", "W / unsplit", "I + W / unsplit"]
    print_markdown(header, [row for name, sides in results.items() for row in rows_of(name, sides)], 2)
    print("\nPolicies of zbpipe\n")
    header[1] = "policy"
    print_markdown(header, [row for name, sides in policies.items() for row in rows_of(name, sides)], 2)
    print(f"\nW on {LAYERS} matrices of {WIDTH} x {WIDTH} whose gradients exist, ms (ratio to torch)\n")
    names = list(next(iter(existing.values())))
    rows = []
    for tokens, times in existing.items():
        rows.append([str(tokens), *(f"{times[name]:.2f} ({times[name] / times['torch']:.2f}x)" for name in names)])
    print_markdown(["tokens", *names], rows, 0)


def draw(results: dict[str, dict[str, Result]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colours = {"unsplit": "#9aa0a8", "torch": "#c4622d", "zbpipe": "#1f6f8b"}
    panels: list[tuple[str, Callable[[Bytes], int | None]]] = [
        ("After forward", lambda b: b.after_forward),
        ("Peak in I, or of the whole backward", lambda b: b.peak_input),
        ("Held between I and W", lambda b: b.held),
        ("Peak in W", lambda b: b.peak_weight),
    ]
    figure, axes = plt.subplots(1, len(panels), figsize=(16, 4.2), sharey=True, layout="constrained")
    for axis, (title, value) in zip(axes, panels, strict=True):
        for offset, side in zip((-0.27, 0.0, 0.27), SIDES, strict=True):
            counted = [(i, sides[side].bytes) for i, sides in enumerate(results.values())]
            bars = [(i + offset, value(b)) for i, b in counted if b is not None]
            shown = [(i, size / 1e6) for i, size in bars if size is not None]
            if shown:
                drawn = axis.bar(*zip(*shown, strict=True), width=0.25, color=colours[side], label=side)
                axis.bar_label(drawn, fmt="%.0f", fontsize=7, padding=1)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(results)), [name.replace(" ", "\n") for name in results], fontsize=8)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    axes[0].set_ylabel("MB")
    axes[1].legend(frameon=False, fontsize=8)
    figure.suptitle("One microbatch of a stage: memory of the split backward")
    figure.savefig(path, dpi=120)
    print(f"\npicture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES), metavar="STAGE")
    parser.add_argument("--repeat", type=int, default=5, help="timed runs of each side")
    parser.add_argument("--png", type=Path, help="draw the picture to this file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error(f"--repeat is {args.repeat}; expected at least 1 timed run")
    if zbpipe.is_patched():
        parser.error("torch's module is patched, so there is nothing to compare with; unset ZBPIPE_PATCH")
    torch.set_num_threads(1)
    results = {name: measure(STAGES[name], SIDES, args.repeat) for name in args.stages}
    policies = {
        name: measure(STAGES[name], {side: POLICIES[side] for side in sides}, args.repeat)
        for name, sides in (
            ("transformer", ("unsplit", "default", "defer=all", "defer=nothing")),
            ("transformer, checkpointed", ("unsplit", "default", "checkpoint=recompute", "checkpoint=input_pass")),
        )
        if name in args.stages
    }
    existing = {tokens: time_existing(tokens, args.repeat) for tokens in TOKENS}
    print_tables(results, policies, existing)
    if args.png:
        draw(results, args.png)
    if args.json:
        figures, choices = (
            {name: {side: asdict(result) for side, result in sides.items()} for name, sides in table.items()}
            for table in (results, policies)
        )
        everything = {"stages": figures, "policies": choices, "existing_gradients_ms": existing}
        args.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
