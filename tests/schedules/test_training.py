"""Mixed precision and optimizers around the zero-bubble schedules, against the same recipe on the unpipelined model."""

import functools

import pytest
import torch
from schedules.training_ranks import MICROBATCHES, RECIPES, STEPS, ZERO_BUBBLE, Unpipelined, run
from support.oracle import wrong_on_torch
from support.processes import folder_of, results

WORLD = 2
pytestmark = [pytest.mark.dist, pytest.mark.slow]

folder = folder_of("schedules/training_ranks.py", WORLD, timeout=400)


def result(folder, schedule, recipe):
    """What the ranks recorded, together."""
    together = {}
    for part in results(folder, f"{schedule} {recipe}", WORLD):
        for what, value in part.items():
            assert what not in together or together[what] == value, f"the ranks differ in {what}"
            together[what] = value
    return together


@functools.cache
def expected(recipe):
    return run(recipe, Unpipelined())


wrong = {
    "optimizer in backward": wrong_on_torch("no post-accumulate hook fires in W"),
    "bf16 weights, float32 buffers": wrong_on_torch("there is no main_grad"),
}


@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
@pytest.mark.parametrize("recipe", [pytest.param(recipe, marks=wrong.get(recipe, ())) for recipe in RECIPES])
def test_a_recipe_trains_as_it_does_unpipelined(recipe, schedule, folder):
    got, wanted = result(folder, schedule, recipe), expected(recipe)
    assert got.keys() == wanted.keys()
    for what, value in wanted.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(got[what], value, msg=lambda text, what=what: f"{what}: {text}")
        else:
            assert got[what] == value, what


def test_a_weights_hook_fires_once_per_microbatch():
    fired = {what[2]: count for what, count in expected("optimizer in backward").items() if what[:2] == (1, "fired")}
    assert set(fired.values()) == {STEPS * MICROBATCHES}


def test_the_scaled_recipe_skips_the_step_that_overflowed():
    seen = expected("autocast fp16 in the stage, GradScaler")
    assert [seen[step, "scale", ""] for step in range(3)] == [64.0, 32.0, 32.0]
    name = "3.block.down.weight"
    assert torch.equal(seen[0, "weight", name], seen[1, "weight", name])
    assert not torch.equal(seen[1, "weight", name], seen[2, "weight", name])


def test_the_clipped_recipe_clips():
    assert expected("clipping over ranks")[0, "norm", ""] > 0.5
