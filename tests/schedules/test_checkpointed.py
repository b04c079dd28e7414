"""Whole steps of checkpointed stages, with the policy that nobody chose: never more memory than torch's module takes."""

import pytest
import torch
from schedules.checkpoint_ranks import BLOCKS, MICROBATCHES, ZERO_BUBBLE, data, modules
from support.processes import folder_of, results
from torch import nn

WORLD = 2

folder = folder_of("schedules/checkpoint_ranks.py", WORLD)
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.parametrize("name", ZERO_BUBBLE)]


def test_peak_is_below_torchs(name, folder):
    ours, theirs = (
        [rank["peak"] for rank in results(folder, f"{name}.{module}", WORLD)] for module in ("zbpipe", "torch")
    )
    assert all(peak < limit for peak, limit in zip(ours, theirs, strict=True)), (ours, theirs)


def test_each_block_is_computed_again_once(name, folder):
    for rank in results(folder, f"{name}.zbpipe", WORLD):
        assert rank["computed"] == 2 * (2 * BLOCKS * MICROBATCHES)


def test_gradients_are_those_of_the_unpipelined_model(name, folder):
    net = nn.Sequential(*modules(2 * WORLD))
    x, target = data()
    for _ in range(2):
        for part, goal in zip(x.split(1), target.split(1), strict=True):
            nn.functional.mse_loss(net(part), goal).backward()
    got = {key: grad for rank in results(folder, f"{name}.zbpipe", WORLD) for key, grad in rank["grads"].items()}
    assert got.keys() == dict(net.named_parameters()).keys()
    torch.testing.assert_close(got, {key: weight.grad for key, weight in net.named_parameters()})
