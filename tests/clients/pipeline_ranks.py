"""What each process of test_pipelines.py runs: stages that torch's tracer cut, and training that goes on elsewhere.

    python pipeline_ranks.py RANK WORLD FOLDER

Each run is a process forked for it, so that one's failure is its own. What was recorded, or the error, goes to FOLDER.
"""

import sys
from pathlib import Path

import torch
from support.blocks import stages_of
from support.ranks import MODULES, run_apart
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline, schedules

STAGES, MICROBATCHES, BATCH, WIDTH, STEPS = 4, 4, 8, 8, 4
# Traced stages do not know a V.
TRACED = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleavedZeroBubble")
# Schedule and shape, then the module that trains the first half of the steps, and the one that goes on.
RESUMED = [
    (schedule, shape, first, second)
    for schedule, shape in (("ScheduleZBVZeroBubble", "v"), ("ScheduleInterleavedZeroBubble", "loop"))
    for first, second in (("torch", "zbpipe"), ("zbpipe", "torch"), ("zbpipe", "zbpipe"))
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(STAGES))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def build():
    torch.manual_seed(1)
    return Whole()


def batch(step):
    torch.manual_seed(100 + step)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def loss_function(out, target):
    return (out - target).square().sum()


def optimizer_of(weights):
    return torch.optim.AdamW(weights.values(), 1e-2)


def train(weights, optimizer, steps, step_once):
    seen = {}
    for step in steps:
        losses = step_once(*batch(step))
        seen.update({(step, "loss", k): loss.detach() for k, loss in enumerate(losses)})
        seen.update({(step, "grad", name): w.grad.clone() for name, w in weights.items()})
        optimizer.step()
        optimizer.zero_grad()
        seen.update({(step, "weight", name): w.detach().clone() for name, w in weights.items()})
    return seen


def reference():
    whole = build()

    def step_once(x, target):
        losses = []
        for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            losses.append(loss_function(whole(part), goal))
            losses[-1].backward()
        return losses

    weights = dict(whole.named_parameters())
    return train(weights, optimizer_of(weights), range(STEPS), step_once)


def stepping(schedule, mine, last):
    def step_once(x, target):
        losses = []
        given = {"target": target, "losses": losses} if last in mine else {}
        schedule.step(*([x] if 0 in mine else []), **given)
        return losses

    return step_once


def traced(name, rank, world):
    x, _ = batch(0)
    one = name in ("ScheduleGPipe", "Schedule1F1B")
    count = world if one else STAGES
    at = {f"blocks.{i * STAGES // count}": SplitPoint.BEGINNING for i in range(1, count)}
    pipe = pipeline(build(), mb_args=(x.chunk(MICROBATCHES)[0],), split_spec=at)
    mine = stages_of(rank, world, count // world, "loop")
    stages = [pipe.build_stage(i, torch.device("cpu")) for i in mine]
    kind = getattr(schedules, name)
    schedule = kind(stages[0] if one else stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    weights = {name: w for stage in stages for name, w in stage.submod.named_parameters()}
    return train(weights, optimizer_of(weights), range(STEPS), stepping(schedule, mine, count - 1))


def half(name, shape, part, file, rank, world):
    """The first or the second half of the training; between them is `file`."""
    mine = stages_of(rank, world, STAGES // world, shape)
    blocks = build().blocks
    weights = {f"blocks.{i}.{name}": w for i in mine for name, w in blocks[i].named_parameters()}
    optimizer = optimizer_of(weights)
    if part:
        kept = torch.load(file)
        for weight, value in weights.items():
            value.data = kept["weights"][weight]
        optimizer.load_state_dict(kept["optimizer"])
    stages = [PipelineStage(blocks[i], i, STAGES, torch.device("cpu")) for i in mine]
    schedule = getattr(schedules, name)(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    steps = range(STEPS // 2, STEPS) if part else range(STEPS // 2)
    seen = train(weights, optimizer, steps, stepping(schedule, mine, STAGES - 1))
    if not part:
        torch.save({"weights": {n: w.detach() for n, w in weights.items()}, "optimizer": optimizer.state_dict()}, file)
    return seen


def main(rank, world, folder):
    def apart(name, module, function, *arguments):
        run_apart(name, module, lambda: function(*arguments, rank, world), rank, world, folder)

    for name in TRACED:
        for module in MODULES:
            apart(f"traced {name} {module}", module, traced, name)
    for name, shape, *modules in RESUMED:
        for part, module in enumerate(modules):
            together = f"resumed {name} {' '.join(modules)}"
            apart(f"{together} {part}", module, half, name, shape, part, folder / f"{together} kept.{rank}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
