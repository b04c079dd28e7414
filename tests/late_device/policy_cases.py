"""Every policy, and every kind of checkpoint, on streams of their own."""

import pytest
import torch
from support import late
from support.late_runs import check_in_every_order, late_weights, on_three_streams, without_waiting_first
from support.late_stages import PACKED, ROWS, STAGES, WIDTH

import zbpipe

POLICIES = {
    "all": {"defer": "all"},
    "nothing": {"defer": "nothing"},
    "matrices": {"defer": "matrices"},
    "recompute": {"checkpoint": "recompute"},
    "input pass": {"checkpoint": "input_pass"},
    "all, recompute": {"defer": "all", "checkpoint": "recompute"},
    "fused": {"fused": True},
}


@pytest.mark.parametrize("scenario", [late_weights, without_waiting_first, on_three_streams], ids=lambda s: s.__name__)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [*STAGES, *PACKED])
def test_policy(name, policy, scenario):
    # Fused, what several nodes give to one weight is not summed before it is added.
    rounds = 1e-5 if policy == "fused" and name in ("tied", "branches") else 0
    check_in_every_order(scenario, (STAGES | PACKED)[name], policy=POLICIES[policy], tolerance=rounds)


@pytest.mark.parametrize("name", ["mlp", "normed", "tied", "batched"])
def test_gradients_in_main_grad(name):
    def with_main_grads(run):
        for weight in run.weights() if run.split else ():
            weight.main_grad = torch.zeros_like(weight)

    check_in_every_order(on_three_streams, STAGES[name], policy={"main_grad": True}, setup=with_main_grads)


@pytest.fixture
def adds_in_float():
    """What CUDA has, and others may: kernels that add a product of 16-bit factors in float32. Tells what it was given."""
    seen = []

    def add(gradient, left, right, out_dtype, beta=1, alpha=1, *, out):
        assert gradient is out
        assert (out_dtype, beta, alpha) == (torch.float32, 1, 1)
        seen.append((left.dtype, right.dtype, out.dtype))
        return out.add_(left.float() @ right.float())

    library = torch.library.Library("aten", "IMPL")
    for name in ("addmm.dtype_out", "baddbmm.dtype_out"):
        library.impl(name, add, "PrivateUse1")
    yield seen
    library._destroy()


@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_products_are_added_to_a_wider_gradient_by_the_devices_own_kernel(shape, dtype, adds_in_float):
    batch = shape[:-2]
    near_one = 1 + 2.0**-7
    exact = near_one * near_one  # in 15 bits
    for order in late.ORDERS:
        late.begin(order, 0)
        w = torch.ones(shape, dtype=dtype, device="late", requires_grad=True)
        w.main_grad = torch.full(shape, 256.0, device="late")
        for microbatch in (1, 2):
            x = torch.full((*batch, 1, 4), near_one, dtype=dtype, device="late", requires_grad=True)
            output = x @ w
            with zbpipe.policy(main_grad=True, fused=True):
                _, groups = zbpipe.stage_backward_input([output], [torch.full_like(output, near_one)], [x], [w])
                zbpipe.stage_backward_weight([w], groups)
            assert torch.equal(w.main_grad.cpu(), torch.full(shape, 256 + microbatch * exact))
        assert not late.races()
    assert adds_in_float == [(dtype, dtype, torch.float32)] * 2 * len(late.ORDERS)


def test_the_stages_are_what_they_say():
    """A checkpointed block computes again; what is offloaded is on the CPU."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, device="late", requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.device.type) or t, lambda t: t):
        PACKED["nested"]().to("late")(x)
    assert len(saved) <= 6
