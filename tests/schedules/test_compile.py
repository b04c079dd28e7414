"""Schedules that split the backward, on compiled stages over two gloo processes, against the model in one piece."""

import pytest
import torch
from schedules.compile_ranks import MICROBATCHES, SPLIT, STEPS, reference
from support.blocks import SCHEDULES
from support.processes import run_ranks

WORLD = 2
pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two processes run all schedules, once."""
    folder = tmp_path_factory.mktemp("compiled")
    run_ranks("schedules/compile_ranks.py", WORLD, folder)
    return folder


def results(folder, name):
    if not all((folder / f"{name}.{rank}").exists() for rank in range(WORLD)):
        said = "\n".join((folder / f"output.{rank}").read_text()[-3000:] for rank in range(WORLD))
        pytest.fail(f"{name} did not finish\n{said}")
    return [torch.load(folder / f"{name}.{rank}") for rank in range(WORLD)]


@pytest.mark.parametrize("name", SPLIT)
def test_compiled_stages(name, folder):
    """Losses, gradients and, after the optimizer, weights of both steps; and the split did take place."""
    ranks = results(folder, name)
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
