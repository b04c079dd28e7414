"""The model of docs/what_to_expect.md, beside a simulation of torch's own tables of actions."""

import pytest
from bubbles import SCHEDULES, bubble, model
from stage_zero import Costs, orders, play

RATIOS = [(1, 1, 1), (1, 1.2, 0.8), (1, 1.3, 1.2), (1, 2, 0.8), (1, 2.3, 0.4), (1, 1.5, 0.5), (0.9, 1, 0.6)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_model_is_the_length_of_torchs_schedule(schedule, ranks):
    for microbatches in (2 * ranks, 4 * ranks):
        rows = orders(schedule, SCHEDULES[schedule], ranks, microbatches)
        for costs in RATIOS:
            length, waits, _ = play(rows, Costs(*costs, 0, 0, 0), split=False)
            assert model(schedule, costs, ranks, microbatches) == pytest.approx(length)
            assert bubble(schedule, *costs, ranks) / length == pytest.approx(waits)
