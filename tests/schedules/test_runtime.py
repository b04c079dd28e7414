"""Schedules from files through torch's schedule runtime, stages with a dw_builder, and evaluation on a V."""

import functools

import pytest
import torch
from schedules.runtime_ranks import SCHEDULES, STAGES, Ordinary, reference
from support.blocks import STEPS, Block, batch, blocks
from support.oracle import wrong_on_torch
from support.processes import run_ranks

WORLD = 2
pytestmark = [pytest.mark.dist, pytest.mark.slow]
splits = wrong_on_torch("two weights that are summed get one .grad")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two processes run everything, once."""
    folder = tmp_path_factory.mktemp("runtime")
    run_ranks("schedules/runtime_ranks.py", WORLD, folder, timeout=400)
    return folder


def result(folder, name):
    """What the ranks recorded, together."""
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


expected = functools.cache(reference)


# By hand, a whole backward comes before the first W of each stage: the weights have gradients of their own then.
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n.startswith("by hand") else splits) for n in SCHEDULES])
def test_a_schedule_from_a_file_trains_as_unpipelined(name, folder):
    close(result(folder, name), expected(Block))


def test_stages_that_defer_their_own_weights_train_as_unpipelined(folder):
    close(result(folder, "dw_builder"), expected(Ordinary))


@splits
@pytest.mark.parametrize("kind", ["whole", "split"])
def test_a_program_may_run_forwards_and_overlapped_backwards_itself(kind, folder):
    got = result(folder, f"own functions, {kind}")
    assert sum(got.pop(("overlaps", rank)) for rank in range(WORLD)) > 0
    close(got, expected(Block))


@splits
def test_evaluations_between_steps_of_a_v_change_nothing(folder):
    got = result(folder, "evaluation")
    outputs = [got.pop((step, "evaluation", "")) for step in range(STEPS)]
    wanted = expected(Block)
    close(got, wanted)
    net = torch.nn.Sequential(*blocks(STAGES))
    with torch.no_grad():
        torch.testing.assert_close(outputs[0], net(batch(0)[0]))
