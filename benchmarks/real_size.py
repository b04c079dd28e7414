"""I and W at the size of real models: blocks of Llama 3 8B's size in bfloat16, on a GPU.

    python benchmarks/real_size.py --device cuda --json benchmarks/results
    python benchmarks/real_size.py --small                 # tiny blocks on the CPU, to show that it runs
    python benchmarks/real_size.py --device cuda --only dense steps

A run is of four microbatches: all forwards, then all I, then all W, as a rank holds the most. Sides take turns in one
process; figures are medians, ratios those to the unsplit backwards of the same round. Weights have gradients before.
Device times are between events, without a wait in between; host times end with the last launch. The peak is the
allocator's, without what lived before the run. Kernels are those of one more run, forwards included, as the profiler
counts them.

    dense         4 blocks, with 4096, 1024, 512 and 128 tokens a microbatch
    checkpointed  4 checkpointed blocks, zbpipe's three policies
    main_grad     float32 main_grad; "inexact": the largest error of a gradient, relative to its largest element
    steps         whole steps of ZBV, both stages on one rank, 8 microbatches, beside interleaved 1F1B
    experts       4 layers of 8 experts, 2048 x 4096
    compiled, float8, flex   2 blocks by torch.compile and zbpipe.compile: plain, torchao's float8, FlexAttention
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench import llama
from bench.host_time import Experts
from bench.memory import Side, recorded
from bench.results import add_argument, now, spread, write
from bench.stages import Stage
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile

import zbpipe
from zbpipe._formatting import table
from zbpipe._torch.pipelining import BACKWARD

Sides = dict[str, Side]
UNSPLIT, TORCH, ZBPIPE = Side(None, {}), Side(BACKWARD, {}), Side(zbpipe, {})
FUSED = Side(zbpipe, {"fused": True})
MAIN, FUSED_MAIN = Side(zbpipe, {"main_grad": True}), Side(zbpipe, {"main_grad": True, "fused": True})
POLICIES = {name: Side(zbpipe, {"checkpoint": name}) for name in ("keep", "recompute", "input_pass")}
INTERLEAVED, ZBV = "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"


class Scale(NamedTuple):
    """What a machine is given to do. ``tokens``: of a microbatch, the largest first."""

    device: str
    dtype: torch.dtype
    sizes: llama.Sizes
    blocks: int
    tokens: tuple[int, ...]
    experts: tuple[int, int, int]  # experts, width, rows of each
    backend: str
    repeat: int
    microbatches: int = 4

    def stage(self, blocks: int | None = None, **given: Any) -> Stage:
        return llama.stage(blocks or self.blocks, self.sizes, self.tokens[0], self.device, self.dtype, **given)


def scale_of(device: str, is_small: bool, repeat: int | None) -> Scale:
    if is_small:
        return Scale("cpu", torch.float32, llama.TINY, 2, (32, 16), (2, 16, 8), "aot_eager", repeat or 1)
    tokens = (4096, 1024, 512, 128)
    return Scale(device, torch.bfloat16, llama.LLAMA_3_8B, 4, tokens, (8, 2048, 512), "inductor", repeat or 5)


class Marks:
    """Moments of the host, and the same on the device's stream."""

    def __init__(self, device: str) -> None:
        self.is_host = device == "cpu"
        self.moments: list[tuple[float, Any]] = []

    def mark(self) -> None:
        event = None if self.is_host else torch.cuda.Event(enable_timing=True)
        if event is not None:
            event.record()
        self.moments.append((time.perf_counter(), event))

    def ms(self, place: int) -> tuple[float, float]:
        """Milliseconds of the device and of the host from one mark to the next, once the device is done."""
        (begin, first), (end, second) = self.moments[place : place + 2]
        host = 1e3 * (end - begin)
        return (host if self.is_host else first.elapsed_time(second)), host


class Run(NamedTuple):
    """Milliseconds, and bytes beyond those that lived before. An unsplit backward has its time in ``input``."""

    forward: float
    input: float
    weight: float
    host_input: float
    host_weight: float
    held: int
    peak: int

    @property
    def total(self) -> float:
        return self.input + self.weight


