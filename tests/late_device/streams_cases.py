"""Every scenario on every kind of stage, in every order: to the bit what the CPU gives, with and without the split."""

import functools

import pytest
import torch
from support import late
from support.late_runs import SCENARIOS, at_once, check_in_every_order, results_of
from support.late_stages import STAGES, WIDTH, of


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("name", STAGES)
def test_scenario(name, scenario, split):
    check_in_every_order(scenario, STAGES[name], seeds=3, split=split)


def often(m, x):
    """Its weight is owed many gradients; the node that I's walk meets first is the last of a backward."""
    parts = [torch.sin(x * m.scale + k) for k in range(300)]
    return functools.reduce(lambda rest, part: part + rest, reversed(parts))


def test_sums_are_in_order_whichever_thread_is_the_faster():
    check_in_every_order(at_once, of(often, scale=(WIDTH,)), seeds=10)


def test_all_memory_comes_back():
    before = late.bytes_in_use()
    for scenario in SCENARIOS:
        results_of(scenario, "late", STAGES["mlp"])
    late.finish()
    assert late.bytes_in_use() == before
