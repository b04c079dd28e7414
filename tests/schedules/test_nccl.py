"""Schedules over NCCL: on two GPUs all of them, on one the V schedules, whose stages hand over on the rank itself.

Right, to the last weight; and with the collector off nothing lives on from step to step: neither what was sent nor the
buffers that were received into.
"""

import pytest
import torch
import torch.distributed as dist
from support.blocks import SCHEDULES
from support.processes import from_json, results, run_ranks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(GPUS == 0 or not dist.is_nccl_available(), reason="needs a GPU and NCCL"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    world = min(GPUS, 2)
    folder = tmp_path_factory.mktemp("nccl")
    run_ranks("schedules/nccl_ranks.py", world, folder, timeout=400)

    def of(name):
        if world == 1 and SCHEDULES[name][1] != "v":
            pytest.skip("needs two GPUs")
        return results(folder, name, world, from_json)

    return of


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_over_nccl(name, ranks):
    assert all(rank["equal"] for rank in ranks(name))


@pytest.mark.parametrize("name", SCHEDULES)
def test_buffers_go_when_their_work_is_done(name, ranks):
    for rank in ranks(name):
        assert rank["grown"] == ""
        assert len(set(rank["in_use"][1:])) == 1
