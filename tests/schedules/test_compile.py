"""Schedules that split the backward, on compiled stages over two gloo processes, against the model in one piece."""

import pytest
import torch
from schedules.compile_ranks import MICROBATCHES, SPLIT, STEPS, reference
from support.blocks import SCHEDULES
from support.processes import folder_of, results

WORLD = 2
pytestmark = [pytest.mark.dist, pytest.mark.slow]

folder = folder_of("schedules/compile_ranks.py", WORLD)


@pytest.mark.parametrize("name", SPLIT)
def test_compiled_stages(name, folder):
    """Losses, gradients and, after the optimizer, weights of both steps; and the split did take place."""
    ranks = results(folder, name, WORLD)
    stages = WORLD * SCHEDULES[name][0]
    for step, (losses, wanted) in enumerate(reference(stages)):
        torch.testing.assert_close([loss for steps, _, _ in ranks for loss in steps[step][0]], losses)
        got = {weight: values for steps, _, _ in ranks for weight, values in steps[step][1].items()}
        assert got.keys() == wanted.keys()
        for weight, values in wanted.items():
            torch.testing.assert_close(got[weight], values, msg=f"step {step}, gradient or value of {weight}")
    calls = sum(calls for _, calls, _ in ranks)
    whole = 0 if name != "ScheduleDualPipeV" else MICROBATCHES * STEPS  # it splits only some microbatches
    assert calls >= (stages - 1) * MICROBATCHES * STEPS - whole * (stages - 1) + (1 if whole else 0)
    assert not [line for _, _, lines in ranks for line in lines if "is not split" in line]
