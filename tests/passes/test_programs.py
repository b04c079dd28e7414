"""Random autograd programs, split and whole. What fails is printed as a program to paste into `judge`."""

import itertools
import os
import warnings

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from support.oracle import needs_zbpipe
from support.program_runs import Passes, judge
from support.programs import COMPILED, programs

pytestmark = [pytest.mark.drops_groups, needs_zbpipe, pytest.mark.usefixtures("quick_collections")]

bounded = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
BATCH = 200
BATCHES = int(os.environ.get("ZBPIPE_PROGRAMS", "20000")) // BATCH


@pytest.fixture(autouse=True)
def _quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a program may well do what torch warns of
        yield


def check(program, passes=None):
    assume(judge(program, passes))


# A failure is not made smaller here: that takes as long as faulthandler lets a test take. The long tests do it.
@settings(bounded, max_examples=150, phases=[Phase.generate])
@given(programs())
def test_random_programs(program):
    check(program)


@settings(bounded, max_examples=8, phases=[Phase.generate])
@given(programs(most_lines=4, most_microbatches=2, regions=COMPILED))
def test_random_programs_with_compiled_regions(program):
    torch.compiler.reset()
    check(program)


@pytest.mark.long
@pytest.mark.parametrize("batch", range(BATCHES))
def test_more_random_programs(batch):
    @seed(batch)
    @settings(bounded, derandomize=False, max_examples=BATCH, print_blob=False)
    @given(programs())
    def run(program):
        check(program)

    run()


@pytest.mark.long
@settings(bounded, derandomize=False, max_examples=300)
@given(programs(most_microbatches=2, regions=COMPILED))
def test_more_random_programs_with_compiled_regions(program):
    torch.compiler.reset()
    check(program)


# Each of these faults must be found: by what the random programs compare, within the ordinary run's number of them.


class ForgetsAGroup(Passes):
    def stage_backward_weight(self, weights, groups):
        return super().stage_backward_weight(weights, groups[:-1])


class AfterTheWeightPass(Passes):
    def stage_backward_weight(self, weights, groups):
        weights = list(weights)
        super().stage_backward_weight(weights, groups)
        self.change(weights, [w for w in weights if w.grad is not None])


class OffByOneBit(AfterTheWeightPass):
    def change(self, weights, with_grad):
        for w in with_grad:
            first = w.grad.view(-1)[0]
            first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))


class AddsInTheInputPass(Passes):
    def stage_backward_input(self, outputs, grads, inputs, weights):
        weights = list(weights)
        for w in weights:
            if w.requires_grad and w.grad is None:
                w.grad = torch.zeros_like(w)
        return super().stage_backward_input(outputs, grads, inputs, weights)


class KeepsAnOutput(Passes):
    def stage_backward_input(self, outputs, grads, inputs, weights):
        self.kept = [*getattr(self, "kept", []), *outputs]
        return super().stage_backward_input(outputs, grads, inputs, weights)


class CallsHooksTwice(AfterTheWeightPass):
    def change(self, weights, with_grad):
        for w in weights:
            for hook in (w._post_accumulate_grad_hooks or {}).values():
                hook(w)


class GivesOneGradientToTwoWeights(AfterTheWeightPass):
    def change(self, weights, with_grad):
        for one, other in itertools.pairwise(with_grad):
            if torch.equal(one.grad, other.grad):
                one.grad = other.grad


class ChangesItsInput(Passes):
    def stage_backward_input(self, outputs, grads, inputs, weights):
        result = super().stage_backward_input(outputs, grads, inputs, weights)
        with torch.no_grad():
            for x in inputs:
                x.add_(0)
        return result


class ReturnsABuffer(Passes):
    """The next I writes into the inputs' gradients that this one returned."""

    def stage_backward_input(self, outputs, grads, inputs, weights):
        dinputs, groups = super().stage_backward_input(outputs, grads, inputs, weights)
        self.buffers = getattr(self, "buffers", None) or [None if d is None else d.clone() for d in dinputs]
        pairs = zip(dinputs, self.buffers, strict=True)
        return tuple(None if d is None or b is None else b.copy_(d) for d, b in pairs), groups


class ForgetsWithinAnotherBackward(Passes):
    def stage_backward_weight(self, weights, groups):
        is_within = torch._C._current_graph_task_id() != -1
        return super().stage_backward_weight(weights, groups[:-1] if is_within else groups)


FAULTS = [
    *(ForgetsAGroup, OffByOneBit, AddsInTheInputPass, KeepsAnOutput, CallsHooksTwice, GivesOneGradientToTwoWeights),
    *(ChangesItsInput, ReturnsABuffer, ForgetsWithinAnotherBackward),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault):
    @settings(bounded, max_examples=150, phases=[Phase.generate], report_multiple_bugs=False)
    @given(programs())
    def run(program):
        check(program, fault())

    with pytest.raises(AssertionError):
        run()
