"""Stages whose outputs have no history, which an ordinary backward refuses."""

import contextlib

import pytest
import torch
from support.pipelines import Pipeline
from torch import nn

import zbpipe

pytestmark = pytest.mark.usefixtures("alone")
sends_none = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11's stage sends no gradient that is None")


class Cut(nn.Linear):
    """`how` it hands on its output in the next forward; "" for a history."""

    how = ""

    def forward(self, x):
        with torch.no_grad() if self.how == "no_grad" else contextlib.nullcontext():
            out = super().forward(x)
        return out.detach() if self.how == "detach" else out


def schedule_of(modules, loss=nn.functional.mse_loss):
    return Pipeline("ScheduleInterleavedZeroBubble", modules).start(loss, 2).schedule


class Bare(nn.Module):
    """Has no parameters."""

    how = ""

    def forward(self, x):
        return x.detach() if self.how else x.sin()


@pytest.mark.parametrize(("how", "kind"), [("no_grad", Cut), ("detach", Cut), ("detach", Bare)])
def test_a_schedule_names_the_stage(how, kind):
    modules = [Cut(4, 4), Cut(4, 4) if kind is Cut else Bare(), Cut(4, 4)]
    x, target = torch.randn(4, 4), torch.randn(4, 4)
    with zbpipe.patch():
        schedule = schedule_of(modules)
        schedule.step(x, target=target)
        modules[1].how = how
        with pytest.raises(ValueError, match="the outputs of stage 1: none has a history, so that no gradient"):
            schedule.step(x, target=target)


@sends_none
def test_a_last_stage_without_history_is_said_once(caplog):
    modules = [Cut(4, 4) for _ in range(3)]
    x, target = torch.randn(4, 4), torch.randn(4, 4)
    with zbpipe.patch():
        schedule = schedule_of(modules)
        schedule.step(x, target=target)
        modules[2].how = "no_grad"
        schedule.step(x, target=target)
    (words,) = [text for text in caplog.messages if "history" in text]
    assert words.startswith(
        "stage 2: neither the loss of microbatch 0 nor an output has a history, so that nothing learns"
    )


@sends_none
def test_frozen_first_stages_may_run_without_gradients():
    modules = [Cut(4, 4).requires_grad_(i == 2) for i in range(3)]
    modules[0].how, modules[1].how = "no_grad", "detach"
    x, target = torch.randn(4, 4), torch.randn(4, 4)
    with zbpipe.patch():
        schedule_of(modules).step(x, target=target)
    whole = nn.Sequential(*modules)
    losses = [nn.functional.mse_loss(whole(a), b) for a, b in zip(x.chunk(2), target.chunk(2), strict=True)]
    wanted = torch.autograd.grad(sum(losses), list(modules[2].parameters()))
    torch.testing.assert_close([weight.grad for weight in modules[2].parameters()], list(wanted))


class Last(nn.Linear):
    """Has its loss by itself, and hands on what nobody can learn from: or zeros in those of its forwards that are named."""

    forwards, constant = 0, ()

    def forward(self, x):
        out = super().forward(x)
        self.loss = out.new_zeros(()) if self.forwards in self.constant else out.square().mean()
        self.forwards += 1
        return out.detach()


LEARNT = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="up to torch 2.12 a stage learns that none sends a gradient"
)


@pytest.mark.parametrize("shapes", [(), pytest.param((0,), marks=LEARNT)], ids=["", "where shapes are learnt"])
@pytest.mark.parametrize("constant", [(), *(pytest.param((at,), marks=sends_none) for at in (0, 1))], ids=str)
def test_the_loss_of_the_last_stage_may_be_constant_or_computed_otherwise(constant, shapes):
    modules = [nn.Linear(4, 4), nn.ReLU(), Last(4, 4)]
    x = torch.randn(4, 4)
    with zbpipe.patch():
        modules[2].constant = (*shapes, *(microbatch + 1 for microbatch in constant))
        schedule_of(modules, lambda out, target: modules[2].loss).step(x, target=x)
    whole, losses, modules[2].forwards, modules[2].constant = nn.Sequential(*modules), [], 0, constant
    for part in x.chunk(2):
        whole(part)
        losses.append(modules[2].loss)
    weights = [*modules[0].parameters(), *modules[2].parameters()]
    torch.testing.assert_close([weight.grad for weight in weights], list(torch.autograd.grad(sum(losses), weights)))


@sends_none
def test_stages_that_are_frozen_and_detached_later_are_right():
    modules = [Cut(4, 4) for _ in range(3)]
    x, target = torch.randn(4, 4), torch.randn(4, 4)
    with zbpipe.patch():
        schedule = schedule_of(modules)
        schedule.step(x, target=target)
        for module in modules[:2]:
            module.requires_grad_(False).how = "detach"
        nn.Sequential(*modules).zero_grad()
        schedule.step(x, target=target)
    assert modules[0].weight.grad is None and modules[2].weight.grad is not None


def parts(takes_grad=True):
    return nn.Linear(4, 4).requires_grad_(takes_grad), torch.randn(3, 4, requires_grad=takes_grad), torch.ones(3, 4)


def test_a_loop_of_ones_own_is_refused_as_an_ordinary_backward_is():
    stage, x, grad = parts()
    out = stage(x).detach()
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.backward([out], [grad])
    for weights in (stage.parameters(), None):
        with pytest.raises(ValueError, match="stage_outputs_or_loss: none has a history"):
            zbpipe.stage_backward_input([out, None], [grad, None], [x], weights)
    with pytest.raises(ValueError, match="stage_outputs_or_loss: none has a history"):
        zbpipe.stage_backward_input([out], [grad], [], stage.parameters())
    assert x.grad is None and stage.weight.grad is None


@pytest.mark.parametrize(
    ("outputs", "grads"),
    [
        ("cut, whole", "grad, grad"),  # an output without history beside another
        ("cut", "None"),  # a constant loss, or an output that nobody uses
        ("cut", None),
        ("None", "None"),
    ],
)
def test_constant_losses_and_unused_outputs_are_right(outputs, grads):
    stage, x, grad = parts()
    named = {"cut": stage(x).detach(), "whole": stage(x), "grad": grad, "None": None}
    listed = [named[name] for name in outputs.split(", ")]
    given = None if grads is None else [named[name] for name in grads.split(", ")]
    (got,), groups = zbpipe.stage_backward_input(listed, given, [x], stage.parameters())
    zbpipe.stage_backward_weight(stage.parameters(), groups)
    is_whole = "whole" in outputs
    assert (got is not None, stage.weight.grad is not None) == (is_whole, is_whole)


def test_a_frozen_stage_that_is_given_gradients_is_right():
    stage, x, grad = parts(takes_grad=False)
    assert zbpipe.stage_backward_input([stage(x)], [grad], [x], stage.parameters()) == ((None,), [])
