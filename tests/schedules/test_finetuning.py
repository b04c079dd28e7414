"""A fine-tuner's cases under the zero-bubble schedules: frozen stages, LoRA on some, losses that are constant for a
microbatch or save the stage's output. On zbpipe and on torch's own module, which trains some of them wrong, silently."""

import functools

import pytest
import torch
from schedules.finetuning_ranks import CASES, FROM_THE_FIRST_STEP_ON, RUNS, STEPS, build, lane_of, reference
from support.oracle import needs_zbpipe
from support.processes import assert_close, lanes_of, together

WORLD = 2
pytestmark = [pytest.mark.dist, pytest.mark.slow, needs_zbpipe]  # runs both modules itself

# Up to torch 2.12 a stage sends no gradient that is None: it fails on constant losses, whatever the module. What newer ones
# train wrong, 2.11 trains right, asking for a gradient of every input; 2.12 fails there too.
OLDER = torch.__version__ < (2, 13)
FAILS_WITHOUT_GRADIENTS = OLDER and torch.__version__ >= (2, 12)
CONSTANT = [case for case, (_, _, microbatches) in CASES.items() if microbatches]

# No input of a stage requires a gradient, and its weights do: torch's own I and W then give them none, or under
# ScheduleDualPipeV, which does not split every backward, some microbatches' alone. Measured on torch 2.13 and 2.15.
WRONG_ON_TORCH = {
    "the last stage alone",
    "the last stage alone, smooth loss",
    "the last stage alone, a loss of the output itself",
    "the last stage alone, a computed target",
    "the last two stages",
    "all but the first stage",
    "the second stage alone",
    "LoRA on the last stage",
    "LoRA on the last two stages",
    "the last two stages, a constant loss",
    "LoRA on the last two stages, a constant loss",
}


def is_refused(case):
    return (OLDER and case in CONSTANT) or (FAILS_WITHOUT_GRADIENTS and case in WRONG_ON_TORCH)


LAST = {
    "ScheduleInterleavedZeroBubble": 1,
    "ScheduleZBVZeroBubble": 0,
    "ScheduleDualPipeV": 0,
}  # rank of the last stage
NEWER = torch.__version__ >= (2, 16)

folders = lanes_of("schedules/finetuning_ranks.py", WORLD, timeout=600)
expected = functools.cache(reference)


def result(folders, schedule, module, case):
    return together(folders(lane_of(case, schedule)), f"{schedule} {module} {case}", WORLD)


def of_runs(is_one):
    """A test's parameters: the runs of these cases."""
    runs = [(run, lane_of(*run)) for run in RUNS if is_one(run[0])]
    marked = [pytest.param(*run, marks=[pytest.mark.long] if lane == "long" else []) for run, lane in runs]
    return pytest.mark.parametrize(("case", "schedule"), marked)


def skip_what_is_refused(case):
    if is_refused(case):
        pytest.skip("torch up to 2.12 sends no gradient None")


@of_runs(lambda case: True)
def test_it_trains_as_it_does_unpipelined(case, schedule, folders):
    skip_what_is_refused(case)
    assert_close(result(folders, schedule, "zbpipe", case), expected(case))


@of_runs(lambda case: (OLDER or case not in WRONG_ON_TORCH) and case != FROM_THE_FIRST_STEP_ON)
def test_torchs_own_module_trains_it_as_well(case, schedule, folders):
    skip_what_is_refused(case)
    assert_close(result(folders, schedule, "torch", case), expected(case))


@pytest.mark.skipif(NEWER or OLDER, reason="known of torch 2.13 to 2.15")
@of_runs(lambda case: case in WRONG_ON_TORCH)
def test_torchs_own_module_trains_it_wrong_silently(case, schedule, folders):
    got, wanted = result(folders, schedule, "torch", case), expected(case)
    grads = [what for what in wanted if what[:2] == (0, "grad")]
    assert any(not torch.allclose(got[what], wanted[what]) for what in grads)


@pytest.mark.skipif(NEWER, reason="known of torch 2.11 to 2.15")
@of_runs(lambda case: case == FROM_THE_FIRST_STEP_ON)
def test_torchs_own_module_refuses_a_constant_first_loss(case, schedule, folders):
    folder = folders(lane_of(case, schedule))
    said = (folder / f"{schedule} torch {case}.{LAST[schedule]}.failed").read_text()
    assert "element 0 of tensors does not require grad" in said


@pytest.mark.parametrize("case", CASES)
def test_training_moves_what_is_trained(case):
    """Else equal weights would say nothing."""
    before = {f"{i}.{name}": w for i, part in enumerate(build(case)) for name, w in part.named_parameters()}
    for name, w in before.items():
        assert torch.equal(expected(case)[STEPS, "weight", name], w) != w.requires_grad, name
