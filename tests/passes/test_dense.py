"""Small dense programs: W and an ordinary backward give the same bits. One that fails prints as the code to run it again."""

import os

import pytest
from support.dense import draw
from support.dense_runs import judge
from support.oracle import needs_zbpipe

pytestmark = needs_zbpipe

BATCH = 10_000
BATCHES = 10 * int(os.environ.get("ZBPIPE_PROGRAMS", "20000")) // BATCH  # ten for each of test_programs.py's


def judge_all(seeds):
    assert sum(judge(draw(seed)) for seed in seeds) > 0.95 * len(seeds)  # others have no backward


@pytest.mark.parametrize("batch", range(6))
def test_dense_programs(batch):
    judge_all(range(batch * 500, (batch + 1) * 500))


@pytest.mark.long
@pytest.mark.parametrize("batch", range(BATCHES))
def test_more_dense_programs(batch):
    judge_all(range(batch * BATCH, (batch + 1) * BATCH))