class Work:
    """A module's microbatches."""

    def __init__(self, scale: Scale, module: nn.Module, shape: tuple[int, ...]) -> None:
        self.scale, self.module = scale, module
        self.weights = list(module.parameters())
        kind = {"device": scale.device, "dtype": scale.dtype}
        self.inputs = [torch.randn(shape, requires_grad=True, **kind) for _ in range(scale.microbatches)]
        self.grad = torch.randn(shape, **kind) / 100
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)

    def gradients(self, side: Side) -> list[torch.Tensor]:
        place = "main_grad" if "main_grad" in side.choices else "grad"
        return [getattr(weight, place) for weight in self.weights]

    def run(self, side: Side) -> Run:
        passes, device = side.made(self.module), self.scale.device
        for grad in self.gradients(side):
            grad.zero_()
        gc.collect()
        now(device)
        marks, waiting = Marks(device), []
        with recorded(device) as rec, zbpipe.policy(**side.choices):
            marks.mark()
            outs = [self.module(x) for x in self.inputs]
            marks.mark()
            now(device)  # so that the host's time of I begins with an empty queue
            marks.mark()
            for x in self.inputs:
                out = outs.pop(0)
                if passes is None:
                    torch.autograd.backward([out], [self.grad])
                else:
                    weights = None if passes is zbpipe else iter(self.weights)
                    waiting.append(passes.stage_backward_input([out], [self.grad], [x], weights)[1])
                del out
                x.grad = None  # as a pipeline sends it
            marks.mark()
            held = rec.live
            while waiting:
                weights = None if passes is zbpipe else iter(self.weights)
                passes.stage_backward_weight(weights, waiting.pop(0))
            marks.mark()
            now(device)
            peak = rec.peak
        (forward, _), (first, host), (second, host_after) = (marks.ms(place) for place in (0, 2, 3))
        return Run(forward, first, second, host, host_after, held, peak)

    def kernels(self, side: Side) -> int | None:
        if self.scale.device == "cpu":
            return None
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            self.run(side)
        return sum(
            event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
            for event in prof.events()
        )

    def compare(self, sides: Sides) -> dict[str, Any]:
        """Each side's figures, the first one's being the reference. A side that raises has its message."""
        runs: dict[str, list[Run]] = {name: [] for name in sides}
        found: dict[str, dict[str, Any]] = {name: {} for name in sides}
        reference: list[torch.Tensor] = []
        for number in range(self.scale.repeat + 1):
            for name, side in sides.items():
                if "error" in found[name]:
                    continue
                try:
                    run = self.run(side)
                    if number:
                        runs[name].append(run)
                        continue
                    found[name]["kernels"] = self.kernels(side)  # warms up, too
                except Exception as error:
                    found[name]["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                    continue
                gradients = [grad.float() for grad in self.gradients(side)]
                reference = reference or [grad.clone() for grad in gradients]
                found[name]["differs"] = max(map(difference, gradients, reference))
        unsplit = next(iter(runs.values()))
        for name, of in runs.items():
            if "error" not in found[name]:
                found[name] |= summary(of, unsplit)
        return found


def difference(grad: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error of an element, relative to the largest element."""
    return ((grad - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()


def summary(runs: list[Run], unsplit: list[Run]) -> dict[str, Any]:
    pairs = list(zip(runs, unsplit, strict=True))
    return {
        "ms": {key: spread(getattr(run, key) for run in runs) for key in Run._fields[:5]},
        "ratio": spread(run.total / other.total for run, other in pairs),
        "I": spread(run.input / other.total for run, other in pairs),
        "W": spread(run.weight / other.total for run, other in pairs),
        "held": max(run.held for run in runs),
        "peak": max(run.peak for run in runs),
        "peak_ratio": max(run.peak for run in runs) / max(run.peak for run in unsplit),
    }


# What is measured: each yields (case, figures).


class NotRun(Exception):
    """Why a kind was not measured here."""


Cases = Iterator[tuple[str, dict[str, Any]]]


def shape(scale: Scale, tokens: int | None = None) -> tuple[int, ...]:
    return (1, tokens or scale.tokens[0], scale.sizes.width)


def dense(scale: Scale) -> Cases:
    module, sides = scale.stage(), {"unsplit": UNSPLIT, "torch": TORCH, "zbpipe": ZBPIPE, "zbpipe, fused": FUSED}
    for tokens in scale.tokens:
        yield f"{tokens} tokens", Work(scale, module, shape(scale, tokens)).compare(sides)


def checkpointed(scale: Scale) -> Cases:
    work = Work(scale, scale.stage(checkpointed=True), shape(scale))
    yield f"{scale.tokens[0]} tokens", work.compare({"unsplit": UNSPLIT, "torch": TORCH, **POLICIES})


def main_grad(scale: Scale) -> Cases:
    """The last product's gradient is compared with the one that float64 gives."""
    module = scale.stage()
    for weight in module.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    work, last = Work(scale, module, shape(scale)), module.blocks[-1].down
    seen: list[torch.Tensor] = []
    handle = last.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().flatten(0, 1)))
    with torch.no_grad():
        for x in work.inputs:
            module(x)
    handle.remove()
    rows = work.grad.flatten(0, 1).double().t()  # of each microbatch's output, and so of the last product
    exact = sum((rows @ x.double() for x in seen), torch.zeros(()))
    sides = {"unsplit": UNSPLIT, "zbpipe": MAIN, "zbpipe, fused": FUSED_MAIN}
    found = work.compare(sides)
    for name, side in sides.items():
        work.run(side)
        grad = dict(zip(work.weights, work.gradients(side), strict=True))[last.weight]
        found[name]["inexact"] = difference(grad.double(), exact)
    yield f"{scale.tokens[0]} tokens", found


