"""Stages that fully_shard has sharded, under the zero-bubble schedules: gradients, collectives, memory of the weights."""

import pytest
from stacks import fsdp_cases
from support.stacks.judge import Runs, parameters

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(fsdp_cases, tmp_path_factory)


@pytest.mark.parametrize("case", parameters(fsdp_cases.CASES))
def test_gradients_and_collectives(case, runs):
    runs.judge(case)
