"""DTensor weights between I and W, and in W, to the byte: as the plain matrices of one rank. No rank talks to another."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import zbpipe

RANKS = 2
TOKENS, WIDTH, HIDDEN = 32, 640, 1280  # of one rank


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def mlp(hidden):
    return nn.Sequential(nn.Linear(WIDTH, hidden, bias=False), nn.Tanh(), nn.Linear(hidden, WIDTH, bias=False))


def bytes_of_passes(module):
    """Of the second microbatch: what its groups hold between I and W, and what W takes on top at its peak."""
    for _ in range(2):
        x = torch.randn(TOKENS, WIDTH, requires_grad=True)
        out = module(x)
        _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], module.parameters())
        held = zbpipe.memory.held(groups, module).bytes
        with zbpipe.memory.record() as recording:
            zbpipe.stage_backward_weight(module.parameters(), groups)
    return held, recording.peak


def test_held_and_peak_are_those_of_plain_matrices(mesh):
    sharded = parallelize_module(mlp(RANKS * HIDDEN), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    held, peak = bytes_of_passes(sharded)
    assert (held, peak) == bytes_of_passes(mlp(HIDDEN))
    assert held == 2 * 4 * TOKENS * (WIDTH + HIDDEN)
    assert peak >= 4 * WIDTH * HIDDEN, "one product, as in an ordinary backward"


def test_gradients_equal_those_of_plain_matrices(mesh):
    plain = mlp(HIDDEN)
    sharded = parallelize_module(mlp(RANKS * HIDDEN), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with torch.no_grad():
        for name, weight in sharded.named_parameters():
            weight.to_local().copy_(dict(plain.named_parameters())[name])
    for module in (plain, sharded):
        torch.manual_seed(0)
        bytes_of_passes(module)
    for name, weight in sharded.named_parameters():
        grad = weight.grad
        assert grad.placements == weight.placements
        torch.testing.assert_close(grad.to_local(), dict(plain.named_parameters())[name].grad, rtol=0, atol=0)
