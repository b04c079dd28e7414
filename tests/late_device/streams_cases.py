"""Every scenario on every kind of stage, in every order: to the bit what the CPU gives, with and without the split."""

import pytest
from support import late
from support.late_runs import SCENARIOS, check_in_every_order, results_of
from support.late_stages import STAGES


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("name", STAGES)
def test_scenario(name, scenario, split):
    check_in_every_order(scenario, STAGES[name], seeds=3, split=split)


def test_all_memory_comes_back():
    before = late.bytes_in_use()
    for scenario in SCENARIOS:
        results_of(scenario, "late", STAGES["mlp"])
    late.finish()
    assert late.bytes_in_use() == before
