"""Custom autograd.Functions: run exactly once a microbatch, whatever they do with their weights."""

import pytest
import torch
from support.functions import Fused, Heeding, Ignoring, Product, SameTensorTwice, TwoOutputs, count
from support.oracle import MainGrad, Stage, check, weight, wrong_on_torch
from torch.autograd import Function

f64 = torch.float64
runs_twice = wrong_on_torch("the Function runs in I and in W")


class SavesNothing(Function):
    """Sign of x + w with a straight-through gradient."""

    @staticmethod
    def forward(ctx, x, w, stage):
        ctx.stage = stage
        return (x + w).sign()

    @staticmethod
    def backward(ctx, grad):
        count(ctx, ctx.stage)
        return grad, grad.clone(), None


class NonDifferentiable(Function):
    """Values and indices of the largest, times w; the indices have no gradient."""

    @staticmethod
    def forward(ctx, x, w, stage):
        values, indices = x.max(dim=-1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(values, indices, w)
        ctx.shape = x.shape
        ctx.stage = stage
        return values * w, indices

    @staticmethod
    def backward(ctx, grad, _):
        count(ctx, ctx.stage)
        values, indices, w = ctx.saved_tensors
        dx = grad.new_zeros(ctx.shape).scatter_(-1, indices[:, None], (grad * w)[:, None])
        return dx, grad * values, None


class NewStyle(Function):
    """forward without ctx, setup_context apart."""

    @staticmethod
    def forward(x, w, stage):
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, ctx.stage = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx, grad):
        count(ctx, ctx.stage)
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad, None


class OnWeightsAlone(Function):
    @staticmethod
    def forward(ctx, w, stage):
        ctx.save_for_backward(w)
        ctx.stage = stage
        return w.exp()

    @staticmethod
    def backward(ctx, grad):
        count(ctx, ctx.stage)
        (w,) = ctx.saved_tensors
        return grad * w.exp(), None


class InPlace(Function):
    """x *= 2, marked dirty."""

    @staticmethod
    def forward(ctx, x, stage):
        ctx.mark_dirty(x)
        ctx.stage = stage
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx, grad):
        count(ctx, ctx.stage)
        return grad * 2.0, None


class AsksWhatIsNeeded(Product):
    @staticmethod
    def backward(ctx, grad):
        ctx.given.log("needs")(list(ctx.needs_input_grad))
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad, None


@runs_twice
@pytest.mark.parametrize("function", [Heeding, Ignoring, NewStyle, AsksWhatIsNeeded])
def test_product_runs_once(function):
    check(Stage(lambda m, x: function.apply(x, m.a, m).sin() @ m.b, a=(4, 4), b=(4, 4)), (3, 4))


@pytest.mark.parametrize("function", [Heeding, Ignoring, NewStyle])
def test_product_whose_weight_is_frozen_runs_once(function):
    def forward(m, x):
        return function.apply(x, m.a, m).sin() @ m.b

    check(Stage(forward, a=weight(4, 4).requires_grad_(False), b=(4, 4)), (3, 4))


@wrong_on_torch("no input needs a gradient, so there are no groups")
@pytest.mark.parametrize("function", [Heeding, NewStyle])
def test_product_whose_input_needs_no_gradient_runs_once(function):
    check(Stage(lambda m, x: function.apply(x, m.a, m).sin() @ m.b, a=(4, 4), b=(4, 4)), torch.ones(3, 4, dtype=f64))


@runs_twice
def test_function_on_one_weight_that_is_used_elsewhere_too():
    check(Stage(lambda m, x: Ignoring.apply(x @ m.a, m.a, m).sin() @ m.a, a=(4, 4)), (3, 4))


def with_main_grad(m):
    for name, w in list(m.named_parameters()):
        w.main_grad = torch.zeros_like(w)
        m.register_buffer(f"main_{name}", w.main_grad)
        m.kept[name, "main"] = MainGrad(w)


@runs_twice
def test_function_that_adds_the_gradient_of_its_weight_itself_adds_it_once():
    check(
        Stage(lambda m, x: Fused.apply(Fused.apply(x, m.a, m).sin(), m.b, m), a=(4, 4), b=(4, 4)),
        (3, 4),
        setup=with_main_grad,
    )


@runs_twice
def test_function_that_saves_nothing():
    check(Stage(lambda m, x: SavesNothing.apply(x, m.a, m) @ m.b, a=(3, 4), b=(4, 4)), (3, 4))


@runs_twice
def test_function_that_returns_one_tensor_for_two_inputs():
    check(Stage(lambda m, x: SameTensorTwice.apply(x @ m.b, m.a, m), a=(3, 4), b=(4, 4)), (3, 4))


@runs_twice
def test_function_that_returns_one_tensor_for_two_weights():
    check(Stage(lambda m, x: x @ SameTensorTwice.apply(m.a, m.b, m), a=(4, 4), b=(4, 4)), (3, 4))


@runs_twice
def test_function_with_a_non_differentiable_output():
    def forward(m, x):
        values, indices = NonDifferentiable.apply(x @ m.b, m.a, m)
        return values, indices

    check(Stage(forward, a=(3,), b=(4, 4)), (3, 4))


@runs_twice
@pytest.mark.parametrize("used", ["both", "first", "second"])
def test_function_with_two_outputs(used):
    def forward(m, x):
        first, second = TwoOutputs.apply(x, m.a, m.s, m)
        return {"both": first.sin() * second, "first": first.sin(), "second": second.sin()}[used]

    check(Stage(forward, a=(4, 4), s=(4,)), (3, 4))


def test_function_on_weights_alone():
    check(Stage(lambda m, x: x @ OnWeightsAlone.apply(m.a, m), a=(4, 4)), (3, 4))


def test_function_on_weights_alone_shared_by_two_products():
    def forward(m, x):
        w = OnWeightsAlone.apply(m.a, m)
        return (x @ w).sin() @ w + x @ m.b

    check(Stage(forward, a=(4, 4), b=(4, 4)), (3, 4))


def test_function_without_weights():
    check(Stage(lambda m, x: InPlace.apply(x @ m.a, m) @ m.b, a=(4, 4), b=(4, 4)), (3, 4))


@runs_twice
def test_function_with_hooks_around_it():
    def forward(m, x):
        h = Ignoring.apply(x, m.a, m)
        h.register_hook(m.log("tensor"))
        h.grad_fn.register_prehook(m.log("pre"))
        h.grad_fn.register_hook(m.log("post"))
        return h.sin()

    check(Stage(forward, a=(4, 4)), (3, 4), setup=lambda m: m.a.register_hook(m.log("weight")))


class NestedGrad(Function):
    """Runs a backward within its backward, as a reentrant checkpoint does, but only for its input."""

    @staticmethod
    def forward(ctx, x, w, stage):
        ctx.save_for_backward(x, w)
        ctx.stage = stage
        return (x @ w).sin()

    @staticmethod
    def backward(ctx, grad):
        count(ctx, ctx.stage)
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            dx, dw = torch.autograd.grad((x @ w).sin(), [x, w], grad)
        return dx, dw, None


@runs_twice
def test_function_that_runs_autograd_itself():
    check(Stage(lambda m, x: NestedGrad.apply(x, m.a, m) @ m.b, a=(4, 4), b=(4, 4)), (3, 4))
