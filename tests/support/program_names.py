"""What a line of a random program may name: torch's, and Functions and contexts of these tests."""

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zbpipe
from support.functions import Heeding, Ignoring, Product, SameTensorTwice, TwoOutputs, count
from support.programs import ROWS, WIDTH


def grouped(x, experts, batched=False):
    """Two grouped products on rows of 16 bytes at least, of a dtype that torch takes."""
    rows = x.repeat(1, 2)
    rows = rows.float() if x.dtype == torch.float64 else rows
    ends = None if batched else torch.tensor([1, ROWS], dtype=torch.int32)
    result = torch._grouped_mm(torch.stack([rows, rows.sin()]) if batched else rows, experts.to(rows.dtype), offs=ends)
    return (result.sum(0) if batched else result)[:, :WIDTH].to(x.dtype)


def convolved(x, filters, bias, transposed=False, groups=1):
    function = F.conv_transpose1d if transposed else F.conv1d
    return function(x.t()[None], filters, bias, padding=1, groups=groups)[0].t()


class HandedOver(Product):
    """x @ w that leaves the weight's gradient to whoever takes work."""

    @staticmethod
    def backward(ctx, grad):
        count(ctx, ctx.given)
        x, w = ctx.saved_tensors
        return grad @ w.t(), zbpipe.defer(lambda g, x: x.t() @ g, 1, (grad, x)), None


class AddsItself(Product):
    """x @ w that adds the weight's gradient itself and returns None. It is told whose weight, and by which name: a
    region that is computed again unpacks another tensor than the weight."""

    @staticmethod
    def backward(ctx, grad):
        stage, name = ctx.given
        count(ctx, stage)
        x, w = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            getattr(stage, name).main_grad.add_((x.t() @ grad).detach())  # as a kernel does
        return grad @ w.t(), None, None


class Keeps(Product):
    """x @ w that keeps what it returns: `what` says of which. It is told the name of its buffer."""

    @staticmethod
    def backward(ctx, grad):
        stage, name, what = ctx.given
        count(ctx, stage)
        x, w = ctx.saved_tensors
        dx, dw = grad @ w.t(), x.t() @ grad
        if what == "dummy":
            dw = stage.buffer(name, torch.zeros_like(dw)).detach()
        elif what == "view":
            dw = stage.buffer(name, torch.stack([dw, dw]))[1]
        elif what != "activation":
            dw = stage.buffer(name, dw, unseen=what == "unseen")
        if what in ("activation", "both"):
            dx = stage.buffer(f"{name} activation", dx)
        return dx, dw, None


class KeepsTwo(Function):
    """w + u, whose gradients are two parts of one buffer."""

    @staticmethod
    def forward(ctx, w, u, given):
        ctx.given = given
        return w + u

    @staticmethod
    def backward(ctx, grad):
        stage, name = ctx.given
        count(ctx, stage)
        return *stage.buffer(name, torch.stack([grad, grad])).unbind(0), None


class HandsOverKept(Product):
    """x @ w whose handed-over work returns a buffer that it keeps."""

    @staticmethod
    def backward(ctx, grad):
        stage, name = ctx.given
        count(ctx, stage)
        x, w = ctx.saved_tensors
        return grad @ w.t(), zbpipe.defer(lambda g, x: stage.buffer(name, x.t() @ g), 1, (grad, x)), None


class HostSum(Function):
    """The sum of x * v, on the CPU."""

    @staticmethod
    def forward(ctx, x, v, stage):
        ctx.save_for_backward(x, v)
        ctx.stage = stage
        return (x * v).sum().cpu()

    @staticmethod
    def backward(ctx, grad):
        count(ctx, ctx.stage)
        x, v = ctx.saved_tensors
        grad = grad.to(x.device)
        return grad * v.expand_as(x), grad * x.sum(0), None


def keep_products():
    def choose(_ctx, operator, *_args, **_kwargs):
        saves = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


NAMES = {
    "torch": torch,
    "F": F,
    "grouped": grouped,
    "convolved": convolved,
    "checkpoint": checkpoint,
    "saved_tensors_hooks": saved_tensors_hooks,
    "save_on_cpu": save_on_cpu,
    "keep_products": keep_products,
    "ROWS": ROWS,
    "WIDTH": WIDTH,
    "INDICES": torch.tensor([1, 0, 1]),
}
FUNCTIONS = [AddsItself, HandedOver, HandsOverKept, Heeding, HostSum, Ignoring, Keeps, KeepsTwo]
NAMES |= {function.__name__: function for function in [*FUNCTIONS, SameTensorTwice, TwoOutputs]}
