"""The FLOPs that zbpipe.explain tells: those of W, or unknown and said to be."""

import pytest
import torch
import torch.nn.functional as F
from support.oracle import Stage, needs_zbpipe, weight
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import zbpipe

pytestmark = needs_zbpipe
f32 = torch.float32


def stage(forward, **shapes):
    return Stage(forward, **{name: weight(*s, dtype=f32) if isinstance(s, tuple) else s for name, s in shapes.items()})


def counted(module, x, *, first_stage=False):
    """What explain tells, and what torch's counter counts in a real W."""
    explained = zbpipe.explain(module, x, first_stage=first_stage)
    x = x.clone()
    inputs = [x.requires_grad_()] if x.is_floating_point() and not first_stage else []
    outs = module(x)
    outs = [out for out in (outs if isinstance(outs, tuple) else (outs,)) if isinstance(out, torch.Tensor)]
    _, groups = zbpipe.stage_backward_input(outs, [torch.ones_like(out) for out in outs], inputs, module.parameters())
    assert (explained.groups, explained.bytes_held) == (len(groups), zbpipe.memory.held(groups).bytes)
    with FlopCounterMode(display=False) as counter:
        zbpipe.stage_backward_weight(module.parameters(), groups)
    return explained, counter.get_total_flops()


def lora(m, x):
    return x @ m.w + (x @ m.down) @ m.up


def merged_lora(m, x):
    return x @ (m.w + m.down @ m.up)


def twice_computed(m, x):
    w = m.a @ m.b
    return x @ w @ w.mT


def tied(m, x):
    return torch.tanh(x @ m.a) @ m.a.mT


def attention(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    return m.out(F.scaled_dot_product_attention(q, k, v))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(4, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0])


EXACT = {
    "linear": (lambda: nn.Linear(4, 6), (3, 4)),
    "linear of three dimensions": (lambda: nn.Linear(4, 6), (2, 3, 4)),
    "bmm": (lambda: stage(lambda m, x: x @ m.a, a=(5, 4, 3)), (5, 2, 4)),
    "baddbmm": (lambda: stage(lambda m, x: torch.baddbmm(m.c, x, m.a), a=(5, 4, 3), c=(5, 2, 3)), (5, 2, 4)),
    "scaled baddbmm": (
        lambda: stage(lambda m, x: torch.baddbmm(m.c, m.a, x, alpha=2), a=(5, 3, 4), c=(5, 3, 2)),
        (5, 4, 2),
    ),
    "addmm, weight on the left": (lambda: stage(lambda m, x: torch.addmm(m.c, m.a, x), a=(2, 4), c=(3,)), (4, 3)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 7, 7)),
    "strided and dilated convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=1), (2, 4, 9, 9)),
    "convolution of one dimension": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 7)),
    "convolution of three dimensions": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
    "convolution without a batch": (lambda: nn.Conv1d(4, 6, 3), (4, 9)),
    "transposed convolution of one dimension": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 5)),
    "transposed convolution": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, dilation=2),
        (2, 4, 5, 5),
    ),
    "transposed convolution of three dimensions": (lambda: nn.ConvTranspose3d(3, 2, 2), (2, 3, 3, 3, 3)),
    "transposed convolution without a batch": (lambda: nn.ConvTranspose1d(4, 6, 3), (4, 5)),
    "einsum": (lambda: stage(lambda m, x: torch.einsum("bij,jkl->bikl", x, m.a), a=(4, 2, 3)), (2, 3, 4)),
    "embedding beside": (
        lambda: Stage(lambda m, x: (x + m.e(torch.arange(3))) @ m.a, e=nn.Embedding(5, 4), a=weight(4, 4, dtype=f32)),
        (3, 4),
    ),
    "LSTM": (lambda: Recurrent(nn.LSTM), (3, 2, 4)),
    "attention": (lambda: Stage(attention, qkv=nn.Linear(4, 12), out=nn.Linear(4, 4)), (2, 3, 4)),
    "weight that is the product of two": (lambda: stage(lambda m, x: x @ (m.a @ m.b), a=(4, 5), b=(5, 6)), (3, 4)),
    "computed weight, used twice": (
        lambda: stage(twice_computed, a=(4, 5), b=(5, 6)),
        (3, 4),
    ),
    "weight that is a product of three": (
        lambda: stage(lambda m, x: x @ ((m.a @ m.b).sin() @ m.c), a=(4, 5), b=(5, 6), c=(6, 2)),
        (3, 4),
    ),
    "weight made by a batched product": (
        lambda: stage(lambda m, x: x @ torch.baddbmm(m.c, m.a, m.b), a=(5, 4, 3), b=(5, 3, 2), c=(5, 4, 2)),
        (5, 2, 4),
    ),
    "weight made by a convolution": (
        lambda: stage(lambda m, x: x @ F.conv2d(m.a[None], m.k)[0, 0], a=(2, 5, 6), k=(1, 2, 2, 2)),
        (3, 4),
    ),
    "parametrized": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.Linear(6, 2)),
        (3, 4),
    ),
    "LoRA": (lambda: stage(lora, w=(4, 6), down=(4, 2), up=(2, 6)), (3, 4)),
    "LoRA, merged": (lambda: stage(merged_lora, w=(4, 6), down=(4, 2), up=(2, 6)), (3, 4)),
    "LoRA, frozen base": (
        lambda: stage(merged_lora, w=weight(4, 6, dtype=f32).requires_grad_(False), down=(4, 2), up=(2, 6)),
        (3, 4),
    ),
    "tied": (lambda: stage(tied, a=(4, 6)), (3, 4)),
    "an output of parameters alone": (
        lambda: stage(lambda m, x: (x @ m.a, (m.b @ m.c).sin()), a=(4, 4), b=(4, 4), c=(4, 4)),
        (3, 4),
    ),
    "checkpointed": (
        lambda: Stage(lambda m, x: checkpoint(m.f, x, use_reentrant=False), f=nn.Linear(4, 6)),
        (3, 4),
    ),
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
    "transposed, of three dimensions": (lambda: nn.ConvTranspose3d(4, 6, 2, groups=2), (2, 4, 3, 3, 3)),
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


