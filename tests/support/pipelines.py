"""Pipelines over the ranks of a job, and the same models without a pipeline.

    python pipelines.py RANK WORLD FOLDER MODULE LANE

A test module has CASES, by name. The ranks are started once for all cases of a lane; what a case returns on a rank goes to
FOLDER/NAME.RANK, its error to FOLDER/NAME.RANK.failed. The module may have IMPORTS, of what is imported before the ranks'
processes fork, and a function `join` for another group than gloo's.
"""

import contextlib
import functools
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from support import blocks
from support.blocks import SCHEDULES, ZERO_BUBBLE
from support.processes import TESTS, results, run_ranks
from support.ranks import UNDER_TEST, join, on

# What is trained.


class OneAfterAnother(nn.Sequential):
    """Modules of which each may return several values for the next."""

    def forward(self, x):
        for module in self:
            x = module(*x) if isinstance(x, tuple) else module(x)
        return x


@dataclass(frozen=True)
class Model:
    """
    make: from the number of stages to their modules, with the same weights in every process; or (whole model, modules).
    batch: from a step's number to inputs and targets.
    optimizer: from weights to one. Without it, the steps' gradients are summed.
    """

    make: Callable = blocks.blocks
    loss: Callable = blocks.loss_function
    batch: Callable = blocks.batch
    optimizer: Callable | None = None
    steps: int = 2
    microbatches: int = blocks.MICROBATCHES

    def build(self, count):
        """The whole model, and its stages' modules."""
        made = self.make(count)
        return made if isinstance(made, tuple) else (OneAfterAnother(*made), made)


def sgd(weights):
    return torch.optim.SGD(weights, 1e-2, momentum=0.9)


def named(parts):
    return {f"{i}.{name}": weight for i, part in parts.items() for name, weight in part.named_parameters()}


def copied(value):
    return value.detach().clone().cpu() if isinstance(value, torch.Tensor) else value


def train(model, parts, step_once, copied=copied):
    """What the steps leave, by step, kind and name: losses, gradients and, with an optimizer, weights and buffers at the end.

    parts: the modules that are looked at, by their place in the model. copied: what is kept of a value.
    """
    weights, seen = named(parts), {}
    trained = [*{id(w): w for w in weights.values() if w.requires_grad}.values()]
    optimizer = model.optimizer(trained) if model.optimizer and trained else None
    for step in range(model.steps):
        losses = step_once(*model.batch(step))
        seen |= {(step, "loss", k): copied(loss) for k, loss in enumerate(losses)}
        seen |= {(step, "grad", name): copied(w.grad) for name, w in weights.items()}
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
    if model.optimizer:
        buffers = {f"{i}.{name}": value for i, part in parts.items() for name, value in part.named_buffers()}
        seen |= {(model.steps, "value", name): copied(value) for name, value in {**weights, **buffers}.items()}
    return seen


def backwards(whole, model, x, target):
    """A step without a pipeline, microbatch by microbatch: the losses."""
    losses = []
    for value, goal in zip(x.chunk(model.microbatches), target.chunk(model.microbatches), strict=True):
        losses.append(model.loss(whole(value), goal))
        if losses[-1].requires_grad:
            losses[-1].backward()
    return losses


@functools.cache
def unpipelined(model, count=4):
    whole, parts = model.build(count)
    return train(model, dict(enumerate(parts)), functools.partial(backwards, whole, model))


# How it is pipelined.


def places(schedule, count, group=None):
    """This rank's stages."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if world == 1:
        return [*range(count)]
    return blocks.stages_of(rank, world, count // world, SCHEDULES[schedule][1])


class Pipeline:
    """This rank's stages of a model, under one of torch's schedules.

    wrap: from a stage's module to what the stage runs.
    given: from a stage's number to further arguments of the stage.
    """

    def __init__(self, schedule, parts, wrap=lambda part: part, given=lambda i: {}, device=None, group=None):
        self.name, self.count = schedule, len(parts)
        self.mine = places(schedule, self.count, group)
        self.parts = {i: parts[i] for i in self.mine}
        self.stages = [
            PipelineStage(
                wrap(part), i, self.count, torch.device(device or torch.get_default_device()), group=group, **given(i)
            )
            for i, part in self.parts.items()
        ]

    def start(self, loss=blocks.loss_function, microbatches=blocks.MICROBATCHES, scale_grads=False, **options):
        kind, stages = getattr(schedules, self.name), self.stages
        of = stages[0] if SCHEDULES[self.name][0] == 1 else stages
        self.schedule = kind(of, microbatches, loss_fn=loss, scale_grads=scale_grads, **options)
        return self

    def given(self, x, target, losses):
        """The arguments of a step that this rank's stages take."""
        keywords = {"target": target, "losses": losses} if self.count - 1 in self.mine else {}
        return [x] if 0 in self.mine else [], keywords

    def step(self, x, target, **others):
        """The losses."""
        losses = []
        args, keywords = self.given(x, target, losses)
        self.schedule.step(*args, **keywords, **others)
        return losses


