"""Hundreds of random stages, each held against the oracle. A failing one is named by its seed."""

import pytest
from support.oracle import ON_TORCH, needs_zbpipe, zb
from support.random_graphs import ODD, PLAIN, run

pytestmark = pytest.mark.skipif(ON_TORCH, reason="torch's own module fails on most of them")

BATCH = 20


@pytest.mark.parametrize("batch", range(15))
def test_random_stages(batch):
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        try:
            run(seed, PLAIN)
        except Exception as error:
            raise AssertionError(f"random stage: run({seed}, PLAIN)") from error


@pytest.mark.parametrize("batch", range(15))
def test_random_stages_with_functions_hooks_and_in_place_operations(batch):
    for seed in range(10_000 + batch * BATCH, 10_000 + (batch + 1) * BATCH):
        try:
            run(seed, PLAIN + ODD + ODD)
        except Exception as error:
            raise AssertionError(f"random stage: run({seed}, PLAIN + ODD + ODD)") from error


POLICIES = (
    {"defer": "all"},
    {"defer": "nothing"},
    {"fused": True},
    {"defer": "all", "fused": True},
)


@needs_zbpipe
@pytest.mark.parametrize("choices", range(len(POLICIES)))
@pytest.mark.parametrize("batch", range(3))
def test_random_stages_under_policies(batch, choices):
    for seed in range(20_000 + batch * BATCH, 20_000 + (batch + 1) * BATCH):
        try:
            with zb.policy(**POLICIES[choices]):
                run(seed, PLAIN + ODD)
        except Exception as error:
            raise AssertionError(f"random stage: run({seed}, PLAIN + ODD), {POLICIES[choices]}") from error
