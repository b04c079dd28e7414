"""Grouped products and convolutions: W computes each by one operation of its own, without a run of the engine."""

import pytest
import torch
from support.functions import FailsAt
from support.oracle import Stage, at_once, check, fresh, late, needs_zbpipe, random_input, weight, zb
from torch import nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.drops_groups, needs_zbpipe]
F = nn.functional
D, H, ROWS = 16, 32, 24
ENDS = torch.tensor([8, 8, 24], dtype=torch.int32)  # the second expert has no tokens


def grouped(x, w, ends=ENDS):
    return torch._grouped_mm(x.sin(), w, offs=ends)


def of(dtype, forward, *shape, rows=(ROWS, D)):
    return lambda: (Stage(forward, w=weight(3, *shape, dtype=dtype)), random_input(*rows, dtype=dtype))


GROUPED = {
    f"{name}, {str(dtype).removeprefix('torch.')}": of(dtype, *given)
    for dtype in (torch.bfloat16, torch.float32)
    for name, given in {
        "2D x 3D": (lambda m, x: grouped(x, m.w), D, H),
        "transposed weight": (lambda m, x: grouped(x, m.w.mT), H, D),
        "3D x 3D": (lambda m, x: grouped(x.view(3, 8, D), m.w, None), D, H),
        "weight left": (lambda m, x: torch._grouped_mm(m.w, x.sin().view(3, D, 8)), H, D),
    }.items()
}
f64 = {"dtype": torch.float64}
SIZES = {1: (2, 4, 9), 2: (2, 4, 9, 9), 3: (2, 4, 5, 5, 5)}


def convolved(make, dims, batched=True):
    return lambda: (
        Stage(lambda m, x: m.net(x.sigmoid()).tanh(), net=make()),
        random_input(*SIZES[dims][not batched :], **f64),
    )


CONVOLUTIONS = {
    "1D": convolved(lambda: nn.Conv1d(4, 6, 3, padding=1, **f64), 1),
    "without a batch": convolved(lambda: nn.Conv1d(4, 6, 3, **f64), 1, batched=False),
    "strided, dilated": convolved(lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, **f64), 2),
    "groups": convolved(lambda: nn.Conv2d(4, 8, 3, groups=2, **f64), 2),
    "depthwise": convolved(lambda: nn.Conv2d(4, 4, 3, groups=4, **f64), 2),
    "without a bias": convolved(lambda: nn.Conv2d(4, 6, 3, bias=False, **f64), 2),
    "channels last": convolved(lambda: nn.Conv2d(4, 6, 3, **f64).to(memory_format=torch.channels_last), 2),
    "3D": convolved(lambda: nn.Conv3d(4, 6, 3, padding=1, **f64), 3),
    "transposed": convolved(
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, **f64), 2
    ),
    "viewed weight": lambda: (
        Stage(lambda m, x: F.conv2d(x.sin(), m.w.view(6, 4, 3, 3), m.b), w=(216,), b=(6,)),
        random_input(*SIZES[2], **f64),
    ),
}
EVERY = {**GROUPED, **CONVOLUTIONS}
OPERATIONS = ("aten::_grouped_mm", "aten::convolution_backward", "autograd::engine::evaluate_function")


def run(stage, make_input):
    x = make_input()
    output = stage(x)
    _, groups = zb.stage_backward_input([output], [torch.ones_like(output)], [x], stage.parameters())
    return groups


def operations_in_w(stage, groups):
    with profile() as profiled:
        zb.stage_backward_weight(stage.parameters(), groups)
    names = [event.name for event in profiled.events()]
    return [name for name in names if name.startswith(OPERATIONS)]


@pytest.mark.parametrize("choices", [{}, {"defer": "all"}, {"main_grad": True}], ids=["", "defer all", "main_grad"])
@pytest.mark.parametrize("name", EVERY)
def test_gradients(name, choices):
    stage, make_input = EVERY[name]()
    with zb.policy(**choices):
        check(stage, make_input, orders=(at_once, late), rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY)
def test_w_runs_one_operation_and_no_engine(name):
    stage, make_input = EVERY[name]()
    for _ in range(2):  # without a gradient, and onto one
        groups = run(stage, make_input)
        assert {task[1] for group in groups for task in group._described[2]} == {0}  # a product
        operation = "aten::_grouped_mm" if name in GROUPED else "aten::convolution_backward"
        assert operations_in_w(stage, groups) == [operation]


@pytest.mark.parametrize("hooked", ["weight", "bias"])
def test_one_of_the_two_is_hooked(hooked):
    """The engine's run for the one takes what was computed with the other."""
    net = nn.Conv2d(4, 6, 3, **f64)
    stage = Stage(lambda m, x: m.net(x.sin()), net=net)

    def setup(m):
        getattr(m.net, hooked).register_hook(m.log("hook"))

    check(stage, random_input(*SIZES[2], **f64), setup=setup, rtol=0, atol=0)
    getattr(net, hooked).register_hook(lambda grad: None)
    found = operations_in_w(stage, run(stage, random_input(*SIZES[2], **f64)))
    assert found.count("aten::convolution_backward") == 1


