"""DTensor weights between I and W, and in W, to the byte: as the plain matrices of one rank. No rank talks to another."""

import pytest
import torch
import torch.distributed as dist
from support.functions import function_of
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
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


def test_a_gradient_that_is_still_on_its_way_is_not_waited_for(mesh):
    """A Function returns it and has it, too: to copy it would wait."""
    kept = []

    def backward(x, w, grad):
        kept.append(all_reduce(x.mT @ grad, "sum", dist.group.WORLD))
        return grad @ w.mT, kept[-1]

    x, w = torch.randn(3, 4, requires_grad=True), nn.Parameter(torch.randn(4, 4))
    out = function_of(lambda x, w: x @ w, backward)(x, w)
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    assert isinstance(kept[0], AsyncCollectiveTensor)
    assert not kept[0].completed
    zbpipe.stage_backward_weight([w], groups)
    torch.testing.assert_close(w.grad.wait() if hasattr(w.grad, "wait") else w.grad, x.detach().mT @ torch.ones(3, 4))