def count_of(schedule):
    return SCHEDULES[schedule][0] * dist.get_world_size()


def pipelined(model, schedule, wrap=lambda part: part, given=lambda i: {}, **options):
    _, parts = model.build(count_of(schedule))
    line = Pipeline(schedule, parts, wrap, given).start(model.loss, model.microbatches, **options)
    return train(model, line.parts, line.step)


def watch(stage, around):
    """Has `around(action, run)` run each of the stage's passes, by attributes that hide its methods. An action is as in torch's
    order, "1I0": stage, F, I, W or B (a whole backward), microbatch."""

    def hide(name, kind_of):
        original = getattr(stage, name)

        def method(microbatch, *args, **kwargs):
            action = f"{stage.stage_index}{kind_of(kwargs)}{microbatch}"
            return around(action, functools.partial(original, microbatch, *args, **kwargs))

        vars(stage)[name] = method

    hide("forward_one_chunk", lambda given: "F")
    hide("backward_one_chunk", lambda given: "B" if given.get("full_backward", True) else "I")
    hide("backward_weight_one_chunk", lambda given: "W")


def unwatch(stage):
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        vars(stage).pop(name)


# The cases.


class Case(NamedTuple):
    """
    run: returns what this rank leaves.
    module: what is patched while it runs: one of support.ranks.MODULES.
    apart: in a process and a group of its own, as it may fail or crash. Any other's failure ends the cases after it.
    """

    run: Callable
    lane: str = "fast"
    module: str = UNDER_TEST
    apart: bool = False


def in_turn(number, schedule):
    """The lane of a test's case: each is fast on one schedule, these in turn, and long on the others."""
    return "fast" if number % len(ZERO_BUBBLE) == ZERO_BUBBLE.index(schedule) else "long"


def by_lane(cases):
    """Parameters of tests: names of CASES, or pairs of values and lane."""
    pairs = [((name,), case.lane) for name, case in cases.items()] if isinstance(cases, dict) else cases
    return [pytest.param(*values, marks=pytest.mark.long if lane == "long" else ()) for values, lane in pairs]


class Ranks:
    def __init__(self, path, cases, world, factory, options):
        self.path, self.cases, self.world, self.factory, self.options = Path(path), cases, world, factory, options
        self.folder = functools.cache(self._run)

    def _run(self, lane):
        folder = self.factory.mktemp(f"{self.path.stem}_{lane}")
        module = ".".join(self.path.relative_to(TESTS).with_suffix("").parts)
        run_ranks("support/pipelines.py", self.world, folder, module, lane, **self.options)
        return folder

    def __call__(self, name):
        """What each rank left."""
        return results(self.folder(self.cases[name].lane), name, self.world)

    def together(self, name):
        """What the ranks left, each a dictionary of its own part, as one."""
        return joined(self(name))

    def error(self, name, rank):
        return (self.folder(self.cases[name].lane) / f"{name}.{rank}.failed").read_text()


def ranks_of(path, cases, world=2, **options):
    """A module's fixture: its Ranks."""

    @pytest.fixture(scope="module")
    def ranks(tmp_path_factory):
        return Ranks(path, cases, world, tmp_path_factory, {"timeout": 600, **options})

    return ranks


def joined(parts):
    return {what: value for part in parts for what, value in part.items()}


def assert_close(got, wanted):
    """Of dictionaries."""
    assert got.keys() == wanted.keys(), f"on one side alone: {got.keys() ^ wanted.keys()}"
    for what, value in wanted.items():
        torch.testing.assert_close(got[what], value, msg=lambda text, what=what: f"{what}: {text}")


# A rank.


def leave(folder, name, rank, run):
    try:
        torch.save(run(), folder / f"{name}.{rank}")
    except BaseException:
        (folder / f"{name}.{rank}.failed").write_text(traceback.format_exc())
        raise


def main(rank, world, folder, module, lane):
    warnings.simplefilter("ignore")
    module = importlib.import_module(module)
    for needed in getattr(module, "IMPORTS", ()):
        with contextlib.suppress(ImportError):
            importlib.import_module(needed)
    cases = {name: case for name, case in module.CASES.items() if case.lane == lane}
    for name, case in cases.items():
        if case.apart:
            run_apart(name, case, rank, world, folder)
    if all(case.apart for case in cases.values()):
        return
    getattr(module, "join", join)(rank, world, folder)
    for name, case in cases.items():
        if not case.apart:
            with on(case.module):
                leave(folder, name, rank, case.run)
            dist.barrier()
    dist.destroy_process_group()


def run_apart(name, case, rank, world, folder):
    child = os.fork()
    if child == 0:
        try:
            join(rank, world, folder, f"store {name}", seconds=30)
            with on(case.module):
                leave(folder, name, rank, case.run)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
