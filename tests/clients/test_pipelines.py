"""Pipelines that torch's tracer cut, and training that is saved on one module and goes on on the other."""

import functools

import pytest
from clients.pipeline_ranks import RESUMED, STEPS, TRACED, reference
from support.oracle import needs_zbpipe
from support.processes import assert_close, folder_of, together
from support.ranks import MODULES

WORLD = 2
pytestmark = [pytest.mark.dist, pytest.mark.slow, needs_zbpipe]  # runs both modules itself

folder = folder_of("clients/pipeline_ranks.py", WORLD, timeout=400)
expected = functools.cache(reference)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("schedule", TRACED)
def test_traced_stages_train_as_the_model_does(schedule, module, folder):
    assert_close(together(folder, f"traced {schedule} {module}", WORLD), expected())


@pytest.mark.parametrize(("schedule", "shape", "first", "second"), RESUMED)
def test_training_goes_on_where_it_was_saved(schedule, shape, first, second, folder):
    halves = [together(folder, f"resumed {schedule} {first} {second} {part}", WORLD) for part in (0, 1)]
    assert {what[0] for what in halves[0]} == set(range(STEPS // 2))
    assert_close({**halves[0], **halves[1]}, expected())
