"""Custom autograd.Functions: what many have in common, and some that count their backwards on the stage they are given."""

import torch
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

import zbpipe


class FailsAt(TorchDispatchMode):
    """From their n-th call on (0: the first) these operators fail, before they have done anything; all if none is named."""

    def __init__(self, n, *operators, error=torch.OutOfMemoryError):
        super().__init__()
        self.left, self.operators, self.error = n, operators, error

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self.operators or function.overloadpacket in self.operators:
            self.left -= 1
            if self.left < 0:
                raise self.error(f"planted: {function} fails")
        return function(*args, **(kwargs or {}))


class Planned(Exception):
    """What no library raises."""


def raising():
    """A hook that raises the first time it is called."""
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) == 1:
            raise Planned("from the hook")

    return hook


def function_of(forward, backward):
    """The `apply` of a Function that saves its tensors. `backward` gets the arguments and the gradient; what it does not give is None."""

    class Made(Function):
        @staticmethod
        def forward(ctx, *given):
            ctx.others = [None if isinstance(each, torch.Tensor) else each for each in given]
            ctx.save_for_backward(*(each if isinstance(each, torch.Tensor) else None for each in given))
            return forward(*given)

        @staticmethod
        def backward(ctx, grad):
            given = [o if saved is None else saved for saved, o in zip(ctx.saved_tensors, ctx.others, strict=True)]
            return padded(backward(*given, grad), len(given))

    return Made.apply


def handing_through(forward, backward):
    """The `apply` of a Function of one tensor, of which it saves nothing. `backward` gets the gradient."""

    class Made(Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad)

    return Made.apply


def padded(grads, count):
    grads = grads if isinstance(grads, tuple) else (grads,)
    return *grads, *[None] * (count - len(grads))


# Its backward wants more memory than there is.
hungry = handing_through(lambda x: x.clone(), lambda grad: grad + torch.empty(1 << 50).sum())


class Product(Function):
    """x @ w; what else it is given is `ctx.given`. A backward is for who inherits."""

    @staticmethod
    def forward(ctx, x, w, given=None):
        ctx.save_for_backward(x, w)
        ctx.given = given
        return x @ w


def product_of(x, w, b=None):
    return x @ w if b is None else x @ w + b


class Asks(Function):
    """x @ w + b, without b where that is None. The gradients of w and b are what `ask(x, w, grad)` gives."""

    @staticmethod
    def forward(ctx, x, w, b, ask):
        ctx.save_for_backward(x, w)
        ctx.ask = ask
        return product_of(x, w, b)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.mT, *ctx.ask(x, w, grad), None


def hand_over(x, w, grad):
    """As what Asks asks: both gradients are W's to compute."""
    return zbpipe.defer(lambda x, grad: (x.mT @ grad, grad.sum(0)), (1, 2), (x, grad))


class Handing(Product):
    """x @ w that hands its weight's gradient over."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.mT, zbpipe.defer(lambda x, grad: x.mT @ grad, 1, (x, grad)), None


class Scaled(Function):
    """w.exp(), computed from a weight alone; hands over, though there is no need."""

    @staticmethod
    def forward(ctx, w):
        result = w.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        return zbpipe.defer(lambda grad, result: grad * result, weights=0, saved=(grad, *ctx.saved_tensors))


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


class FusedWithDummy(Function):
    """x @ w that adds to main_grad, says so, and returns a dummy for the sake of hooks, as TransformerEngine's does."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.weight = w
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        with torch.no_grad():
            ctx.weight.main_grad.add_(x.t() @ grad)
        ctx.weight.grad_added_to_main_grad = True
        return grad @ w.t(), torch.full_like(w, 7.0)


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
