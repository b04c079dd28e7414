"""Compiled stages under the zero-bubble schedules that are also parallel in another way."""

import pytest
from stacks import compile_cases
from support.stacks.judge import Runs, parameters

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(compile_cases, tmp_path_factory)


@pytest.mark.parametrize("case", parameters(compile_cases.CASES))
def test_gradients(case, runs):
    runs.judge(case)
