"""Models that others wrote, cut into stages and trained under ZBV, on zbpipe and on torch's own module."""

import functools
import importlib.util

import pytest
import torch
from model_ranks import HUGGING_FACE, MODELS, STEPS, reference
from oracle import needs_zbpipe
from processes import run_ranks

WORLD = 2
pytestmark = [pytest.mark.dist, pytest.mark.slow, needs_zbpipe]  # runs both modules itself
NO_TRANSFORMERS = importlib.util.find_spec("transformers") is None
MODEL = [
    pytest.param(name, marks=pytest.mark.skipif(name in HUGGING_FACE and NO_TRANSFORMERS, reason="needs transformers"))
    for name in MODELS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two processes train all models on both modules, once."""
    folder = tmp_path_factory.mktemp("models")
    run_ranks("model_ranks.py", WORLD, folder, timeout=400)
    return folder


def result(folder, name, module):
    """What the ranks' processes left, together."""
    together = {}
    for rank in range(WORLD):
        file = folder / f"{name} {module}.{rank}"
        if not file.exists():
            failed = folder / f"{name} {module}.{rank}.failed"
            said = failed if failed.exists() else folder / f"output.{rank}"
            pytest.fail(f"{name} did not finish on {module}\n{said.read_text()[-3000:]}")
        together.update(torch.load(file))
    return together


def close(got, wanted):
    assert got.keys() == wanted.keys()
    for what, value in wanted.items():
        torch.testing.assert_close(got[what], value, msg=lambda text, what=what: f"{what}: {text}")


@functools.cache
def expected(name):
    return reference(name)


@pytest.mark.parametrize("name", MODEL)
def test_a_model_trains_as_it_does_unpipelined(name, folder):
    close(result(folder, name, "zbpipe"), expected(name))


@pytest.mark.parametrize("name", MODEL)
def test_a_model_trains_as_on_torchs_own_module(name, folder):
    close(result(folder, name, "zbpipe"), result(folder, name, "torch"))


@pytest.mark.parametrize("name", MODEL)
def test_training_moves_the_losses(name):
    """Else equal losses would say nothing."""
    first, last = (
        sum(value for what, value in expected(name).items() if what[:2] == (step, "loss")) for step in (0, STEPS - 1)
    )
    assert abs(first - last) > 1e-3 * first
