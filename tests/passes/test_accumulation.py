"""How W adds to an existing gradient: as an ordinary backward does, or fused when asked to."""

import copy

import pytest
import torch
from support.oracle import Stage, at_once, check, needs_zbpipe, random_input, zb
from torch import nn

pytestmark = needs_zbpipe

f64 = torch.float64


@pytest.fixture(params=[False, True], ids=["default", "fused"])
def fused(request):
    with zb.policy(fused=request.param):
        yield request.param


def network():
    return Stage(lambda m, x: m.net(x), net=nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))


def operations(m, microbatches=2):
    """What W runs for the last of some microbatches."""
    for _ in range(microbatches):
        x = torch.randn(3, 8, requires_grad=True)
        out = m(x)
        _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            zb.stage_backward_weight(m.parameters(), groups)
    return {event.key for event in profile.key_averages()}


def test_fused_accumulation_is_off_until_asked_for():
    assert "aten::addmm_" not in operations(network())


def test_fused_accumulation_runs_one_operation_per_product(fused):
    assert ("aten::addmm_" in operations(network())) == fused
    assert ("aten::mm" in operations(network())) != fused


def test_ten_microbatches_equal_an_ordinary_backward_bit_for_bit():
    m = Stage(lambda m, x: m.net(x), net=nn.Linear(64, 64))
    check(m, random_input(32, 64), microbatches=10, orders=(at_once,), rtol=0, atol=0)


def test_fused_accumulation_gives_close_gradients(fused):
    check(network(), random_input(3, 8), microbatches=3)


def test_fused_accumulation_keeps_the_gradients_memory(fused):
    m = network()
    operations(m, microbatches=1)
    before = [w.grad.data_ptr() for w in m.parameters()]
    operations(m)
    assert [w.grad.data_ptr() for w in m.parameters()] == before


@pytest.mark.parametrize("weight", ["plain", "transposed"])
def test_gradient_of_a_weight_that_is_the_output_gradient_itself(fused, weight):
    """The product reads what it adds to."""
    m = Stage(lambda m, x: x @ (m.w if weight == "plain" else m.w.t()), w=(4, 4))
    twin = copy.deepcopy(m)
    xs = [torch.randn(4, 4, dtype=f64, requires_grad=True) for _ in range(2)]
    grads = [torch.randn(4, 4, dtype=f64) for _ in range(2)]
    twin.w.grad = grads[0].clone()
    groups = []
    for x, grad in zip(xs, grads, strict=True):
        twin(x.detach()).backward(grad)
        groups += zb.stage_backward_input([m(x)], [grad], [x], m.parameters())[1]
    m.w.grad = grads[0]
    zb.stage_backward_weight(m.parameters(), groups)
    torch.testing.assert_close(m.w.grad, twin.w.grad)
