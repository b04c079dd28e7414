"""Custom autograd.Functions: what many have in common, and some that count their backwards on the stage they are given."""

import torch
from torch.autograd import Function


class Product(Function):
    """x @ w; what else it is given is `ctx.given`. A backward is for who inherits."""

    @staticmethod
    def forward(ctx, x, w, given=None):
        ctx.save_for_backward(x, w)
        ctx.given = given
        return x @ w


class Affine(Function):
    """x @ w + b, without b where that is None; what else it is given is `ctx.given`. A backward is for who inherits."""

    @staticmethod
    def forward(ctx, x, w, b, given=None):
        ctx.save_for_backward(x, w)
        ctx.given = given
        return x @ w if b is None else x @ w + b


def count(ctx, stage, name="backward"):
    key = (name, stage.microbatch)
    stage.records.setdefault(key, []).append(1)


class Heeding(Product):
    """x @ w that computes only what it is asked for."""

    @staticmethod
    def backward(ctx, grad):
        count(ctx, ctx.given)
        x, w = ctx.saved_tensors
        dx = grad @ w.t() if ctx.needs_input_grad[0] else None
        dw = x.t() @ grad if ctx.needs_input_grad[1] else None
        return dx, dw, None


class Ignoring(Product):
    """x @ w that computes both gradients always."""

    @staticmethod
    def backward(ctx, grad):
        count(ctx, ctx.given)
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad, None


class Fused(Product):
    """x @ w that adds the weight's gradient itself and returns None, as Megatron's and Apex's do."""

    @staticmethod
    def backward(ctx, grad):
        count(ctx, ctx.given)
        x, w = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            w.main_grad.add_(x.t() @ grad)
        return grad @ w.t(), None, None


class SameTensorTwice(Function):
    """x + w whose backward returns the one gradient for both."""

    @staticmethod
    def forward(ctx, x, w, stage):
        ctx.stage = stage
        return x + w

    @staticmethod
    def backward(ctx, grad):
        count(ctx, ctx.stage)
        return grad, grad, None


class TwoOutputs(Function):
    """x @ w and x * s. Gradients of outputs that nobody uses come as None."""

    @staticmethod
    def forward(ctx, x, w, s, stage):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w, s)
        ctx.stage = stage
        return x @ w, x * s

    @staticmethod
    def backward(ctx, first, second):
        count(ctx, ctx.stage, f"backward {first is None} {second is None}")
        x, w, s = ctx.saved_tensors
        dx = torch.zeros_like(x)
        dw = ds = None
        if first is not None:
            dx, dw = dx + first @ w.t(), x.t() @ first
        if second is not None:
            dx, ds = dx + second * s, (x * second).sum(0)
        return dx, dw, ds, None
