"""Memory and time of the split backward: torch's own module and layers with a store (store.py) beside zbpipe.

An unsplit backward is the reference. Four kinds of stages, float32. Bytes are exact: by zbpipe.memory.record on the
CPU, by torch's counters on a GPU. They count from before the forward, without the weights and the stage's input. Each
measured step has its own stage, whose gradients are None. Tensors that a pipeline would send (the output, the input's
gradient) are dropped before "held" is read. Times are medians of runs that take turns; ratios are to the unsplit
backward's median, or to torch's W.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

import zbpipe
from bench.results import Spread, now, spread
from bench.stages import Stage, convolution, mlp, moe, transformer
from bench.store import Store
from zbpipe._torch.pipelining import BACKWARD


class Side(NamedTuple):
    """The module that runs the backward, and its policy.

    ``passes``: zbpipe; the name of a module, which is slow to import; Store for a new store per stage; None for an
    unsplit backward.
    """

    passes: Any
    choices: dict[str, Any]

    def made(self, module: nn.Module) -> Any:
        """The passes for a module. A store changes the module."""
        if isinstance(self.passes, str):
            return importlib.import_module(self.passes)
        if self.passes is not Store:
            return self.passes
        store = Store()
        store.prepare(module)
        return store


SIDES = {
    "unsplit": Side(None, {}),
    "torch": Side(BACKWARD, {}),
    "store": Side(Store, {}),
    "zbpipe": Side(zbpipe, {}),
}
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

POLICIES_OF = {
    "transformer": ("unsplit", "default", "defer=all", "defer=nothing"),
    "transformer, checkpointed": ("unsplit", "default", "checkpoint=recompute", "checkpoint=input_pass"),
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
    """Milliseconds. An unsplit backward has its time in ``input_pass``."""

    input_pass: Spread
    weight_pass: Spread
    total: Spread


@dataclass
class Result:
    """One stage on one side. If it raised, it has no numbers, and ``error`` has the message."""

    bytes: Bytes | None = None
    times: Times | None = None
    error: str = ""


class Microbatch:
    """One microbatch of a stage, pass by pass."""

    def __init__(self, stage: Stage, side: Side, device: str = "cpu") -> None:
        self.stage, self.passes, self.choices = stage, side.made(stage), side.choices
        self.weights = list(stage.parameters())
        self.x = torch.randn(stage.shape, requires_grad=True, device=device)
        self.grad = torch.randn(stage.shape, device=device)
        self.groups: Any = None

    def forward(self) -> None:
        self.y = self.stage(self.x)

    def backward(self) -> None:
        """The whole backward, or I."""
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


class Phase(NamedTuple):
    peak: int


class GPUMemory:
    """The parts of zbpipe.memory.record() that are needed here, by torch's counters for a GPU."""

    def __enter__(self) -> GPUMemory:
        self.phases: list[Phase] = []
        self.before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def peak(self) -> int:
        """Since the recording or its last phase began."""
        return torch.cuda.max_memory_allocated() - self.before

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated() - self.before

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats()
        yield
        self.phases.append(Phase(self.peak))


def recorded(device: str) -> Any:
    """A context that counts the allocator's bytes, exactly."""
    return zbpipe.memory.record(max_events=0) if device == "cpu" else GPUMemory()


def count(stage: Stage, side: Side, device: str = "cpu") -> Bytes:
    run = Microbatch(copy.deepcopy(stage), side, device)
    gc.collect()  # torch's groups are cycles: those of an earlier run must not be freed in this one
    gc.disable()
    try:
        with recorded(device) as rec:
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


def clock(stage: Stage, sides: dict[str, Side], repeat: int, device: str = "cpu") -> dict[str, Times]:
    """Times with existing gradients. The sides take turns, on one stage each."""
    runs = {name: Microbatch(copy.deepcopy(stage), side, device) for name, side in sides.items()}
    taken: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for number in range(repeat + 1):
        for side, run in runs.items():
            run.forward()
            start = now(device)
            run.backward()
            middle = now(device)
            run.send()
            begin = now(device)
            run.weight_pass()
            if number:  # the first one warms up
                taken[side].append((middle - start, now(device) - begin))
    return {
        side: Times(
            input_pass=spread(1e3 * first for first, _ in pairs),
            weight_pass=spread(1e3 * second for _, second in pairs),
            total=spread(1e3 * (first + second) for first, second in pairs),
        )
        for side, pairs in taken.items()
    }


def measure(make: Callable[[], Stage], sides: dict[str, Side], repeat: int, device: str = "cpu") -> dict[str, Result]:
    torch.manual_seed(0)
    stage = make().to(device)
    results = {}
    for name, side in sides.items():
        results[name] = Result()
        try:
            count(stage, side, device)  # warms up
            results[name].bytes = count(stage, side, device)
        except RuntimeError as error:
            results[name].error = str(error).splitlines()[0]
    whole = {name: side for name, side in sides.items() if not results[name].error}
    for name, times in clock(stage, whole, repeat, device).items():
        results[name].times = times
    return results


def plain_products(net: nn.Sequential, inputs: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """The products of any W, by hand."""
    for layer, x, grad in zip(net, inputs, grads, strict=True):
        layer.weight.grad += grad.t() @ x  # type: ignore[operator]


def time_existing(tokens: int, repeat: int, device: str = "cpu") -> dict[str, Spread]:
    """Milliseconds of W on LAYERS matrices of WIDTH x WIDTH whose gradients exist."""
    torch.manual_seed(0)
    nets = {
        name: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(LAYERS)))
        for name in EXISTING
    }
    x, grad = torch.randn(tokens, WIDTH, requires_grad=True, device=device), torch.randn(tokens, WIDTH, device=device)
    matrices = [[torch.randn(tokens, WIDTH, device=device) for _ in range(LAYERS)] for _ in range(2)]
    passes = {name: side.made(nets[name]) for name, side in EXISTING.items()}
    taken: dict[str, list[float]] = {name: [] for name in EXISTING}
    for number in range(repeat + 1):
        for name, net in nets.items():
            side, groups = EXISTING[name], None
            if passes[name] is not None:
                _, groups = passes[name].stage_backward_input([net(x)], [grad], [x], net.parameters())
            elif number == 0:
                net(x).backward(grad)
            with zbpipe.policy(**side.choices):
                start = now(device)
                if groups is None:
                    plain_products(net, *matrices)
                else:
                    passes[name].stage_backward_weight(net.parameters(), groups)
                if number:
                    taken[name].append(1e3 * (now(device) - start))
            del groups
    return {"plain mm and add" if name == "unsplit" else name: spread(t) for name, t in taken.items()}