def experts(scale: Scale) -> Cases:
    count, width, rows = scale.experts
    module = nn.Sequential(*(Experts(scale.dtype, count, width, rows) for _ in range(scale.blocks))).to(scale.device)
    sides = {"unsplit": UNSPLIT, "torch": TORCH, "zbpipe": ZBPIPE}
    yield f"{count} experts", Work(scale, module, (count * rows, width)).compare(sides)


def by_compilers(scale: Scale, make: Callable[[], Stage]) -> Cases:
    compilers: dict[str, Any] = {"torch.compile": torch.compile, "zbpipe.compile": zbpipe.compile}
    for name, compiler in compilers.items():
        torch._dynamo.reset()
        module = make()
        module.blocks = nn.ModuleList(compiler(block, backend=scale.backend) for block in module.blocks)
        sides = {"unsplit": UNSPLIT, "torch": TORCH, "zbpipe": ZBPIPE}
        yield name, Work(scale, module, shape(scale)).compare(sides)


def compiled(scale: Scale) -> Cases:
    yield from by_compilers(scale, lambda: scale.stage(2))


def float8(scale: Scale) -> Cases:
    if importlib.util.find_spec("torchao") is None:
        raise NotRun("torchao is not installed")
    layers = importlib.import_module("torchao.float8")
    config = layers.Float8LinearConfig(emulate=scale.device == "cpu")

    def make() -> Stage:
        converted: Stage = layers.convert_to_float8_training(scale.stage(2), config=config)
        return converted

    yield "eager", Work(scale, make(), shape(scale)).compare({"unsplit": UNSPLIT, "zbpipe": ZBPIPE})
    yield from by_compilers(scale, make)


def flex(scale: Scale) -> Cases:
    if scale.device == "cpu":
        raise NotRun("FlexAttention has no backward on a CPU")
    attention = importlib.import_module("torch.nn.attention.flex_attention")
    mask = attention.create_block_mask(
        lambda batch, head, q, k: q >= k, None, None, scale.tokens[0], scale.tokens[0], device=scale.device
    )

    class Block(llama.Block):
        def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = attention.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
            return out

    yield from by_compilers(scale, lambda: scale.stage(2, kind=Block))


