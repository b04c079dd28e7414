"""Losses that a user's last stage may give a zero-bubble schedule, beside an ordinary backward of the whole model.

One process has both stages. torch's own module gives a last stage no gradient whose input requires none.
"""

import copy

import pytest
import torch
from support.blocks import MICROBATCHES, ZERO_BUBBLE, Block, batch, loss_function
from support.pipelines import Model, OneAfterAnother, Pipeline, backwards
from torch import nn

import zbpipe

# Where a microbatch's loss is constant its gradient is None.
sends_none = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11's stage sends no gradient that is None")
ZBV = "ScheduleZBVZeroBubble"
pytestmark = pytest.mark.usefixtures("alone")


def check_steps(name, modules, loss_fn, prepare=lambda target: target, return_outputs=True):
    """Steps whose losses and gradients are those of ordinary backwards of a copy."""
    plain = OneAfterAnother(*copy.deepcopy(modules))
    line = Pipeline(name, modules).start(loss_fn)
    for step in range(2):
        x, target = batch(step)
        target, losses = prepare(target), []
        expected = backwards(plain, Model(loss=loss_fn), x, target)
        with zbpipe.patch():
            output = line.schedule.step(x, target=target, losses=losses, return_outputs=return_outputs)
        assert not return_outputs or not output.requires_grad
        torch.testing.assert_close(losses, [loss.detach() for loss in expected])
        got = {name: weight.grad for name, weight in nn.Sequential(*modules).named_parameters()}
        torch.testing.assert_close(got, {name: weight.grad for name, weight in plain.named_parameters()})


def masked(out, target):
    keep = target[:, 0] != -100
    return loss_function(out[keep], target[keep]) if keep.any() else torch.zeros((), dtype=out.dtype)


def one_zero():
    """One tensor is every masked microbatch's loss: told from a loss of an earlier step by having had no backward."""
    zero = torch.zeros((), dtype=torch.float64)

    def loss_fn(out, target):
        loss = masked(out, target)
        return loss if loss.requires_grad else zero

    return loss_fn


def mask(target):
    target = target.clone()
    target[2:4], target[-1] = -100, -100  # the second microbatch, and half of the last one
    return target


@sends_none
def test_microbatches_whose_labels_are_all_masked_and_whose_loss_is_one_tensor_train_nothing():
    """Others, frozen stages among them: test_models.py and test_differential.py."""
    check_steps(ZBV, [Block(), Block()], one_zero(), prepare=mask)


def squares(out, target):
    return nn.functional.mse_loss(out, target)  # saves the output


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
    line = Pipeline(ZBV, modules).start(squares)
    calls = []

    def maybe(module, args):
        calls.append(0)
        if len(calls) == 4:
            raise KeyError("planted")

    modules[1].register_forward_pre_hook(maybe)
    with zbpipe.patch():
        with pytest.raises(RuntimeError, match="failed to run forward"):
            line.step(*batch(0))
        for module in modules:
            module.zero_grad()
        with pytest.raises(
            RuntimeError,
            match=r"loss of stage 1, microbatch 0, has had its backward, in a step that failed; make a new sch",
        ):
            line.step(*batch(0))
        assert all(weight.grad is None for module in modules for weight in module.parameters())
    check_steps(ZBV, modules, squares)


NO_TENSORS = {
    "tuple": lambda out, target: (squares(out, target), 0),
    "dict": lambda out, target: {"loss": squares(out, target)},
    "NoneType": lambda out, target: None,
}


@pytest.mark.parametrize("shapes", ["learned", "given"])
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", *ZERO_BUBBLE])
@pytest.mark.parametrize("kind", NO_TENSORS)
def test_a_loss_function_that_returns_no_tensor_is_refused(name, kind, shapes):
    modules = [Block(), Block()]
    example = batch(0)[0].chunk(MICROBATCHES)[0]
    given = {"input_args": (example.clone(),), "output_args": (example.clone().requires_grad_(),)}
    line = Pipeline(name, modules, given=lambda i: given if shapes == "given" else {}).start(NO_TENSORS[kind])
    with zbpipe.patch(), pytest.raises(TypeError, match=rf"loss function returned a {kind} .*; expected a tensor"):
        line.step(*batch(0))
    assert all(weight.grad is None for weight in modules[1].parameters())
