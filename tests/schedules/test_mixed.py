"""What may differ between the ranks of a pipeline: the policy, and whether they are patched."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from support.pipelines import Case, Model, assert_close, pipelined, ranks_of, unpipelined
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbpipe


def linears(count):
    """On which torch's own module is right."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.Tanh(), nn.Linear(8, 8, dtype=torch.float64))
        for _ in range(count)
    ]


def batch(step):
    torch.manual_seed(step)
    return torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)


MODEL = Model(linears, nn.functional.mse_loss, batch)
POLICIES = {
    "checkpoint": ({"checkpoint": "recompute"}, {"checkpoint": "input_pass"}),
    "defer": ({"defer": "all"}, {"defer": "nothing"}),
}


class Checkpointed(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False)


def run(schedule, within):
    with within(dist.get_rank()):
        return pipelined(MODEL, schedule, wrap=Checkpointed)


def with_policies(name, rank):
    return zbpipe.policy(**POLICIES[name][rank])


def patched(on, rank):
    return zbpipe.patch() if rank == on else contextlib.nullcontext()


HOW = {
    **{f"{name} differs": (functools.partial(with_policies, name), "zbpipe") for name in POLICIES},
    **{f"rank {rank} alone is patched": (functools.partial(patched, rank), "torch") for rank in range(2)},
}
CASES = {
    f"{how} {schedule}": Case(functools.partial(run, schedule, within), module=module)
    for how, (within, module) in HOW.items()
    for schedule in ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
    if torch.__version__ >= (2, 12) or "ZBV" not in schedule  # torch 2.11 runs no V over gloo
}
ranks = ranks_of(__file__, CASES)
pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right(name, ranks):
    assert_close(ranks.together(name), unpipelined(MODEL))
