"""Stages in DistributedDataParallel under the zero-bubble schedules: gradients, and when what is reduced."""

import pytest
from stacks import ddp_cases
from support.stacks.judge import Runs, parameters

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(ddp_cases, tmp_path_factory)


@pytest.mark.parametrize("case", parameters(ddp_cases.CASES))
def test_gradients_and_reductions(case, runs):
    runs.judge(case)
