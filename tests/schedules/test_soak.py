"""A short run of soak.py, and that it finds what it looks for."""

import array

import pytest
from schedules import soak
from support import allocations
from support.oracle import needs_zbpipe

STEPS, EVERY = 60, 10
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_zbpipe,
    pytest.mark.skipif(allocations.COMPILER is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    soak.run(folder, STEPS, EVERY, timeout=400)
    return folder


def test_steps_among_faults_train_as_an_ordinary_training_and_nothing_grows(folder):
    wrong, figures = soak.differences(folder, STEPS, EVERY)
    assert wrong == []
    assert sum(seen["fired"] for seen in figures) == 5


def test_a_bit_of_a_loss_is_found(folder):
    file = folder / "losses.0"
    whole = file.read_bytes()
    losses = array.array("d", whole)
    losses[90] += 2e-15 * losses[90]
    try:
        file.write_bytes(losses.tobytes())
        assert soak.differences(folder, STEPS, EVERY)[0] == ["the loss of step 22, microbatch 2 differs"]
    finally:
        file.write_bytes(whole)


def test_four_bytes_are_found(tmp_path):
    soak.run(tmp_path, 12, 20, "leak", timeout=400)
    wrong, _ = soak.differences(tmp_path, 12, 20)
    assert any("bytes of tensors" in sentence for sentence in wrong)


@pytest.mark.long
def test_ten_thousand_steps():
    assert soak.main() == 0