def test_groups_of_a_convolution_in_a_first_stage():
    module = nn.Conv2d(4, 8, 3, groups=2, bias=False)
    x = torch.randn(2, 4, 6, 6)
    inner = zbpipe.explain(module, x).flops_in_w
    assert zbpipe.explain(module, x, first_stage=True).flops_in_w == inner


@pytest.mark.parametrize("name", ["linear", "convolution", "transposed convolution", "LoRA, merged", "tied", "bmm"])
def test_of_a_first_stage_whose_backward_is_whole_in_the_weight_pass(name):
    build, shape = EXACT[name]
    explained, flops = counted(build(), torch.randn(shape), first_stage=True)
    assert explained.flops_are_known
    assert explained.flops_in_w == flops > 0
    assert all(use.flops is None for plan in explained.parameters for use in plan.uses)  # not known apart


def test_of_a_first_stage_that_takes_tokens():
    module = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 6))
    explained, flops = counted(module, torch.randint(9, (2, 3)))
    assert explained.flops_are_known and explained.flops_in_w == flops > 0


def test_each_parameter_of_a_computed_weight_has_what_leads_to_it():
    found = zbpipe.explain(stage(lambda m, x: x @ (m.a @ m.b), a=(4, 5), b=(5, 6)), torch.randn(3, 4))
    a, b = found.parameters
    product, inner = 2 * 4 * 3 * 6, 2 * 4 * 5 * 6
    assert [use.flops for use in a.uses] == [use.flops for use in b.uses] == [product, inner]
    assert a.uses[1].why == "on the way from its use to the parameter"
    assert found.flops_in_w == product + 2 * inner


class Squaring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w @ w

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad @ w.mT + w.mT @ grad


UNKNOWN = {
    "a Function on the way": (lambda: stage(lambda m, x: x @ Squaring.apply(m.a), a=(4, 4)), "SquaringBackward"),
    "an operator without a formula": (
        lambda: stage(lambda m, x: x @ torch.linalg.cholesky(m.a @ m.a.mT + torch.eye(4)), a=(4, 4)),
        "aten.linalg_solve_triangular",
    ),
    "a matrix times a vector": (
        lambda: stage(lambda m, x: x @ torch.diag(m.a @ m.v), a=(4, 4), v=(4,)),
        "aten.mv",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_counted_is_said(name):
    build, what = UNKNOWN[name]
    explained = zbpipe.explain(build(), torch.randn(3, 4))
    assert not explained.flops_are_known
    assert explained.parameters[0].flops is None
    assert "at least " in str(explained) and "?" in str(explained)
    assert any("are not known: " in note and what in note for note in explained.notes)
    assert explained.as_dict()["flops_are_known"] is False


def test_of_an_lstm_in_a_first_stage():
    explained = zbpipe.explain(Recurrent(nn.LSTM), torch.randn(3, 2, 4), first_stage=True)
    assert not explained.flops_are_known


def test_what_is_computed_again_is_said_to_be_left_out():
    module = Stage(lambda m, x: checkpoint(m.f, x, use_reentrant=False), f=nn.Linear(4, 6))
    with zbpipe.policy(checkpoint="recompute"):
        explained = zbpipe.explain(module, torch.randn(3, 4))
    assert not explained.flops_are_known
    assert explained.notes == ("the FLOPs of what W computes again of checkpointed regions are not counted",)


def test_of_products_that_torchs_counter_takes_for_free():
    """Grouped ones in W, and, in a first stage, those with the inner gradient too; before 2.15 attention on the CPU."""
    module = Stage(lambda m, x: torch._grouped_mm(x, m.a, torch.tensor([3, 8], dtype=torch.int32)), a=(2, 16, 8))
    module.bfloat16()
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    explained, flops = counted(module, x)
    assert explained.flops_are_known and (explained.flops_in_w, flops) == (2 * 8 * 16 * 8, 0)
    first = zbpipe.explain(module, x, first_stage=True)
    assert first.flops_are_known and first.flops_in_w == explained.flops_in_w

    layer = nn.Linear(4, 12, bias=False)
    attending = Stage(lambda m, x: F.scaled_dot_product_attention(*m.qkv(x).view(2, 1, 3, 12).split(4, -1)), qkv=layer)
    explained, flops = counted(attending, torch.randn(2, 3, 4), first_stage=True)
    attention = 5 * (2 * 2 * 3 * 3 * 4)  # the scores once more, and four gradients
    assert flops == 2 * 6 * 4 * 12 + (attention if torch.__version__ >= (2, 15) else 0)
    assert explained.flops_are_known
    assert explained.flops_in_w == 2 * 6 * 4 * 12 + attention
