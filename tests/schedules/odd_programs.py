"""Random pipelines: odd stages under random schedules, run by torch's own runtime in one process.

A `Program` is what hypothesis prints: paste it into `judge` to see it again.
"""

import contextlib
import csv
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.utils.checkpoint import checkpoint

import zbpipe

ROWS, WIDTH, STEPS = 2, 3, 2
f64 = torch.float64


def linear():
    return nn.Linear(WIDTH, WIDTH, dtype=f64)


def vector():
    return nn.Parameter(torch.randn(WIDTH, dtype=f64))


class Scale(torch.autograd.Function):
    """A backward in Python with a weight, which cannot be split."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


# Stages: each takes a tensor of ROWS x WIDTH and what else the stage before returned; its class's name is its kind.


class Stage(nn.Module):
    def forward(self, x, *others):
        for other in others:
            x = x + other.to(f64).mean()
        return self.body(x)


class Plain(Stage):
    def __init__(self):
        super().__init__()
        self.layer = linear()

    def body(self, x):
        return self.layer(x).tanh()


class Residual(Plain):
    def body(self, x):
        return x + self.layer(x).tanh()


class Frozen(Plain):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class PartlyFrozen(Stage):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear().requires_grad_(False), linear()

    def body(self, x):
        return self.second(self.first(x).tanh())


class FrozenBehind(PartlyFrozen):
    def body(self, x):
        return self.first(self.second(x).tanh())


class WithoutParameters(Stage):
    def body(self, x):
        return (x * 2).sin()


class PassThrough(nn.Module):
    def forward(self, x, *others):
        return (x, *others) if others else x


class UnusedParameter(Plain):
    def __init__(self):
        super().__init__()
        self.unused = vector()


class ViewOutput(Plain):
    def body(self, x):
        return self.layer(x).tanh().T.contiguous().T[:, :]


class SliceOutput(Stage):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH, dtype=f64)

    def body(self, x):
        return self.layer(x)[:, ::2]


class InPlace(Plain):
    def body(self, x):
        return self.layer(x).mul_(2).tanh_()


class InPlaceOnView(Plain):
    def body(self, x):
        h = self.layer(x).sin()
        h[0].mul_(2)
        return h


class IntegerOutput(Plain):
    def body(self, x):
        h = self.layer(x).sin()
        return h, h.detach().argmax(-1)


class SeveralOutputs(Stage):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def body(self, x):
        h = self.first(x).tanh()
        return h, self.second(h), self.second(x)


class SameOutputTwice(Plain):
    def body(self, x):
        h = self.layer(x).sin()
        return h, h


class InputBesideOutput(Plain):
    def body(self, x):
        return self.layer(x).sin(), x.cos()


class WeightAsOutput(Plain):
    def __init__(self):
        super().__init__()
        self.prompt = vector()

    def body(self, x):
        return self.layer(x).sin(), self.prompt


class OutputOfWeightsAlone(Plain):
    def __init__(self):
        super().__init__()
        self.prompt = vector()

    def body(self, x):
        return self.layer(x).sin(), (self.prompt * self.prompt).exp().sum()


class IgnoresItsInput(Stage):
    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(ROWS, WIDTH, dtype=f64))

    def body(self, x):
        return self.prompt.sin()


class DetachedOutput(Plain):
    def body(self, x):
        h = self.layer(x).sin()
        return h, h.detach().cos()


class StopsTheGradient(Plain):
    def body(self, x):
        return self.layer(x.detach()).tanh()


class SumOfWeights(Stage):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=f64)) for _ in range(2))

    def body(self, x):
        return (x @ (self.a + self.b)).sin()


class LowRank(Stage):
    def __init__(self):
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.a, self.b = (nn.Parameter(torch.randn(s, dtype=f64)) for s in ((WIDTH, 1), (1, WIDTH)))

    def body(self, x):
        return nn.functional.linear(x, self.base.weight + self.a @ self.b, self.base.bias).sin()


class TwiceTheSame(Plain):
    def body(self, x):
        return self.layer(self.layer(x).tanh())


class Normed(Stage):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH, dtype=f64), linear()

    def body(self, x):
        return self.layer(self.norm(x))


class PythonFunction(Stage):
    def __init__(self):
        super().__init__()
        self.scale, self.layer = vector(), linear()

    def body(self, x):
        return Scale.apply(self.layer(x).tanh(), self.scale)


class Checkpointed(Plain):
    def body(self, x):
        return checkpoint(lambda x: self.layer(self.layer(x).tanh()), x, use_reentrant=False)


class ReentrantlyCheckpointed(Plain):
    def body(self, x):
        if not x.requires_grad:
            return self.layer(x).tanh()  # a reentrant checkpoint of such an input has no gradient at all
        return checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=True)


class Hooked(Plain):
    def body(self, x):
        h = self.layer(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 2)
        return h.tanh()


class Shared(Plain):
    """All stages of this kind in a program have one layer."""


KINDS = {kind.__name__: kind for kind in (
    Plain, Residual, Frozen, PartlyFrozen, FrozenBehind, WithoutParameters, PassThrough, UnusedParameter, ViewOutput,
    SliceOutput, InPlace, InPlaceOnView, IntegerOutput, SeveralOutputs, SameOutputTwice, InputBesideOutput,
    WeightAsOutput, OutputOfWeightsAlone, IgnoresItsInput, DetachedOutput, StopsTheGradient, SumOfWeights, LowRank,
    TwiceTheSame, Normed, PythonFunction, Checkpointed, ReentrantlyCheckpointed, Hooked, Shared,
)}  # fmt: skip


# Losses of one microbatch; the last stage may have several outputs.


def squared(out, others, target):
    return nn.functional.mse_loss(out + sum(o.to(f64).mean() for o in others), target, reduction="sum")


def first_output_alone(out, others, target):
    return (out - target).square().sum()


def of_itself(out, others, target):
    return (out * out.detach()).sum() + sum((o.to(f64) * 2).sum() for o in others)


def self_distilled(out, others, target):
    return nn.functional.mse_loss(out.tanh(), (out.detach() + target).sin())


LOSSES = {f.__name__: f for f in (squared, first_output_alone, of_itself, self_distilled)}


@dataclass(frozen=True)
class Program:
    """
    stages: kinds, from the first to the last.
    order: the actions of the one rank, as in torch's compute-only CSV: stage, F, I, W or B, microbatch.
    microbatches: how many.
    constant: microbatches whose loss is constant, in the second step.
    """

    stages: tuple[str, ...]
    order: str
    microbatches: int
    loss: str = "squared"
    constant: tuple[int, ...] = ()
    release_outputs: bool = False
    policy: tuple[tuple[str, object], ...] = ()


@st.composite
def orders(draw, stages, microbatches):
    """A valid order: the first of what is ready is what an unpipelined backward would do next."""
    whole = {(s, m): draw(st.integers(0, 3)) == 3 for s in range(stages) for m in range(microbatches)}
    done, order = set(), []

    def ready():
        for m in range(microbatches):
            for s in reversed(range(stages)):
                if ("W", s, m) not in done and ("I", s, m) in done:
                    yield "W", s, m
                back = "B" if whole[s, m] else "I"
                after = {(b, s + 1, m) for b in "BI"} if s + 1 < stages else set()
                if (back, s, m) not in done and ("F", s, m) in done and (not after or after & done):
                    yield back, s, m
                # torch's runtime finds a loss by counting the last stage's forwards: they go microbatch by microbatch.
                if ("F", s, m) not in done and all(
                    earlier in done for earlier in (("F", s - 1, m), ("F", s, m - 1)) if min(earlier[1:]) >= 0
                ):
                    yield "F", s, m

    while candidates := list(ready()):
        action = candidates[draw(st.integers(0, len(candidates) - 1))]
        done.add(action)
        order.append("{1}{0}{2}".format(*action))
    return " ".join(order)


@st.composite
def programs(draw, most_stages=3, most_microbatches=3):
    stages = tuple(draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=most_stages)))
    microbatches = draw(st.integers(1, most_microbatches))
    return Program(
        stages,
        draw(orders(len(stages), microbatches)),
        microbatches,
        draw(st.sampled_from(list(LOSSES))),
        tuple(draw(st.sets(st.integers(0, microbatches - 1), max_size=microbatches).map(sorted))),
        draw(st.booleans()),
        draw(st.sampled_from([(), (("defer", "all"),), (("defer", "nothing"),), (("checkpoint", "recompute"),)])),
    )


# Running one.


def build(program):
    torch.manual_seed(0)
    shared, modules = linear(), []
    for kind in program.stages:
        module = KINDS[kind]()
        if kind == "Shared":
            module.layer = shared
        modules.append(module)
    return modules


def batch(program, step):
    torch.manual_seed(10 + step)
    x, target = torch.randn(2, ROWS * program.microbatches, WIDTH, dtype=f64)
    for m in program.constant if step else ():
        target.chunk(program.microbatches)[m].fill_(torch.nan)
    return x, target


def loss_of(program):
    def loss(out, target):
        out, others = (out[0], out[1:]) if isinstance(out, (tuple, list)) else (out, ())
        if target.isnan().any():
            return torch.zeros((), dtype=f64)
        return LOSSES[program.loss](out, others, target)

    return loss


def grads(modules):
    return {
        f"{i}.{name}": None if w.grad is None else w.grad.clone()
        for i, module in enumerate(modules)
        for name, w in module.named_parameters()
    }


def oracle(program):
    """Gradients after each step of the whole model in one piece; None where it has no backward at all."""
    modules, loss_function, steps = build(program), loss_of(program), []
    for step in range(STEPS):
        x, target = batch(program, step)
        for part, goal in zip(x.chunk(program.microbatches), target.chunk(program.microbatches), strict=True):
            given = (part,)
            for module in modules:
                out = module(*given)
                given = out if isinstance(out, tuple) else (out,)
            loss = loss_function(out, goal)
            if loss.requires_grad:
                loss.backward()
        steps.append(grads(modules))
    return steps


def pipelined(program, folder):
    """Gradients after each step, as torch's runtime computes them with what is patched now."""
    modules = build(program)
    stages = [PipelineStage(m, i, len(modules), torch.device("cpu")) for i, m in enumerate(modules)]
    runtime = _PipelineScheduleRuntime(stages, program.microbatches, loss_fn=loss_of(program), scale_grads=False)
    path = Path(folder) / "order.csv"
    with open(path, "w", newline="") as file:
        csv.writer(file).writerow(program.order.split())
    runtime._load_csv(str(path), format="compute_only")
    steps = []
    for step in range(STEPS):
        x, target = batch(program, step)
        runtime.step(x, target=target, return_outputs=False)
        steps.append(grads(modules))
    return steps


