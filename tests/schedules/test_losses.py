"""Losses that a user's last stage may give a zero-bubble schedule, beside an ordinary backward of the whole model.

One process has both stages. torch's own module gives a last stage no gradient whose input requires none.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from support.blocks import MICROBATCHES, Block, batch, loss_function
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import zbpipe

# Where a microbatch's loss is constant its gradient is None.
sends_none = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11's stage sends no gradient that is None")
ZERO_BUBBLE = ("ScheduleZBVZeroBubble", "ScheduleInterleavedZeroBubble", "ScheduleDualPipeV")


@pytest.fixture(autouse=True)
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    zbpipe.unpatch()
    dist.destroy_process_group()


def schedule_of(name, modules, loss_fn, **given):
    stages = [PipelineStage(module, i, len(modules), torch.device("cpu"), **given) for i, module in enumerate(modules)]
    return getattr(schedules, name)(stages, MICROBATCHES, loss_fn=loss_fn, scale_grads=False)


def check_steps(name, modules, loss_fn, steps=2, prepare=lambda target: target, return_outputs=True):
    """Steps whose losses and gradients are those of ordinary backwards of a copy."""
    plain = nn.Sequential(*copy.deepcopy(modules))
    schedule = schedule_of(name, modules, loss_fn)
    for step in range(steps):
        x, target = batch(step)
        target = prepare(target)
        expected, losses = [], []
        for value, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            expected.append(loss_fn(plain(value), goal))
            if expected[-1].requires_grad:
                expected[-1].backward()
        with zbpipe.patch():
            output = schedule.step(x, target=target, losses=losses, return_outputs=return_outputs)
        assert not return_outputs or not output.requires_grad or isinstance(modules[-1], ReturnsAView)
        torch.testing.assert_close(losses, [loss.detach() for loss in expected])
        for module, reference in zip(modules, plain, strict=True):
            for (weight, parameter), wanted in zip(module.named_parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, wanted.grad, msg=lambda m, at=(step, weight): f"{at}: {m}")


def masked(out, target):
    keep = target[:, 0] != -100
    return loss_function(out[keep], target[keep]) if keep.any() else torch.zeros((), dtype=out.dtype)


def mask(target):
    target = target.clone()
    target[2:4], target[-1] = -100, -100  # the second microbatch, and half of the last one
    return target


@sends_none
@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_a_microbatch_whose_labels_are_all_masked_trains_nothing(name):
    check_steps(name, [Block(), Block()], masked, prepare=mask)


@sends_none
def test_one_tensor_that_is_every_masked_microbatchs_loss():
    """Told from a loss of an earlier step by having had no backward."""
    zero = torch.zeros((), dtype=torch.float64)

    def loss_fn(out, target):
        loss = masked(out, target)
        return loss if loss.requires_grad else zero

    check_steps("ScheduleZBVZeroBubble", [Block(), Block()], loss_fn, prepare=mask)


def squares(out, target):
    return nn.functional.mse_loss(out, target)  # saves the output


def saves_nothing(out, target):
    return (out - target).abs().sum()


def of_a_computed_target(out, target):
    with torch.no_grad():
        target = target + out.tanh()
    return (out.exp() * out).mean() + nn.functional.mse_loss(out, target)


class ReturnsAView(Block):
    def forward(self, x):
        return super().forward(x).view(x.shape)


class Partly(nn.Module):
    """A frozen part before one that is trained: no gradient leaves the last stage."""

    def __init__(self):
        super().__init__()
        self.frozen, self.head = Block().requires_grad_(False), Block()

    def forward(self, x):
        return self.head(self.frozen(x))


@pytest.mark.parametrize("name", ZERO_BUBBLE)
@pytest.mark.parametrize("loss_fn", [squares, saves_nothing, of_a_computed_target])
@pytest.mark.parametrize("last", [Block, ReturnsAView, Partly])
def test_all_stages_but_the_last_are_frozen(name, loss_fn, last):
    check_steps(name, [Block().requires_grad_(False), last()], loss_fn)


def test_of_four_stages_the_last_two_are_trained():
    frozen = [Block().requires_grad_(False) for _ in range(2)]
    modules = [*frozen, Block(), Block()]
    check_steps("ScheduleInterleavedZeroBubble", modules, squares)


class WithPenalty(Block):
    """Two outputs, of which one depends on the weights alone: W runs what computed it, and what the loss made of it."""

    def forward(self, x):
        return super().forward(x), self.down.pow(2).mean() * self.extra.mean()


def with_penalty(out, target):
    return squares(out[0], target) + out[1].pow(2)


class Summed(Block):
    def forward(self, x):
        return super().forward(x).pow(2).sum()


def the_output_itself(out, target):
    return out


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("name", ZERO_BUBBLE)
@pytest.mark.parametrize(("last", "loss_fn"), [(WithPenalty, with_penalty), (Summed, the_output_itself)])
def test_outputs_that_are_no_batch(name, is_frozen, last, loss_fn):
    check_steps(name, [Block().requires_grad_(not is_frozen), last()], loss_fn, return_outputs=False)


def test_the_losses_of_a_step_that_failed_are_no_losses_of_the_next():
    """torch's schedule keeps them, and I, which has detached them, would pass over them."""
    modules = [Block(), Block()]
    schedule = schedule_of("ScheduleZBVZeroBubble", modules, squares)
    calls = []

    def maybe(module, args):
        calls.append(0)
        if len(calls) == 4:
            raise KeyError("planted")

    modules[1].register_forward_pre_hook(maybe)
    x, target = batch(0)
    with zbpipe.patch():
        with pytest.raises(RuntimeError, match="failed to run forward"):
            schedule.step(x, target=target)
        for module in modules:
            module.zero_grad()
        with pytest.raises(RuntimeError, match=r"loss of stage 1, microbatch 0, has had its backward: make a new sch"):
            schedule.step(x, target=target)
        assert all(weight.grad is None for module in modules for weight in module.parameters())
    check_steps("ScheduleZBVZeroBubble", modules, squares)


def with_metric(out, target):
    loss = squares(out, target)
    return loss, loss.detach() / target.numel()


def in_a_dictionary(out, target):
    return {"loss": squares(out, target)}


def forgotten(out, target):
    squares(out, target)


@pytest.mark.parametrize("shapes", ["learned", "given"])
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", *ZERO_BUBBLE])
@pytest.mark.parametrize(
    ("loss_fn", "kind"), [(with_metric, "tuple"), (in_a_dictionary, "dict"), (forgotten, "NoneType")]
)
def test_a_loss_function_that_returns_no_tensor_is_refused(name, loss_fn, kind, shapes):
    modules = [Block(), Block()]
    x, target = batch(0)
    given = {}
    if shapes == "given":
        example = x[: len(x) // MICROBATCHES]
        given = {"input_args": (example.clone(),), "output_args": (example.clone().requires_grad_(),)}
    schedule = schedule_of(name, modules, loss_fn, **given)
    with zbpipe.patch(), pytest.raises(TypeError, match=rf"loss function returned a {kind} .*; expected a tensor"):
        schedule.step(x, target=target)
    assert all(weight.grad is None for weight in modules[1].parameters())
