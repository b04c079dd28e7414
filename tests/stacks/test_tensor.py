"""Stages with DTensor weights under the zero-bubble schedules: gradients, collectives, products in place."""

import pytest
from stacks import tensor_cases
from support.stacks.judge import Runs, parameters

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tensor_cases, tmp_path_factory)


@pytest.mark.parametrize("case", parameters(tensor_cases.CASES))
def test_gradients_and_collectives(case, runs):
    runs.judge(case)