def test_a_hook_that_raises_leaves_the_rest_to_a_retry():
    stage, make_input = CONVOLUTIONS["strided, dilated"]()
    groups = run(stage, make_input)
    expected = torch.autograd.grad(stage(last := make_input()).sum(), list(stage.parameters()))
    handle = stage.net.bias.register_hook(lambda grad: 1 / 0)
    groups = run(stage, lambda: last)
    with pytest.raises(ZeroDivisionError):
        zb.stage_backward_weight(stage.parameters(), groups)
    handle.remove()
    zb.stage_backward_weight(stage.parameters(), groups)
    torch.testing.assert_close([w.grad for w in stage.parameters()], list(expected), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["2D x 3D, float32", "strided, dilated"])
def test_an_operation_that_fails_in_w_is_called_again(name):
    stage, make_input = EVERY[name]()
    output = stage(last := make_input())
    expected = torch.autograd.grad(output, list(stage.parameters()), torch.ones_like(output))
    groups = run(stage, lambda: last)
    fails = FailsAt(0, torch.ops.aten._grouped_mm, torch.ops.aten.convolution_backward)
    with fails, pytest.raises(torch.OutOfMemoryError, match="planted"):
        zb.stage_backward_weight(stage.parameters(), groups)
    assert all(w.grad is None for w in stage.parameters())
    zb.stage_backward_weight(stage.parameters(), groups)
    torch.testing.assert_close([w.grad for w in stage.parameters()], list(expected), rtol=0, atol=0)


def test_retained_groups_run_again():
    stage, make_input = CONVOLUTIONS["1D"]()
    groups = run(stage, make_input)
    zb.stage_backward_weight(stage.parameters(), groups, retain_graph=True)
    once = [w.grad.clone() for w in stage.parameters()]
    zb.stage_backward_weight(stage.parameters(), groups)
    torch.testing.assert_close([w.grad for w in stage.parameters()], [2 * grad for grad in once], rtol=0, atol=0)


def test_offsets_that_change_before_w_are_refused():
    ends = ENDS.clone()
    stage = Stage(lambda m, x: grouped(x, m.w, ends), w=weight(3, D, H, dtype=torch.float32))
    groups = run(stage, random_input(ROWS, D, dtype=torch.float32))
    ends.add_(0)
    with pytest.raises(RuntimeError, match=r"int32\[3\] on cpu, which param_groups\[0\] holds for the weight pass"):
        zb.stage_backward_weight(stage.parameters(), groups)
    assert stage.w.grad is None


@pytest.mark.parametrize("how", ["keep", "recompute"])
@pytest.mark.parametrize("name", ["2D x 3D, float32", "strided, dilated"])
def test_checkpointed(name, how):
    stage, make_input = EVERY[name]()
    region = stage.function
    stage.function = lambda m, x: checkpoint(lambda x: region(m, x), x * 1, use_reentrant=False)
    with zb.policy(checkpoint=how):
        check(stage, make_input, rtol=0, atol=0)


def test_the_values_of_a_convolutions_weight_are_not_read():
    """They may change before W, or be gone, as under fully_shard."""
    net = nn.Conv2d(4, 6, 3, **f64)
    stage = Stage(lambda m, x: m.net(x.sin()), net=net)
    x = fresh(*SIZES[2])
    expected = torch.autograd.grad(stage(x).sum(), list(stage.parameters()))
    groups = run(stage, lambda: x)
    with torch.no_grad():
        net.weight.fill_(float("nan"))
    net.weight.untyped_storage().resize_(0)
    zb.stage_backward_weight(stage.parameters(), groups)
    torch.testing.assert_close([w.grad for w in stage.parameters()], list(expected), rtol=0, atol=0)


def test_both_factors_are_weights():
    stage = Stage(lambda m, x: F.conv2d(x * 0 + m.k, m.w) + F.conv2d(m.k, m.w), k=SIZES[2], w=(6, 4, 3, 3))
    check(stage, SIZES[2], rtol=0, atol=0)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
def test_group_norm(memory):
    """The CPU's kernel for channels-last memory crashes where nobody asks for the input's gradient."""
    stage = Stage(lambda m, x: m.norm(x.sin().contiguous(memory_format=memory)).sin(), norm=nn.GroupNorm(2, 4))
    with zb.policy(defer="all"):
        check(stage, random_input(2, 4, 3, 3, dtype=torch.float32), orders=(at_once, late), rtol=0, atol=0)
