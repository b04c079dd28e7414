"""Custom autograd.Functions: run exactly once a microbatch, whatever they do with their weights."""

import functools

import torch
from support.functions import Fused, Heeding, Ignoring, Product, SameTensorTwice, TwoOutputs, count, function_of
from support.oracle import MainGrad, Stage, case, check, table, weight
from torch.autograd import Function

f64 = torch.float64
TWICE = "the Function runs in I and in W"


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


@functools.partial(function_of, lambda w, stage: w.exp())
def on_weights_alone(w, stage, grad):
    count(None, stage)
    return grad * w.exp()


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


@functools.partial(function_of, lambda x, w, stage: (x @ w).sin())
def nested_grad(x, w, stage, grad):
    """Runs a backward within its backward, as a reentrant checkpoint does, but only for its input."""
    count(None, stage)
    x, w = (t.detach().requires_grad_() for t in (x, w))
    with torch.enable_grad():
        return torch.autograd.grad((x @ w).sin(), [x, w], grad)


def with_main_grad(m):
    for name, w in list(m.named_parameters()):
        w.main_grad = torch.zeros_like(w)
        m.register_buffer(f"main_{name}", w.main_grad)
        m.kept[name, "main"] = MainGrad(w)


def product(function):
    return lambda m, x: function.apply(x, m.a, m).sin() @ m.b


def two_outputs(use):
    return lambda m, x: use(*TwoOutputs.apply(x, m.a, m.s, m))


def shared_by_two_products(m, x):
    w = on_weights_alone(m.a, m)
    return (x @ w).sin() @ w + x @ m.b


def hooked(m, x):
    h = Ignoring.apply(x, m.a, m)
    h.register_hook(m.log("tensor"))
    h.grad_fn.register_prehook(m.log("pre"))
    h.grad_fn.register_hook(m.log("post"))
    return h.sin()


@table(
    *(case(f.__name__, product(f), wrong=TWICE) for f in (Heeding, Ignoring, NewStyle, AsksWhatIsNeeded)),
    *(
        case(f"{f.__name__}, frozen", Stage(product(f), a=weight(4, 4).requires_grad_(False), b=(4, 4)))
        for f in (Heeding, Ignoring, NewStyle)
    ),
    *(
        case(
            f"{f.__name__}, no input needs a gradient",
            product(f),
            torch.ones(3, 4, dtype=f64),
            wrong="no input needs a gradient, so there are no groups",
        )
        for f in (Heeding, NewStyle)
    ),
    case("weight that is used elsewhere too", lambda m, x: Ignoring.apply(x @ m.a, m.a, m).sin() @ m.a, wrong=TWICE),
    case(
        "adds its weight's gradient itself",
        lambda m, x: Fused.apply(Fused.apply(x, m.a, m).sin(), m.b, m),
        setup=with_main_grad,
        wrong=TWICE,
    ),
    case("saves nothing", lambda m, x: SavesNothing.apply(x, m.a, m) @ m.b, (4, 4), wrong=TWICE),
    case(
        "one tensor for an input and a weight", lambda m, x: SameTensorTwice.apply(x @ m.b, m.a, m), (4, 4), wrong=TWICE
    ),
    case("one tensor for two weights", lambda m, x: x @ SameTensorTwice.apply(m.a, m.b, m), wrong=TWICE),
    case(
        "output that is not differentiable", lambda m, x: NonDifferentiable.apply(x @ m.b, m.s, m), (4, 4), wrong=TWICE
    ),
    case("both outputs used", two_outputs(lambda first, second: first.sin() * second), wrong=TWICE),
    case("first output used", two_outputs(lambda first, second: first.sin()), wrong=TWICE),
    case("second output used", two_outputs(lambda first, second: second.sin()), wrong=TWICE),
    case("on weights alone", lambda m, x: x @ on_weights_alone(m.a, m)),
    case("on weights alone, shared by two products", shared_by_two_products),
    case("without weights, in place", lambda m, x: InPlace.apply(x @ m.a, m) @ m.b),
    case("hooks around it", hooked, setup=lambda m: m.a.register_hook(m.log("weight")), wrong=TWICE),
    case("runs autograd itself", lambda m, x: nested_grad(x, m.a, m) @ m.b, wrong=TWICE),
)
def test_function_runs_once(stage, inputs, options):
    check(stage, *inputs, **options)
