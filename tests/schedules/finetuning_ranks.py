"""What each process of test_finetuning.py runs: a fine-tuner's cases under torch's zero-bubble schedules.

    python finetuning_ranks.py RANK WORLD FOLDER LANE

Every case trains under every schedule of the lane, on zbpipe and on torch's own module, each in a process forked for it, so that
one's failure is its own. What was recorded, or the error, goes to FOLDER.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from support.blocks import stages_of
from support.ranks import MODULES, run_apart
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

STAGES, MICROBATCHES, BATCH, WIDTH, STEPS = 4, 4, 8, 8, 2
SCHEDULES = {"ScheduleInterleavedZeroBubble": "loop", "ScheduleZBVZeroBubble": "v", "ScheduleDualPipeV": "v"}
MASKED = -100.0
FROM_THE_FIRST_STEP_ON = "the first loss constant from the first step on"
f64 = torch.float64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=f64)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=f64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=f64)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Adapted(nn.Module):
    """A frozen linear layer and the product of two small matrices beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features, dtype=f64))
        self.b = nn.Parameter(torch.randn(base.out_features, 2, dtype=f64) / 4)

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


# What is trained: each takes the stages' modules.


def everything(parts):
    pass


def only(*trained):
    def freeze(parts):
        for index, part in enumerate(parts):
            part.requires_grad_(index in trained)

    return freeze


def lora_on(*adapted):
    def adapt(parts):
        for index, part in enumerate(parts):
            part.requires_grad_(False)
            if index in adapted:
                part.up, part.down = Adapted(part.up), Adapted(part.down)

    return adapt


def vectors_alone(parts):
    for part in parts:
        for weight in part.parameters():
            weight.requires_grad_(weight.dim() == 1)


# Losses of one microbatch.


def smooth(out, target):
    return nn.functional.smooth_l1_loss(out, target, reduction="sum")


def squared(out, target):
    return nn.functional.mse_loss(out, target, reduction="sum")


def of_itself(out, target):
    """Saves the stage's output under two names."""
    return (out * out.detach()).sum() + (out - target).abs().sum()


def against_a_computed_target(out, target):
    """The target is computed from what the model says itself, as in self-distillation."""
    return nn.functional.kl_div(
        out.log_softmax(-1), (out.detach() + target).softmax(-1), reduction="sum", log_target=False
    )


def masked(out, target):
    """As a cross entropy with an ignored label: constant where every label is masked."""
    keep = target != MASKED
    return (out[keep] - target[keep]).square().sum() if keep.any() else torch.zeros((), dtype=f64)


# Name: what is trained, the loss, and the microbatches without any label. In the second step, or torch's own module
# refuses a constant first loss: by a backward through it a stage learns its gradients' shapes.
CASES = {
    "everything is trained": (everything, squared, ()),
    "the last stage alone": (only(3), squared, ()),
    "the last stage alone, smooth loss": (only(3), smooth, ()),
    "the last stage alone, a loss of the output itself": (only(3), of_itself, ()),
    "the last stage alone, a computed target": (only(3), against_a_computed_target, ()),
    "the last two stages": (only(2, 3), squared, ()),
    "all but the first stage": (only(1, 2, 3), squared, ()),
    "the first stage alone": (only(0), squared, ()),
    "the second stage alone": (only(1), squared, ()),
    "first and last stage": (only(0, 3), squared, ()),
    "norms and biases": (vectors_alone, squared, ()),
    "LoRA on all stages": (lora_on(0, 1, 2, 3), squared, ()),
    "LoRA on the last stage": (lora_on(3), squared, ()),
    "LoRA on the last two stages": (lora_on(2, 3), squared, ()),
    "LoRA on the first two stages": (lora_on(0, 1), squared, ()),
    "a loss of the output itself": (everything, of_itself, ()),
    "a computed target": (everything, against_a_computed_target, ()),
    "a constant loss": (everything, masked, (1,)),
    "the first and the last loss constant": (everything, masked, (0, MICROBATCHES - 1)),
    "all losses constant but one": (everything, masked, (0, 1, 3)),
    "all losses constant": (everything, masked, range(MICROBATCHES)),
    FROM_THE_FIRST_STEP_ON: (everything, masked, (0,)),
    "the last two stages, a constant loss": (only(2, 3), masked, (2,)),
    "LoRA on the last two stages, a constant loss": (lora_on(2, 3), masked, (2,)),
}
RUNS = [(case, schedule) for case in CASES for schedule in SCHEDULES]


def lane_of(case, schedule):
    """Each case is fast on one schedule, these in turn, and long on the others."""
    return "fast" if [*CASES].index(case) % len(SCHEDULES) == [*SCHEDULES].index(schedule) else "long"


def build(case):
    torch.manual_seed(1)
    parts = [Block() for _ in range(STAGES)]
    CASES[case][0](parts)
    return parts


def batch(case, step):
    torch.manual_seed(100 + step)
    x, target = torch.randn(BATCH, WIDTH, dtype=f64), torch.randn(BATCH, WIDTH, dtype=f64)
    for microbatch in CASES[case][2] if step > 0 or case == FROM_THE_FIRST_STEP_ON else ():
        target.chunk(MICROBATCHES)[microbatch].fill_(MASKED)
    return x, target


def train(case, parts, mine, step_once):
    """Losses, gradients and weights of `STEPS` steps, of the stages `mine`."""
    weights = {f"{i}.{name}": w for i in mine for name, w in parts[i].named_parameters()}
    trained = [w for w in weights.values() if w.requires_grad]
    optimizer = torch.optim.SGD(trained, 1e-2) if trained else None
    seen = {}
    for step in range(STEPS):
        losses = step_once(*batch(case, step))
        seen.update({(step, "loss", k): loss.detach() for k, loss in enumerate(losses)})
        for name, w in weights.items():
            # Where every loss is constant a pipeline's earlier stages get zeros, and an ordinary backward leaves None.
            if w.requires_grad:
                seen[step, "grad", name] = torch.zeros_like(w) if w.grad is None else w.grad.clone()
            assert w.requires_grad or w.grad is None, f"{name} is frozen"
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    seen.update({(STEPS, "weight", name): w.detach().clone() for name, w in weights.items()})
    return seen


def reference(case):
    """`train` of the whole model, unpipelined."""
    parts = build(case)
    loss_function = CASES[case][1]

    def step_once(x, target):
        losses = []
        for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            for module in parts:
                part = module(part)
            losses.append(loss_function(part, goal))
            if losses[-1].requires_grad:
                losses[-1].backward()
        return losses

    return train(case, parts, range(STAGES), step_once)


def pipelined(case, schedule, rank, world):
    parts = build(case)
    mine = stages_of(rank, world, STAGES // world, SCHEDULES[schedule])
    stages = [PipelineStage(parts[i], i, STAGES, torch.device("cpu")) for i in mine]
    runtime = getattr(schedules, schedule)(stages, MICROBATCHES, loss_fn=CASES[case][1], scale_grads=False)

    def step_once(x, target):
        losses = []
        given = {"target": target, "losses": losses} if STAGES - 1 in mine else {}
        runtime.step(*([x] if 0 in mine else []), **given)
        return losses

    return train(case, parts, mine, step_once)


def main(rank, world, folder, lane):
    for case, schedule in RUNS:
        if lane_of(case, schedule) == lane:
            for module in MODULES:
                run = partial(pipelined, case, schedule, rank, world)
                run_apart(f"{schedule} {module} {case}", module, run, rank, world, folder, seconds=30)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
