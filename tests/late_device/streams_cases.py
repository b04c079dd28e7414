"""Every scenario on every kind of stage, in every order: to the bit what the CPU gives, with and without the split."""

import functools

import pytest
import torch
from support import late
from support.late_runs import SCENARIOS, Run, at_once, check_in_every_order, results_of
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


@pytest.mark.parametrize("aside", [False, True], ids=["on one stream", "the forward aside"])
@pytest.mark.parametrize("name", ["mlp", "normed", "batched", "multiplied"])
def test_events_of_a_weight_pass_with_several_groups(name, aside):
    """Two for each pair of streams, whatever the number of groups: the caller before the other one, and behind it. What
    the engine asks for is no more than in an ordinary backward."""
    events = {}
    for split in (False, True):
        late.begin()
        run = Run("late", STAGES[name], split=split)
        side = run.stream()
        with side if aside else run.main:
            run.forward(0)
        run.wait(side)
        for step in (run.input, run.weight):
            with late.events() as events[split, step.__name__]:
                step(0)
    whole, of_input, of_weight = events[False, "weight"], events[True, "input"], events[True, "weight"]
    assert len(run.groups[0]) > 1
    assert list(of_weight.between().values()) == [2] * aside, of_weight
    assert len(of_weight.records) == 2 * aside
    assert not of_input.waits
    assert len(of_weight.of_libtorch) <= len(whole.of_libtorch)
    assert of_input.host_waits == of_weight.host_waits == 0