def outcome(program, wanted, folder, module):
    """("right", ""), ("wrong", what differs) or ("raises", the error's type and first line)."""
    patched = zbpipe.patch(release_outputs=program.release_outputs) if module == "zbpipe" else contextlib.nullcontext()
    try:
        with patched, zbpipe.policy(**dict(program.policy)):
            got = pipelined(program, folder)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return "raises", f"{type(error).__name__}: {error}"
    for step, (mine, whole) in enumerate(zip(got, wanted, strict=True)):
        for name, grad in whole.items():
            there = mine[name]
            if there is None and grad is None:
                continue
            # A pipeline gives zeros where nothing was learnt from any microbatch.
            zero = torch.zeros_like(there if grad is None else grad)
            a, b = zero if there is None else there, zero if grad is None else grad
            if not torch.allclose(a, b, rtol=1e-9, atol=1e-11):
                return "wrong", f"step {step}, {name}: {a.flatten().tolist()}, and in one piece {b.flatten().tolist()}"
    return "right", ""


def judge(program):
    """What torch's own module and zbpipe make of it, each as `outcome`; None where autograd itself refuses the model."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            wanted = oracle(program)
        except RuntimeError:
            return None
        return {module: outcome(program, wanted, folder, module) for module in ("torch", "zbpipe")}
