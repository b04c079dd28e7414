"""Schedules from files through torch's schedule runtime, stages with a dw_builder, and evaluation on a V."""

import functools

import pytest
import torch
from schedules.runtime_ranks import SCHEDULES, STAGES, Ordinary, reference
from support.blocks import STEPS, Block, batch, blocks
from support.oracle import wrong_on_torch
from support.processes import assert_close, folder_of, together

WORLD = 2
pytestmark = [pytest.mark.dist, pytest.mark.slow]
splits = wrong_on_torch("two weights that are summed get one .grad")

folder = folder_of("schedules/runtime_ranks.py", WORLD, timeout=400)
expected = functools.cache(reference)


# By hand, a whole backward comes before the first W of each stage: the weights have gradients of their own then.
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n.startswith("by hand") else splits) for n in SCHEDULES])
def test_a_schedule_from_a_file_trains_as_unpipelined(name, folder):
    assert_close(together(folder, name, WORLD), expected(Block))


def test_stages_that_defer_their_own_weights_train_as_unpipelined(folder):
    assert_close(together(folder, "dw_builder", WORLD), expected(Ordinary))


@splits
@pytest.mark.parametrize("kind", ["whole", "split"])
def test_a_program_may_run_forwards_and_overlapped_backwards_itself(kind, folder):
    got = together(folder, f"own functions, {kind}", WORLD)
    assert sum(got.pop(("overlaps", rank)) for rank in range(WORLD)) > 0
    assert_close(got, expected(Block))


@splits
def test_evaluations_between_steps_of_a_v_change_nothing(folder):
    got = together(folder, "evaluation", WORLD)
    outputs = [got.pop((step, "evaluation", "")) for step in range(STEPS)]
    wanted = expected(Block)
    assert_close(got, wanted)
    net = torch.nn.Sequential(*blocks(STAGES))
    with torch.no_grad():
        torch.testing.assert_close(outputs[0], net(batch(0)[0]))
