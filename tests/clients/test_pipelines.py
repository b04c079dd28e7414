"""Pipelines that torch's tracer cut, and training that is saved on one module and goes on on the other."""

import functools

import pytest
import torch
from clients.pipeline_ranks import MODULES, RESUMED, STEPS, TRACED, reference
from support.oracle import needs_zbpipe
from support.processes import run_ranks

WORLD = 2
pytestmark = [pytest.mark.dist, pytest.mark.slow, needs_zbpipe]  # runs both modules itself


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two processes run everything, once."""
    folder = tmp_path_factory.mktemp("pipelines")
    run_ranks("clients/pipeline_ranks.py", WORLD, folder, timeout=400)
    return folder


@functools.cache
def expected():
    return reference()


def result(folder, name):
    together = {}
    for rank in range(WORLD):
        file = folder / f"{name}.{rank}"
        if not file.exists():
            failed = folder / f"{name}.{rank}.failed"
            said = failed if failed.exists() else folder / f"output.{rank}"
            pytest.fail(f"{name} did not finish\n{said.read_text()[-3000:]}")
        together.update(torch.load(file))
    return together


def close(got, wanted):
    assert got.keys() == wanted.keys()
    for what, value in wanted.items():
        torch.testing.assert_close(got[what], value, msg=lambda text, what=what: f"{what}: {text}")


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("schedule", TRACED)
def test_traced_stages_train_as_the_model_does(schedule, module, folder):
    close(result(folder, f"traced {schedule} {module}"), expected())


@pytest.mark.parametrize(("schedule", "shape", "first", "second"), RESUMED)
def test_training_goes_on_where_it_was_saved(schedule, shape, first, second, folder):
    halves = [result(folder, f"resumed {schedule} {first} {second} {part}") for part in (0, 1)]
    assert {what[0] for what in halves[0]} == set(range(STEPS // 2))
    close({**halves[0], **halves[1]}, expected())