class Step:
    """A schedule on its own two stages, run on torch's module (None), or under the patch with a policy."""

    def __init__(self, scale: Scale, schedule: str, policy: str | None, checkpointed: bool) -> None:
        self.device, self.policy, count = scale.device, policy, 2 * scale.microbatches
        self.modules = [scale.stage(scale.blocks // 2, checkpointed=checkpointed) for _ in range(2)]
        self.stages = [PipelineStage(part, i, 2, torch.device(scale.device)) for i, part in enumerate(self.modules)]
        kind: Any = getattr(schedules, schedule)
        self.schedule = kind(self.stages, count, loss_fn=nn.functional.mse_loss, scale_grads=False)
        self.x = torch.ones(count, *shape(scale)[1:], device=scale.device, dtype=scale.dtype)
        self.taken: list[tuple[float, int]] = []  # milliseconds and peak bytes of each step
        for weight in self.weights():
            weight.grad = torch.zeros_like(weight)

    def weights(self) -> Iterator[nn.Parameter]:
        return (weight for module in self.modules for weight in module.parameters())

    def step(self) -> None:
        for weight in self.weights():
            weight.grad.zero_()
        for stage in self.stages:
            stage.clear_runtime_states()
        gc.collect()
        with contextlib.ExitStack() as stack:
            if self.policy is not None:
                stack.enter_context(zbpipe.patch())
                stack.enter_context(zbpipe.policy(checkpoint=self.policy))  # type: ignore[arg-type]
            recording = stack.enter_context(recorded(self.device))
            begin = now(self.device)
            self.schedule.step(self.x, target=self.x)
            self.taken.append((1e3 * (now(self.device) - begin), recording.peak))

    def figures(self, base: Step) -> dict[str, Any]:
        """Beside those of another schedule. The first step warms up."""
        pairs = list(zip(self.taken, base.taken, strict=True))[1:]
        peak, of_base = (max(peak for _, peak in side.taken[1:]) for side in (self, base))
        return {
            "step_ms": spread(ms for (ms, _), _ in pairs),
            "ratio": spread(ms / other for (ms, _), (other, _) in pairs),
            "peak": peak,
            "peak_ratio": peak / of_base,
        }


def steps(scale: Scale) -> Cases:
    if not dist.is_initialized():
        is_cpu = scale.device == "cpu"
        device = None if is_cpu else torch.device("cuda", torch.cuda.current_device())
        backend = "gloo" if is_cpu else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    for is_checkpointed in (False, True):
        kinds: dict[str, tuple[str, str | None]] = {
            "interleaved 1F1B": (INTERLEAVED, None),
            "ZBV, torch": (ZBV, None),
            "ZBV, keep": (ZBV, "keep"),
        }
        if is_checkpointed:
            kinds |= {f"ZBV, {policy}": (ZBV, policy) for policy in ("recompute", "input_pass")}
        sides = {name: Step(scale, *kind, is_checkpointed) for name, kind in kinds.items()}
        for _ in range(scale.repeat + 1):
            for side in sides.values():
                side.step()
        found = {name: side.figures(sides["interleaved 1F1B"]) for name, side in sides.items()}
        yield "checkpointed" if is_checkpointed else "plain", found


KINDS: dict[str, Callable[[Scale], Cases]] = {
    of.__name__: of for of in (dense, checkpointed, main_grad, steps, experts, compiled, float8, flex)
}


# What is printed.


def printed(kind: str, case: str, sides: dict[str, dict[str, Any]]) -> str:
    title = f"\n{kind}, {case}"
    if kind == "steps":
        rows = [
            [name, f"{of['step_ms'].median:.1f}", f"{of['ratio'].median:.2f}x", *peak_of(of)]
            for name, of in sides.items()
        ]
        return f"{title}\n{table(['', 'step, ms', '', 'peak, MB', ''], rows)}"
    header = [
        "",
        "I + W, ms",
        "",
        "I",
        "W",
        "host, ms",
        "peak, MB",
        "",
        "held",
        "kernels",
        "inexact" if kind == "main_grad" else "differs",
    ]
    rows = []
    for name, of in sides.items():
        if "error" in of:
            rows.append([f"{name} raises", *[""] * (len(header) - 1)])
            continue
        ms = {key: f"{value.median:.2f}" for key, value in of["ms"].items()}
        rows.append(
            [
                name,
                f"{ms['input']} + {ms['weight']}",
                f"{of['ratio'].median:.2f}x",
                f"{of['I'].median:.2f}x",
                f"{of['W'].median:.2f}x",
                f"{ms['host_input']} + {ms['host_weight']}",
                *peak_of(of),
                f"{of['held'] / 1e6:.1f}",
                "" if of["kernels"] is None else str(of["kernels"]),
                f"{of.get('inexact', of['differs']):.0e}",
            ]
        )
    return f"{title}\n{table(header, rows)}"


def peak_of(figures: dict[str, Any]) -> tuple[str, str]:
    return f"{figures['peak'] / 1e6:.1f}", f"{figures['peak_ratio']:.2f}x"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu: as --small")
    parser.add_argument("--small", action="store_true", help="tiny blocks on the CPU")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="(all)")
    parser.add_argument("--repeat", type=int, help="runs of each side (5; small: 1)")
    add_argument(parser)
    given = parser.parse_args(arguments)
    scale = scale_of(given.device, given.small or given.device == "cpu", given.repeat)
    if scale.device != "cpu":
        torch.cuda.set_device(scale.device if ":" in scale.device else 0)
    print(f"torch {torch.__version__}, {scale.device}, {scale.sizes}")
    figures: dict[str, Any] = {}
    failed: list[str] = []  # the others go on
    for kind in given.only:
        try:
            for case, sides in KINDS[kind](scale):
                print(printed(kind, case, sides), flush=True)
                figures.setdefault(kind, {})[case] = sides
                write(given.json, "real_size", figures, scale.device)  # each time: a run may be cut off
        except NotRun as why:
            print(f"\n{kind}: not run: {why}")
        except Exception as error:
            failed.append(kind)
            print(f"\n{kind}: {type(error).__name__}: {error}")
        gc.collect()
        if scale.device != "cpu":
            torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
