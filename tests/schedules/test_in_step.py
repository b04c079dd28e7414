"""What I and W do is a function of the graph, the policy and the order of the calls: ranks that share a region's collectives
compute it equally often, in the same order, however late one of them is and whatever it holds."""

import collections
import functools

import pytest
from schedules.in_step_ranks import MICROBATCHES, PLACES, RUNS, TEAM, reference
from support.oracle import needs_zbpipe
from support.processes import assert_close, folder_of, results

WORLD = PLACES * TEAM
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_zbpipe,
    pytest.mark.parametrize(("kind", "name", "policy"), RUNS),
]

folder = folder_of("schedules/in_step_ranks.py", WORLD)
wanted = functools.cache(reference)


def test_ranks_of_a_team_compute_and_send_alike_whenever_and_whatever_they_hold(kind, name, policy, folder):
    logs = [[log for log, _ in steps] for steps in results(folder, f"{kind}.{name}.{policy}", WORLD)]
    for first in range(0, WORLD, TEAM):
        for step, log in enumerate(logs[first]):
            assert log == logs[first + 1][step], f"step {step}, ranks {first} and {first + 1}"
        assert logs[first][0] == logs[first][1], f"two steps of rank {first}"


def test_regions_are_computed_again_once_or_with_recompute_twice(kind, name, policy, folder):
    again = set()
    for steps in results(folder, f"{kind}.{name}.{policy}", WORLD):
        for log, _ in steps:
            counts = collections.Counter(what for what in log if isinstance(what, tuple))
            assert {microbatch for *_, microbatch in counts} == set(range(MICROBATCHES))
            again |= {count - 1 for count in counts.values()}
    # A stage whose backward is not split computes its regions again once.
    assert again == ({1, 2} if policy in ("recompute", "recompute, all") else {1})


def test_gradients_are_those_of_the_model_in_one_piece(kind, name, policy, folder):
    for rank in results(folder, f"{kind}.{name}.{policy}", WORLD):
        for (_, grads), whole in zip(rank, wanted(kind), strict=True):
            assert_close(grads, {weight: whole[weight] for weight in grads})
