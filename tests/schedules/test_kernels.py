"""Stages of custom kernels under real schedules: gradients of an unpipelined model of plain layers, work in W."""

import collections

import pytest
import torch
from schedules.kernels_ranks import KINDS, MICROBATCHES, SCHEDULES, STEPS, reference
from support.oracle import needs_zbpipe
from support.processes import folder_of, results

WORLD = 2
pytestmark = [pytest.mark.dist, pytest.mark.slow, needs_zbpipe]

folder = folder_of("schedules/kernels_ranks.py", WORLD)


@pytest.mark.parametrize("name", SCHEDULES)
def test_weight_gradients_equal_those_of_plain_layers_unpipelined(name, folder):
    ranks = results(folder, name, WORLD)
    for step, wanted in enumerate(reference(2 * WORLD)):
        got = {weight: grad for steps, _ in ranks for weight, grad in steps[step].items()}
        assert got.keys() == wanted.keys()
        for weight, grad in wanted.items():
            torch.testing.assert_close(got[weight], grad, msg=f"step {step}, weight {weight}")


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_piece_of_work_is_done_once_and_in_the_weight_pass_where_the_schedule_has_one(name, folder):
    for _, calls in results(folder, name, WORLD):
        for layer, phases in calls.items():
            # Before the first step, torch's stages run a backward for their inputs alone to learn its shapes.
            counts = collections.Counter(phase for phase in phases if phase != "outside")
            assert sum(counts.values()) == MICROBATCHES * STEPS, f"layer {layer} ({KINDS[int(layer[-1])]}): {counts}"
            if KINDS[int(layer[-1])] == "gated":  # the weight's gradient is needed in I
                assert counts.keys() <= {"stage_backward_input", "stage_backward"}
                continue
            assert counts.keys() <= {"stage_backward_weight", "stage_backward"}
            assert counts["stage_backward_weight"] > 0 or layer.startswith("0.")
            if not layer.startswith("0.") and name != "ScheduleDualPipeV":
                assert counts.keys() == {"stage_backward_weight"}
