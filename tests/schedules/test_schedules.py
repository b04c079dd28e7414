"""torch's schedules over two gloo processes, patched, against the same model unpipelined."""

import pytest
import torch
from support.blocks import SCHEDULES, reference
from support.oracle import wrong_on_torch
from support.processes import folder_of, results

WORLD = 2
pytestmark = [pytest.mark.dist, pytest.mark.slow]

folder = folder_of("schedules/schedule_ranks.py", WORLD)


def expected(name):
    per_rank, _ = SCHEDULES[name]
    return reference(WORLD * per_rank)


splits = wrong_on_torch("two weights that are summed get one .grad")
zero_bubble = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


@pytest.mark.parametrize("name", [pytest.param(n, marks=splits if n in zero_bubble else ()) for n in SCHEDULES])
def test_weight_gradients_equal_the_unpipelined_models(name, folder):
    ranks = results(folder, name, WORLD)
    for step, (_, wanted) in enumerate(expected(name)):
        got = {weight: grad for rank in ranks for weight, grad in rank[step][1].items()}
        assert got.keys() == wanted.keys()
        for weight, grad in wanted.items():
            torch.testing.assert_close(got[weight], grad, msg=f"step {step}, weight {weight}")


@pytest.mark.parametrize("name", SCHEDULES)
def test_losses_equal_the_unpipelined_models(name, folder):
    ranks = results(folder, name, WORLD)
    for step, (wanted, _) in enumerate(expected(name)):
        got = [loss for rank in ranks for loss in rank[step][0]]
        torch.testing.assert_close(got, wanted)
