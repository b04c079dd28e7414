"""How W adds to an existing gradient: as an ordinary backward does, or fused when asked to."""

import copy

import pytest
import torch
from support.oracle import Stage, fresh, input_pass, needs_zbpipe, net, zb
from torch import nn

pytestmark = needs_zbpipe

f64 = torch.float64


@pytest.fixture(params=[False, True], ids=["default", "fused"])
def fused(request):
    with zb.policy(fused=request.param):
        yield request.param


def network():
    return net(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def operations(m):
    """What W runs for the second of two microbatches."""
    for _ in range(2):
        x = torch.randn(3, 8, requires_grad=True)
        _, groups = input_pass(m, x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            zb.stage_backward_weight(m.parameters(), groups)
    return {event.key for event in profile.key_averages()}


def test_fused_accumulation_runs_one_operation_per_product(fused):
    assert ("aten::addmm_" in operations(network())) == fused
    assert ("aten::mm" in operations(network())) != fused


@pytest.mark.parametrize("weight", ["plain", "transposed"])
def test_gradient_of_a_weight_that_is_the_output_gradient_itself(fused, weight):
    """The product reads what it adds to."""
    m = Stage(lambda m, x: x @ (m.w if weight == "plain" else m.w.t()), w=(4, 4))
    twin = copy.deepcopy(m)
    xs = [fresh(4, 4) for _ in range(2)]
    grads = [torch.randn(4, 4, dtype=f64) for _ in range(2)]
    twin.w.grad = grads[0].clone()
    groups = []
    for x, grad in zip(xs, grads, strict=True):
        twin(x.detach()).backward(grad)
        groups += zb.stage_backward_input([m(x)], [grad], [x], m.parameters())[1]
    m.w.grad = grads[0]
    zb.stage_backward_weight(m.parameters(), groups)
    torch.testing.assert_close(m.w.grad, twin.w.grad)


WIDER = {
    "main_grad, bfloat16": (torch.bfloat16, "main_grad", False),
    "main_grad, float16": (torch.float16, "main_grad", False),
    "float32 weight under autocast": (torch.float32, "grad", True),
    "main_grad of doubles": (torch.float32, "main_grad of doubles", False),
}


@pytest.mark.parametrize("case", WIDER)
def test_fused_products_are_added_to_a_wider_gradient_in_its_dtype(case):
    """A product of 256 and one of 1: their sum is 256 in bfloat16, 257 in a wider gradient."""
    dtype, place, autocast = WIDER[case]
    m = Stage(lambda m, x: x @ m.w, w=nn.Parameter(torch.randn(3, 3).to(dtype)))
    total = torch.zeros(3, 3, dtype=f64 if "doubles" in place else torch.float32)
    setattr(m.w, "grad" if place == "grad" else "main_grad", total)
    x = torch.tensor([[16.0] * 3, [1.0] * 3], dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = m(x)
    _, groups = zb.stage_backward_input([out], [x.detach().to(out.dtype)], [x], [m.w])
    with zb.policy(fused=True, main_grad=place != "grad"):
        zb.stage_backward_weight([m.w], groups)
    assert total.eq(257).all()


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_products_are_added_to_a_wider_gradient_on_a_gpu(dtype, shape):
    w = torch.ones(shape, dtype=dtype, device="cuda", requires_grad=True)
    w.main_grad = torch.full(shape, 256.0, device="cuda")
    x = torch.ones(*shape[:-2], 1, 4, dtype=dtype, device="cuda", requires_grad=True)
    out = x @ w
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    with zb.policy(fused=True, main_grad=True):
        zb.stage_backward_weight([w], groups)
    assert w.main_grad.eq(257).all()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_fused_into_a_grad_of_a_wider_dtype():
    m = Stage(lambda m, x: torch.nn.functional.linear(x, m.w), w=nn.Parameter(torch.randn(30, 7).bfloat16()))
    m.w.grad_dtype = torch.float32
    m.w.grad = start = torch.randn(30, 7)
    expected = start.double()
    x = torch.randn(20, 7).bfloat16().requires_grad_()
    out = m(x)
    grad = torch.randn_like(out)
    expected = expected + grad.double().t() @ x.detach().double()
    _, groups = zb.stage_backward_input([out], [grad], [x], [m.w])
    with zb.policy(fused=True):
        zb.stage_backward_weight([m.w], groups)
    assert m.w.grad is start
    torch.testing.assert_close(start.double(), expected, rtol=1e-5, atol=1e-5)
