"""The FLOPs that zbpipe.explain tells: those of the products of W, by their shapes; and whether W may run others."""

import pytest
import torch
import torch.nn.functional as F
from support.functions import Handing
from support.oracle import Stage, input_pass, needs_zbpipe, weight
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import zbpipe

pytestmark = needs_zbpipe
f32 = torch.float32


def stage(forward, **shapes):
    return Stage(forward, **{name: weight(*s, dtype=f32) if isinstance(s, tuple) else s for name, s in shapes.items()})


def counted(module, x):
    """What explain tells, and what torch's counter counts in a real W."""
    explained = zbpipe.explain(module, x)
    x = x.clone().requires_grad_()
    _, groups = input_pass(module, x)
    assert (explained.groups, explained.bytes_held) == (len(groups), zbpipe.memory.held(groups).bytes)
    with FlopCounterMode(display=False) as counter:
        zbpipe.stage_backward_weight(module.parameters(), groups)
    return explained, counter.get_total_flops()


def lora(m, x):
    return x @ m.w + (x @ m.down) @ m.up


def tied(m, x):
    return torch.tanh(x @ m.a) @ m.a.mT


def attention(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    return m.out(F.scaled_dot_product_attention(q, k, v))


EXACT = {
    "linear": (lambda: nn.Linear(4, 6), (3, 4)),
    "bmm": (lambda: stage(lambda m, x: x @ m.a, a=(5, 4, 3)), (5, 2, 4)),
    "baddbmm": (lambda: stage(lambda m, x: torch.baddbmm(m.c, x, m.a), a=(5, 4, 3), c=(5, 2, 3)), (5, 2, 4)),
    "addmm, weight on the left": (lambda: stage(lambda m, x: torch.addmm(m.c, m.a, x), a=(2, 4), c=(3,)), (4, 3)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 7, 7)),
    "strided and dilated convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=1), (2, 4, 9, 9)),
    "convolution without a batch": (lambda: nn.Conv1d(4, 6, 3), (4, 9)),
    "transposed convolution": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, dilation=2),
        (2, 4, 5, 5),
    ),
    "transposed convolution without a batch": (lambda: nn.ConvTranspose1d(4, 6, 3), (4, 5)),
    "einsum": (lambda: stage(lambda m, x: torch.einsum("bij,jkl->bikl", x, m.a), a=(4, 2, 3)), (2, 3, 4)),
    "LSTM": (lambda: Stage(lambda m, x: m.head(m.layer(x)[0]), layer=nn.LSTM(4, 5), head=nn.Linear(5, 2)), (3, 2, 4)),
    "attention": (lambda: Stage(attention, qkv=nn.Linear(4, 12), out=nn.Linear(4, 4)), (2, 3, 4)),
    "LoRA": (lambda: stage(lora, w=(4, 6), down=(4, 2), up=(2, 6)), (3, 4)),
    "tied": (lambda: stage(tied, a=(4, 6)), (3, 4)),
    "checkpointed": (lambda: Stage(lambda m, x: checkpoint(m.f, x, use_reentrant=False), f=nn.Linear(4, 6)), (3, 4)),
}


@pytest.mark.parametrize("defer", ["matrices", "all"])
@pytest.mark.parametrize("name", EXACT)
def test_they_are_those_that_a_real_weight_pass_runs(name, defer):
    build, shape = EXACT[name]
    with zbpipe.policy(defer=defer):
        explained, flops = counted(build(), torch.randn(shape))
    assert explained.flops_are_known
    assert explained.flops_in_w == flops > 0


GROUPED = {
    "convolution": (lambda: nn.Conv2d(4, 8, 3, groups=2), (2, 4, 6, 6)),
    "depthwise": (lambda: nn.Conv1d(4, 8, 3, groups=4, stride=2, padding=2), (2, 4, 7)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2), (2, 4, 5, 5)),
}


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_a_convolution_share_its_work(name):
    """An output element takes products with its group's inputs alone; torch's counter takes them with all."""
    build, shape = GROUPED[name]
    module = build()
    explained, flops = counted(module, torch.randn(shape))
    assert explained.flops_are_known
    assert explained.flops_in_w * module.groups == flops
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(shape))
    assert explained.flops_in_w == counter.get_total_flops()  # a weight's gradient costs what the forward costs


OTHERS = {
    "a weight that is a product": (lambda: stage(lambda m, x: x @ (m.a @ m.b), a=(4, 5), b=(5, 6)), 2 * 3 * 4 * 6),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), 2 * 3 * 4 * 6),
    "an output of parameters alone": (lambda: stage(lambda m, x: (x @ m.a, m.a @ m.a), a=(4, 4)), 2 * 3 * 4 * 4),
    "work that is handed over": (
        lambda: stage(lambda m, x: Handing.apply(x, m.a) @ m.b, a=(4, 4), b=(4, 2)),
        2 * 3 * 4 * 2,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_w_runs_besides_is_not_counted_and_said_to_be_unknown(name):
    build, products = OTHERS[name]
    explained = zbpipe.explain(build(), torch.randn(3, 4))
    assert (explained.flops_in_w, explained.flops_are_known) == (products, False)
    assert "at least " in str(explained)
    assert explained.as_dict()["flops_are_known"] is False


def test_of_a_first_stage_whose_backward_is_whole_in_the_weight_pass():
    explained = zbpipe.explain(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), torch.randn(3, 4), first_stage=True)
    assert (explained.flops_in_w, explained.flops_are_known) == (0, False)
    assert all(use.flops is None for plan in explained.parameters for use in plan.uses)
    assert "?" in str(explained)


def test_of_a_grouped_product():
    """torch's counter takes it for free."""
    module = Stage(lambda m, x: torch._grouped_mm(x, m.a, torch.tensor([3, 8], dtype=torch.int32)), a=(2, 16, 8))
    module.bfloat16()
    explained, flops = counted(module, torch.randn(8, 16, dtype=torch.bfloat16))
    assert explained.flops_are_known and (explained.flops_in_w, flops) == (2 * 8 * 16 * 8, 0)


def test_what_is_computed_again_is_said_to_be_left_out():
    module = Stage(lambda m, x: checkpoint(m.f, x, use_reentrant=False), f=nn.Linear(4, 6))
    with zbpipe.policy(checkpoint="recompute"):
        explained = zbpipe.explain(module, torch.randn(3, 4))
    assert not explained.flops_are_known
    assert "the FLOPs of what W computes again of checkpointed regions are not counted" in explained.notes
