"""What each process of test_training.py runs: mixed precision and optimizers around torch's pipeline schedules.

    python training_ranks.py RANK WORLD FOLDER

Each recipe trains for two steps; what it recorded goes to FOLDER, for every schedule. The unpipelined reference is the
same recipe on a driver that runs the microbatches one after another.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from support.blocks import stages_of
from support.ranks import UNDER_TEST, join, on
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage, schedules
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

MICROBATCHES = 8
BATCH, WIDTH = 16, 16
STEPS = 2
ZERO_BUBBLE = {"ScheduleInterleavedZeroBubble": "loop", "ScheduleZBVZeroBubble": "v", "ScheduleDualPipeV": "v"}
STAGES = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)  # its output, of autocast's dtype, crosses the stages' boundary

    def forward(self, x):
        return self.down(self.up(self.norm(x)).tanh())


class InAutocast(nn.Module):
    def __init__(self, block, dtype):
        super().__init__()
        self.block, self.dtype = block, dtype

    def forward(self, x):
        with torch.autocast("cpu", self.dtype):
            return self.block(x)


def blocks():
    torch.manual_seed(1)
    return [Block() for _ in range(STAGES)]


def batch(step):
    torch.manual_seed(100 + step)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def squared(out, target):
    return (out.float() - target.float()).pow(2).sum()


class Unpipelined:
    """The whole model in this process."""

    group = None

    def __init__(self):
        self.parts = dict(enumerate(blocks()))

    def start(self, loss_function, scale_grads=False):
        self.loss_function, self.scale_grads = loss_function, scale_grads
        return self

    def step(self, x, target, after_microbatch=lambda: None):
        for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            for module in self.parts.values():
                part = module(part)
            self.loss_function(part, goal).backward()
            after_microbatch()
        for w in self.weights().values() if self.scale_grads else ():
            for grad in (w.grad, getattr(w, "main_grad", None)):
                if grad is not None:
                    grad.div_(MICROBATCHES)

    def total(self, value, op):
        return value

    def scaler(self, **settings):
        return torch.amp.GradScaler("cpu", **settings)

    def weights(self):
        return {f"{i}.{name}": w for i, part in self.parts.items() for name, w in part.named_parameters()}


class Pipelined(Unpipelined):
    """This rank's stages of it."""

    def __init__(self, schedule, rank, world):
        self.name = schedule
        self.mine = stages_of(rank, world, STAGES // world, ZERO_BUBBLE[schedule])
        parts = blocks()
        self.parts = {i: parts[i] for i in self.mine}

    def start(self, loss_function, scale_grads=False):
        stages = [PipelineStage(part, i, STAGES, torch.device("cpu")) for i, part in self.parts.items()]
        kind = getattr(schedules, self.name)
        self.schedule = kind(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=scale_grads)
        return self

    def step(self, x, target, after_microbatch=None):
        given = {"target": target, "losses": []} if STAGES - 1 in self.mine else {}
        self.schedule.step(*([x] if 0 in self.mine else []), **given)

    def total(self, value, op):
        dist.all_reduce(value, op)
        return value

    def scaler(self, **settings):
        return ShardedGradScaler("cpu", process_group=dist.group.WORLD, **settings)


class Recorder:
    """Gradients, weights and whatever else a recipe says, by step and name."""

    def __init__(self):
        self.seen = {}

    def __call__(self, step, what, values):
        for name, value in values.items():
            self.seen[step, what, name] = value.detach().clone() if isinstance(value, torch.Tensor) else value


def grads(weights):
    return {name: w.grad for name, w in weights.items()}


def autocast_around_the_step(driver, record, dtype):
    """As torchtitan does: forward and backward in one region, whose cache gives all microbatches the same cast weights."""
    driver.start(squared)
    weights = driver.weights()
    optimizer = torch.optim.AdamW(weights.values(), 1e-2)
    for step in range(STEPS):
        with torch.autocast("cpu", dtype):
            driver.step(*batch(step))
        record(step, "grad", grads(weights))
        optimizer.step()
        optimizer.zero_grad()
        record(step, "weight", weights)


def autocast_in_the_stage(driver, record, dtype):
    driver.parts = {i: InAutocast(part, dtype) for i, part in driver.parts.items()}
    driver.start(squared)
    weights = driver.weights()
    optimizer = torch.optim.SGD(weights.values(), 1e-2, momentum=0.9)
    for step in range(STEPS):
        driver.step(*batch(step))
        record(step, "grad", grads(weights))
        optimizer.step()
        optimizer.zero_grad()
        record(step, "weight", weights)


def grad_scaler(driver, record):
    """float16 with a loss scale; step 1 overflows in the weights of one rank alone, and all skip it."""
    driver.parts = {i: InAutocast(part, torch.float16) for i, part in driver.parts.items()}
    scaler = driver.scaler(init_scale=64.0)
    driver.start(lambda out, target: scaler.scale(squared(out, target)))
    scaler.scale(torch.zeros(()))  # ranks without the last stage never call the loss function
    weights = driver.weights()
    optimizer = torch.optim.SGD(weights.values(), 1e-2)
    for step in range(STEPS + 1):
        driver.step(*batch(step))
        if step == 1 and 0 in driver.parts:
            weights["0.block.up.weight"].grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        record(step, "grad", grads(weights))
        scaler.step(optimizer)
        scaler.update()
        record(step, "scale", {"": scaler.get_scale()})
        optimizer.zero_grad()
        record(step, "weight", weights)


def float32_buffers(driver, record):
    """bfloat16 weights, float32 sums of their gradients and float32 masters; the schedule scales the sums."""
    import zbpipe

    for part in driver.parts.values():
        part.bfloat16()
    weights = driver.weights()
    masters = {}
    for name, w in weights.items():
        w.main_grad = torch.zeros(w.shape)
        masters[name] = w.detach().float()
    optimizer = torch.optim.Adam(masters.values(), 1e-2)

    def add_by_hand():
        for w in weights.values():
            w.main_grad += w.grad
            w.grad = None

    driver.start(squared, scale_grads=True)
    for step in range(STEPS):
        x, target = batch(step)
        with zbpipe.policy(main_grad=True):
            driver.step(x.bfloat16(), target, add_by_hand)
        record(step, "grad", {name: w.main_grad for name, w in weights.items()})
        record(step, "no .grad", {name: w.grad is None for name, w in weights.items()})
        for name, master in masters.items():
            master.grad = weights[name].main_grad
        optimizer.step()
        with torch.no_grad():
            for name, w in weights.items():
                w.copy_(masters[name])
                w.main_grad.zero_()
        record(step, "weight", weights)


def clipping(driver, record):
    """The norm is that of all ranks' gradients."""
    driver.start(squared, scale_grads=True)
    weights = driver.weights()
    optimizer = torch.optim.SGD(weights.values(), 0.1)
    for step in range(STEPS):
        driver.step(*batch(step))
        mine = torch.nn.utils.get_total_norm([w.grad for w in weights.values()])
        norm = driver.total(mine.square(), dist.ReduceOp.SUM).sqrt()
        torch.nn.utils.clip_grads_with_norm_(weights.values(), 0.5, norm)
        record(step, "norm", {"": norm})
        record(step, "grad", grads(weights))
        optimizer.step()
        optimizer.zero_grad()
        record(step, "weight", weights)


def optimizer_in_backward(driver, record):
    """A weight steps in the hook of its last microbatch's accumulation, and gives its gradient back at once."""
    driver.start(squared)
    weights = driver.weights()
    fired = dict.fromkeys(weights, 0)
    summed = {}

    def on_accumulated(name, optimizer, w):
        fired[name] += 1
        if fired[name] % MICROBATCHES == 0:
            summed[name] = w.grad
            optimizer.step()
            optimizer.zero_grad()

    for name, w in weights.items():
        w.register_post_accumulate_grad_hook(partial(on_accumulated, name, torch.optim.Adam([w], 1e-2)))
    for step in range(STEPS):
        driver.step(*batch(step))
        record(step, "fired", fired)
        record(step, "grad", summed)
        record(step, "no .grad", {name: w.grad is None for name, w in weights.items()})
        record(step, "weight", weights)
        summed.clear()


def moving_average(driver, record):
    """The average follows in the optimizer's step hook; gradients are kept for a second step's accumulation."""
    driver.start(squared)
    model = nn.ModuleDict({str(i): part for i, part in driver.parts.items()})
    weights = driver.weights()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(weights.values(), 1e-2)
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    for step in range(STEPS):
        driver.step(*batch(step))
        record(step, "grad", grads(weights))
        optimizer.step()
        record(step, "weight", weights)
        record(step, "average", dict(average.module.named_parameters()))


RECIPES = {
    "autocast bf16 around the step": partial(autocast_around_the_step, dtype=torch.bfloat16),
    "autocast bf16 in the stage": partial(autocast_in_the_stage, dtype=torch.bfloat16),
    "autocast fp16 in the stage, GradScaler": grad_scaler,
    "bf16 weights, float32 buffers": float32_buffers,
    "clipping over ranks": clipping,
    "moving average": moving_average,
    "optimizer in backward": optimizer_in_backward,  # last: on torch's own module a rank may fail here
}


def run(recipe, driver):
    record = Recorder()
    RECIPES[recipe](driver, record)
    return record.seen


def main(rank, world, folder):
    join(rank, world, folder)
    with on(UNDER_TEST):
        for recipe in RECIPES:
            for schedule in ZERO_BUBBLE:
                torch.save(run(recipe, Pipelined(schedule, rank, world)), folder / f"{schedule} {recipe}.{rank}")
                dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
