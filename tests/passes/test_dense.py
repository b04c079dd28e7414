"""Small dense programs: W and an ordinary backward give the same bits. One that fails prints as the code that runs it."""

import os

import pytest
from support.dense import draw
from support.dense_runs import judge
from support.oracle import needs_zbpipe

import zbpipe

pytestmark = [pytest.mark.drops_groups, needs_zbpipe, pytest.mark.filterwarnings("ignore:grad and param do not obey")]

BATCH = 10_000
BATCHES = 10 * int(os.environ.get("ZBPIPE_PROGRAMS", "20000")) // BATCH  # ten for each of test_programs.py


def judge_all(seeds):
    judged = sum(judge(draw(seed)) for seed in seeds)
    assert judged > 0.98 * len(seeds)  # the others have no backward


@pytest.mark.parametrize("batch", range(6))
def test_dense_programs(batch):
    judge_all(range(batch * 500, (batch + 1) * 500))


@pytest.mark.long
@pytest.mark.parametrize("batch", range(BATCHES))
def test_more_dense_programs(batch):
    judge_all(range(batch * BATCH, (batch + 1) * BATCH))


# Each of these faults must be found.


def reverses_the_microbatches(w, weights, groups, **choices):
    return w(weights, list(reversed(groups)), **choices)


def forgets_a_group(w, weights, groups, **choices):
    return w(weights, groups[1:], **choices)


def moves_gradients(w, weights, groups, **choices):
    before = {weight: weight.grad for weight in weights or ()}
    w(weights, groups, **choices)
    for weight, grad in before.items():
        if grad is not None and weight.grad is grad:
            weight.grad = grad.clone()


FAULTS = (reverses_the_microbatches, forgets_a_group, moves_gradients)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_found(fault, monkeypatch):
    w = zbpipe.stage_backward_weight
    monkeypatch.setattr(zbpipe, "stage_backward_weight", lambda *given, **choices: fault(w, *given, **choices))
    with pytest.raises(AssertionError):
        judge_all(range(500))
