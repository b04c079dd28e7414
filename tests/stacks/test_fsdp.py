"""Stages that fully_shard has sharded, under the zero-bubble schedules: gradients, collectives, memory of the weights."""

import fsdp_cases
import pytest
from judge import Runs, parameters

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs("fsdp_cases", fsdp_cases.CASES, tmp_path_factory)


@pytest.mark.parametrize("case", parameters(fsdp_cases.CASES))
def test_gradients_and_collectives(case, runs):
    runs.judge(case)
