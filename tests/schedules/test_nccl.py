"""Schedules over NCCL: on two GPUs all of them, on one the V schedules, whose stages hand over on the rank itself.

Right, to the last weight; and with the collector off nothing lives on from step to step: neither what was sent nor the
buffers that were received into.
"""

import copy
import functools
import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.blocks import SCHEDULES, batch, blocks
from support.pipelines import Case, Model, Pipeline, assert_close, count_of, joined, ranks_of, train, unpipelined
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zbpipe
from zbpipe.leaks import Growth

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
WORLD = min(GPUS, 2)
STEPS = 6  # whose growth is looked at, after those that are compared
MODEL = Model(optimizer=functools.partial(torch.optim.SGD, lr=0.1))

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(GPUS == 0 or not dist.is_nccl_available(), reason="needs a GPU and NCCL"),
]


def join(rank, world, folder):
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))


def run(name):
    """What was trained, what grew over further steps with the collector off, and the bytes in use after each."""
    device = torch.device("cuda", dist.get_rank())
    parts = [part.to(device) for part in blocks(count_of(name))]
    line = Pipeline(name, parts, device=device).start()

    def step(x, target):
        return line.step(x.to(device), target.to(device))

    seen = train(MODEL, line.parts, step)
    optimizer = MODEL.optimizer([w for part in line.parts.values() for w in part.parameters()])
    gc.collect()
    in_use = []
    with Growth() as growth:
        for number in range(STEPS):
            step(*batch(number))
            optimizer.step()
            optimizer.zero_grad()
            for stage in line.stages:
                stage.clear_runtime_states()  # torch keeps the last stage's outputs for its user
            torch.cuda.synchronize()
            in_use.append(torch.cuda.memory_allocated(device))
            growth.step()
        grown = growth.table() if growth.grown() else ""
    return seen, grown, in_use


def run_sharded():
    """The weights' gradients of a `fully_shard` stage in a loop of one's own, and an ordinary backward's on a copy."""
    device = torch.device("cuda", dist.get_rank())
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(device)
    plain = copy.deepcopy(stage)
    for module in (stage[0], stage[2], stage):
        fully_shard(module, mesh=init_device_mesh("cuda", (WORLD,)))
    waiting = []
    for number in range(3):
        torch.manual_seed(number)
        x = torch.randn(32, 64, device=device, requires_grad=True)
        plain(x).sum().backward()
        out = stage(x)
        waiting.append(zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], None)[1])
    for number, groups in enumerate(waiting):
        stage.set_requires_gradient_sync(number == 2)
        zbpipe.stage_backward_weight(None, groups)
    torch.cuda.synchronize()
    return {
        name: tuple(grad.cpu() for grad in (sharded.grad.full_tensor(), weight.grad))
        for (name, sharded), weight in zip(stage.named_parameters(), plain.parameters(), strict=True)
    }


NAMES = [name for name, (_, shape) in SCHEDULES.items() if WORLD > 1 or shape == "v"]
CASES = {name: Case(functools.partial(run, name), module="zbpipe") for name in NAMES}
CASES["fully_shard"] = Case(run_sharded, module="zbpipe")
ranks = ranks_of(__file__, CASES, WORLD)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_over_nccl(name, ranks):
    assert_close(joined(seen for seen, _, _ in ranks(name)), unpipelined(MODEL, WORLD * SCHEDULES[name][0]))


@pytest.mark.parametrize("name", NAMES)
def test_buffers_go_when_their_work_is_done(name, ranks):
    for _, grown, in_use in ranks(name):
        assert grown == ""
        assert len(set(in_use[1:])) == 1


def test_fully_shard_over_nccl(ranks):
    for grads in ranks("fully_shard"):
        assert len(grads) == 4
        for name, (sharded, plain) in grads.items():
            torch.testing.assert_close(sharded, plain, msg=lambda text, name=name: f"{name}: {text}")
