"""Mixed precision and optimizers around the zero-bubble schedules, against the same recipe on the unpipelined model."""

import contextlib
import functools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.blocks import MICROBATCHES, ZERO_BUBBLE
from support.oracle import wrong_on_torch
from support.pipelines import Case, Pipeline, assert_close, copied, named, places, ranks_of
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import zbpipe

BATCH, WIDTH, STEPS, STAGES, WORLD = 16, 16, 2, 4, 2


def blocks():
    """The last layer's output, of autocast's dtype, crosses the stages' boundary."""
    torch.manual_seed(1)
    return [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(STAGES)
    ]


class InAutocast(nn.Module):
    def __init__(self, block, dtype):
        super().__init__()
        self.block, self.dtype = block, dtype

    def forward(self, x):
        with torch.autocast("cpu", self.dtype):
            return self.block(x)


def batch(step):
    torch.manual_seed(100 + step)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def squared(out, target):
    return (out.float() - target.float()).pow(2).sum()


class Unpipelined:
    """The whole model in this process."""

    def __init__(self):
        self.parts = dict(enumerate(blocks()))

    def start(self, loss_function, scale_grads=False):
        self.loss_function, self.scale_grads = loss_function, scale_grads

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

    def scaler(self, **settings):
        return torch.amp.GradScaler("cpu", **settings)

    def weights(self):
        return named(self.parts)


class Pipelined(Unpipelined):
    """This rank's stages of it."""

    def __init__(self, schedule):
        self.name, parts = schedule, blocks()
        self.parts = {i: parts[i] for i in places(schedule, STAGES)}

    def start(self, loss_function, scale_grads=False):
        parts = [self.parts.get(i) for i in range(STAGES)]
        self.line = Pipeline(self.name, parts).start(loss_function, scale_grads=scale_grads)

    def step(self, x, target, after_microbatch=None):
        self.line.step(x, target)

    def scaler(self, **settings):
        return ShardedGradScaler("cpu", process_group=dist.group.WORLD, **settings)


def grads(weights):
    return {name: w.grad for name, w in weights.items()}


class Recorder:
    """Gradients, weights and whatever else a recipe says, by step and name."""

    def __init__(self):
        self.seen = {}

    def __call__(self, step, what, values):
        self.seen |= {(step, what, name): copied(value) for name, value in values.items()}


def train(driver, record, optimizer_of, within=contextlib.nullcontext):
    """Steps with an optimizer between them."""
    weights = driver.weights()
    optimizer = optimizer_of(weights.values())
    for step in range(STEPS):
        with within():
            driver.step(*batch(step))
        record(step, "grad", grads(weights))
        optimizer.step()
        optimizer.zero_grad()
        record(step, "weight", weights)


def autocast_around_the_step(driver, record):
    """As torchtitan does: forward and backward in one region, whose cache gives all microbatches the same cast weights."""
    driver.start(squared)
    train(driver, record, partial(torch.optim.AdamW, lr=1e-2), partial(torch.autocast, "cpu", torch.bfloat16))


def autocast_in_the_stage(driver, record):
    driver.parts = {i: InAutocast(part, torch.bfloat16) for i, part in driver.parts.items()}
    driver.start(squared)
    train(driver, record, partial(torch.optim.SGD, lr=1e-2, momentum=0.9))


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
            weights["0.block.1.weight"].grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        record(step, "grad", grads(weights))
        scaler.step(optimizer)
        scaler.update()
        record(step, "scale", {"": scaler.get_scale()})
        optimizer.zero_grad()
        record(step, "weight", weights)


def float32_buffers(driver, record):
    """bfloat16 weights, float32 sums of their gradients and float32 masters; the schedule scales the sums."""
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


RECIPES = {
    "autocast bf16 around the step": autocast_around_the_step,
    "autocast bf16 in the stage": autocast_in_the_stage,
    "autocast fp16 in the stage, GradScaler": grad_scaler,
    "bf16 weights, float32 buffers": float32_buffers,
    "optimizer in backward": optimizer_in_backward,  # last: on torch's own module a rank may fail here
}


def run(recipe, driver_of):
    record = Recorder()
    RECIPES[recipe](driver_of(), record)
    return record.seen


CASES = {
    f"{schedule} {recipe}": Case(partial(run, recipe, partial(Pipelined, schedule)))
    for recipe in RECIPES
    for schedule in ZERO_BUBBLE
}
ranks = ranks_of(__file__, CASES)
pytestmark = [pytest.mark.dist, pytest.mark.slow]


@functools.cache
def expected(recipe):
    return run(recipe, Unpipelined)


wrong = {
    "optimizer in backward": wrong_on_torch("no post-accumulate hook fires in W"),
    "bf16 weights, float32 buffers": wrong_on_torch("there is no main_grad"),
}


@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
@pytest.mark.parametrize("recipe", [pytest.param(recipe, marks=wrong.get(recipe, ())) for recipe in RECIPES])
def test_a_recipe_trains_as_it_does_unpipelined(recipe, schedule, ranks):
    for part in ranks(f"{schedule} {recipe}"):  # where ranks say the same, each is compared
        wanted = {what: value for what, value in expected(recipe).items() if what in part}
        assert_close(part, wanted)
    assert ranks.together(f"{schedule} {recipe}").keys() == expected(recipe).keys()


def test_a_weights_hook_fires_once_per_microbatch():
    fired = {what[2]: count for what, count in expected("optimizer in backward").items() if what[:2] == (1, "fired")}
    assert set(fired.values()) == {STEPS * MICROBATCHES}


def test_the_scaled_recipe_skips_the_step_that_overflowed():
    seen = expected("autocast fp16 in the stage, GradScaler")
    assert [seen[step, "scale", ""] for step in range(3)] == [64.0, 32.0, 32.0]
    name = "3.block.3.weight"
    assert torch.equal(seen[0, "weight", name], seen[1, "weight", name])
    assert not torch.equal(seen[1, "weight", name], seen[2, "weight", name])
