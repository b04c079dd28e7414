"""Stages that are thawed after torch's stages have learnt, in the first step, which outputs take a gradient."""

from contextlib import nullcontext

import pytest
import torch
from support.pipelines import Pipeline
from torch import nn

import zbpipe

pytestmark = pytest.mark.usefixtures("alone")
LEARNS = torch.__version__ >= (2, 12)  # torch 2.11's stages ask in every step


def schedule_of(modules):
    return Pipeline("ScheduleInterleavedZeroBubble", modules).start(nn.functional.mse_loss, 2).schedule


# The second stage's gradient is asked for in an I, the first one's in a whole backward.
@pytest.mark.parametrize("thawed", [1, 0])
def test_a_stage_that_was_thawed_is_named_and_a_new_schedule_trains_it(thawed):
    modules = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(i > thawed) for i in range(3)]
    x, target = torch.randn(4, 4), torch.randn(4, 4)
    words = rf"any of the 1 outputs of stage {thawed} that require one\. torch's stages learn in their first step"
    with zbpipe.patch():
        schedule = schedule_of(modules)
        schedule.step(x, target=target)
        modules[thawed].requires_grad_(True)
        with pytest.raises(ValueError, match=words) if LEARNS else nullcontext():
            schedule.step(x, target=target)
        for module in modules:
            module.zero_grad()
        schedule_of(modules).step(x, target=target)  # as it says
    whole = nn.Sequential(*modules)
    weights = list(modules[thawed].parameters())
    got = [weight.grad for weight in weights]
    losses = [nn.functional.mse_loss(whole(a), b) for a, b in zip(x.chunk(2), target.chunk(2), strict=True)]
    torch.testing.assert_close(got, list(torch.autograd.grad(sum(losses), weights)))
