"""What a line of a random program may name: torch's, and Functions and contexts of these tests."""

import torch
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zbpipe
from support.functions import Heeding, Ignoring, Product, SameTensorTwice, TwoOutputs, count
from support.programs import ROWS, WIDTH


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
            getattr(stage, name).main_grad.add_(x.t() @ grad)
        return grad @ w.t(), None, None


def keep_products():
    def choose(_ctx, operator, *_args, **_kwargs):
        saves = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


NAMES = {
    "torch": torch,
    "F": F,
    "checkpoint": checkpoint,
    "saved_tensors_hooks": saved_tensors_hooks,
    "save_on_cpu": save_on_cpu,
    "keep_products": keep_products,
    "ROWS": ROWS,
    "WIDTH": WIDTH,
    "INDICES": torch.tensor([1, 0, 1]),
    **{
        function.__name__: function
        for function in (AddsItself, Heeding, Ignoring, SameTensorTwice, TwoOutputs, HandedOver)
    },
}
