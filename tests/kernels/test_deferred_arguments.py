"""What zbpipe.defer is given: which weights are whose, whether anyone asks for them, and what reaches the function."""

import collections
import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from support.functions import Affine, Product
from support.oracle import Stage, check, groups_reversed, late, needs_zbpipe, weight
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe._C import will_defer

pytestmark = needs_zbpipe  # torch's module takes no work over

f64 = torch.float64


def plain(x, w, b, *_):
    """What Naming computes, by autograd alone."""
    return x @ w if b is None else x @ w + b


class Naming(Function):
    """x @ w + b; b may be None. `calls`: what it was called for."""

    @staticmethod
    def forward(ctx, x, w, b, calls):
        ctx.save_for_backward(x, w, b)
        ctx.calls = calls
        return plain(x, w, b)

    @staticmethod
    def backward(ctx, grad):
        x, w, _ = ctx.saved_tensors
        calls = ctx.calls

        def weight_grads(x, grad):
            calls.append(1)
            return x.mT @ grad, grad.sum(0)

        return grad @ w.mT, *zbpipe.defer(weight_grads, (1, 2), (x, grad)), None


def hold(forward, *inputs, **parts):
    """Against the oracle, and that against autograd without any Function of ours."""
    calls = []
    stage = Stage(lambda m, *x: forward(m, lambda *args: Naming.apply(*args, calls), *x), **parts)
    reference = copy.deepcopy(stage)
    reference.function = lambda m, *x: forward(m, plain, *x)
    made = [torch.randn(shape, dtype=f64) if isinstance(shape, tuple) else shape() for shape in inputs]
    results = []
    for one in (stage, reference):
        leaves = [x.detach().requires_grad_(isinstance(shape, tuple)) for x, shape in zip(made, inputs, strict=True)]
        one(*leaves).sum().backward()
        results.append([t.grad for t in (*one.parameters(), *leaves)])
        one.zero_grad()
    torch.testing.assert_close(*results)
    for choice in ("matrices", "all"):
        with zbpipe.policy(defer=choice):
            calls.clear()
            given = (shape if isinstance(shape, tuple) else shape() for shape in inputs)
            check(stage, *given, orders=(late, groups_reversed))


# Which weights


FROM_INPUT = {
    "gated": lambda m, layer, x: layer(x, m.a * torch.sigmoid((x @ m.b).mean()), m.b),
    "nothing but gated": lambda m, layer, x: layer(x, m.a * torch.sigmoid((x @ m.b).mean()), None),
    "weight and bias gated": lambda m, layer, x: layer(x, m.a * x.mean(), m.b * x.sum()),
    "of the input alone": lambda m, layer, x: layer(x, x.mT @ x, m.b) @ m.a,
    "a view of the input": lambda m, layer, x: layer(x[:, :4], x[:4, :4], m.b) @ m.a,
    "the input itself": lambda m, layer, x: layer(x[:4], x.view(4, 4), None) @ m.a,
    "behind another": lambda m, layer, x: layer(x, layer(m.a, m.a * x.mean(), None), m.b),
}


@pytest.mark.parametrize("how", FROM_INPUT)
def test_weights_computed_from_the_stage_input(how):
    hold(FROM_INPUT[how], (4, 4), a=(4, 4), b=(4,))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_that_is_a_stage_input(bias, view):
    def forward(m, layer, x, w):
        return layer(x, w.mT if view else w, m.b if bias else None) @ m.a * m.b

    hold(forward, (3, 4), (4, 4), a=(4, 4), b=(4,))


def test_a_stage_input_that_is_no_leaf_is_a_weight():
    w, a = torch.randn(4, 4, dtype=f64, requires_grad=True), weight(4, 4)
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    h = w * 2
    out = Naming.apply(x, h, None, []) @ a
    (dx, dh), groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x, h], [a])
    zbpipe.stage_backward_weight([a], groups)
    expected = torch.autograd.grad((x @ h @ a).sum(), [x, h, a])
    torch.testing.assert_close((dx, dh, a.grad), expected)


SHARED = {
    "two Functions": lambda m, layer, x: layer(layer(x, m.a, m.b), m.a, m.b),
    "two views": lambda m, layer, x: layer(layer(x, m.a.mT, m.b), m.a.view(16).view(4, 4), None),
    "autocast's cache": lambda m, layer, x: layer(layer(x, m.a.float().double(), m.b), m.a.float().double(), m.b),
    "gated and not": lambda m, layer, x: layer(layer(x, m.a * x.mean(), m.b), m.a, m.b),
}


@pytest.mark.parametrize("how", SHARED)
def test_weights_that_several_functions_share(how):
    hold(SHARED[how], (3, 4), a=(4, 4), b=(4,))


def test_a_cast_that_autocast_caches_for_all_microbatches():
    torch.manual_seed(0)
    w, xs = nn.Parameter(torch.randn(4, 4)), [torch.randn(3, 4) for _ in range(2)]

    class Casts(Product):
        """Is given what F.linear makes of a weight."""

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w.mT, zbpipe.defer(lambda x, g: x.mT @ g, 1, (x, grad))

    def run(split):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = w.bfloat16()
            inputs = [x.bfloat16().requires_grad_() for x in xs]
            outs = [Casts.apply(x, cast) for x in inputs]
        groups = []
        for x, out in zip(inputs, outs, strict=True):
            if split:
                groups.append(zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])[1])
            else:
                out.backward(torch.ones_like(out), retain_graph=True)
        for group in groups:
            zbpipe.stage_backward_weight([w], group)
        grad, w.grad = w.grad, None
        return grad

    torch.testing.assert_close(run(split=True), run(split=False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_weights_computed_from_the_input_within_a_checkpoint(reentrant):
    calls = []

    def forward(m, x):
        def region(x):
            return Naming.apply(x, m.a * x.mean(), m.b, calls).sin()

        return checkpoint(region, x, use_reentrant=reentrant) @ m.a

    check(Stage(forward, a=(4, 4), b=(4,)), (3, 4), untouched=not reentrant, orders=(late, groups_reversed))


@pytest.mark.parametrize("split", [False, True])
def test_numbers_of_other_types_are_positions(split):
    class Index:
        def __index__(self):
            return 1

    class By(Naming):
        @staticmethod
        def backward(ctx, grad):
            x, w, _ = ctx.saved_tensors
            assert will_defer((1,)) == split
            return grad @ w.mT, zbpipe.defer(lambda x, g: x.mT @ g, Index(), (x, grad)), None, None

    x, w = torch.randn(3, 4, dtype=f64, requires_grad=True), weight(4, 4)
    out = By.apply(x, w, None, None)
    if split:
        _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
        zbpipe.stage_backward_weight([w], groups)
    else:
        out.sum().backward()
    torch.testing.assert_close(w.grad, x.detach().mT @ torch.ones(3, 4, dtype=f64))


@pytest.mark.parametrize("batched", [False, True])
def test_a_function_with_a_vmap_rule(batched):
    """What a backward within vmap computes on does not live until W: it runs at once."""
    calls = []

    class Ruled(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, w, b):
            return plain(x, w, b)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            ctx.calls = calls
            return Naming.backward(ctx, grad)[:3]

    def forward(m, x):
        if batched:
            x = torch.vmap(lambda x: Ruled.apply(x, m.a, None))(x)
            return torch.vmap(lambda x: Ruled.apply(x, m.a, m.b))(x)
        return Ruled.apply(Ruled.apply(x, m.a, None), m.a, m.b)

    check(Stage(forward, a=(4, 4), b=(4,)), (2, 3, 4) if batched else (3, 4), orders=(late,))


# Whether anyone asks


@pytest.mark.parametrize("needs_grad", [False, True])
def test_an_optional_weight_that_is_none(needs_grad):
    inputs = ((3, 4),) if needs_grad else (lambda: torch.ones(3, 4, dtype=f64),)
    hold(lambda m, layer, x: layer(x, m.a, None), *inputs, a=(4, 4))
    hold(lambda m, layer, x: layer(x, m.a.sin(), None) @ m.b, *inputs, a=(4, 4), b=(4, 2))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_frozen_weight_beside_one_that_is_not(needs_grad):
    """Also where W runs the Function: there is no stage input behind it."""
    inputs = ((3, 4),) if needs_grad else (lambda: torch.ones(3, 4, dtype=f64),)
    hold(lambda m, layer, x: layer(x, m.a, m.b), *inputs, a=weight(4, 4).requires_grad_(False), b=(4,))


class Alone(Affine):
    """x @ w + b; only w's gradient is handed over."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        calls = ctx.given

        def weight_grad(x, grad):
            calls.append(1)
            return x.mT @ grad

        return grad @ w.mT, zbpipe.defer(weight_grad, 1, (x, grad)), grad.sum(0), None


@pytest.mark.parametrize("which", ["frozen", "not given to the pass"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_work_that_nobody_asks_for_is_not_done(which, needs_grad):
    calls = []
    x = torch.randn(3, 4, dtype=f64, requires_grad=needs_grad)
    w, b = weight(4, 4).requires_grad_(which != "frozen"), weight(4)
    out = Alone.apply(x, w, b, calls).sin()
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [b])
    zbpipe.stage_backward_weight([b], groups)
    assert calls == []
    assert w.grad is None
    torch.testing.assert_close(b.grad, torch.autograd.grad(((x @ w) + b).sin().sum(), [b])[0])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_whole_backward_into_main_grad(bias, frozen):
    """There a proxy runs the Function."""
    torch.manual_seed(0)
    calls = []
    w, b, c = weight(4, 4).requires_grad_(not frozen), weight(4) if bias else None, weight(4, 4)
    trained = [p for p in (w, b, c) if p is not None and p.requires_grad]
    for p in trained:
        p.main_grad = torch.zeros_like(p)
    expected = [torch.zeros_like(p) for p in trained]
    for _ in range(2):
        x = torch.randn(3, 4, dtype=f64, requires_grad=True)
        for total, grad in zip(expected, torch.autograd.grad((plain(x, w, b) @ c).sum(), trained), strict=True):
            total += grad
        with zbpipe.policy(main_grad=True):
            out = Naming.apply(x, w, b, calls) @ c
            zbpipe.stage_backward(out, torch.ones_like(out), [x])
    torch.testing.assert_close([p.main_grad for p in trained], expected)
    assert all(p.grad is None for p in trained)
    assert len(calls) == (0 if frozen and not bias else 2)


class AddsAll(Affine):
    """x @ w + shift whose work names no weight; `calls` instead of adding to a main_grad."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        calls = ctx.given
        assert zbpipe.defer(lambda x, grad: calls.append(1), None, (x, grad)) is None
        return grad @ w.mT, None, None, None


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("prepare", [lambda w: w, lambda w: w.float().double(), lambda w: w + torch.exp(w) * w.sin()])
def test_work_for_weights_that_nobody_names_is_done_once_in_every_backward(prepare, frozen, given):
    """As that of a Function which adds by itself; where no weight is I's to compute, at once."""
    for how in ("split", "backward", "input alone"):
        calls = []
        x = torch.randn(3, 4, dtype=f64, requires_grad=True)
        w, p = weight(4, 4).requires_grad_(not frozen), weight(4, 4)
        out = AddsAll.apply(x, prepare(w), torch.ones(4, dtype=f64), calls).sin() @ p
        if how == "split":
            weights = [w, p] if given else [p]
            _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], weights)
            assert len(calls) == (1 if frozen or not given else 0)
            zbpipe.stage_backward_weight(weights, groups)
        elif how == "backward":
            out.sum().backward()
        else:
            torch.autograd.grad(out.sum(), [x])
        assert calls == [1]


# What reaches the function


class Takes(Function):
    """x @ w; `saved(x, w, grad)` is what its work is given, `work` is what it does."""

    @staticmethod
    def forward(ctx, x, w, saved, work):
        ctx.save_for_backward(x, w)
        ctx.saved, ctx.work = saved, work
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.mT, zbpipe.defer(ctx.work, 1, ctx.saved(x, w, grad)), None, None


class Sine(Function):
    """x.sin(), of which one can tell how long its node lives."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


def take(saved, work=None, **choices):
    """Runs two microbatches split, and one whole; checks the gradients, and that the groups do not hold the graph.
    Returns what the work was given in each, and the bytes of the first group before W."""
    torch.manual_seed(0)
    given, w, bytes_held, nodes = [], weight(4, 4), [], []

    def run(*arguments):
        given.append(arguments)
        return given_grad(work(*arguments) if work else arguments)

    def given_grad(found):
        x, grad = found[:2]
        return torch.Tensor.detach(x).as_subclass(torch.Tensor).mT @ grad

    groups, expected = [], torch.zeros_like(w)
    for _ in range(2):
        x = torch.randn(3, 4, dtype=f64, requires_grad=True)
        expected += torch.autograd.grad((Sine.apply(x) @ w).sin().sum(), [w])[0]
        out = Takes.apply(Sine.apply(x), w, saved, run)
        nodes.append(weakref.ref(out.grad_fn.next_functions[0][0]))
        out = out.sin()
        with zbpipe.policy(**choices):
            groups += zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])[1]
        del out
    bytes_held = [group.bytes_held for group in groups]
    held = [node() is not None for node in nodes]
    zbpipe.stage_backward_weight([w], groups)
    torch.testing.assert_close(w.grad, expected)
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    Takes.apply(Sine.apply(x), w, saved, run).sin().sum().backward()
    assert held == [False, False], "the graph is held"
    return SimpleNamespace(split=given[0], whole=given[2], bytes=bytes_held[0])


MATRICES = 2 * 3 * 4 * 8  # bytes of x and of the output's gradient


Fields = collections.namedtuple("Fields", "x grad")


def endless(x):
    made = [{"x": x}]
    made.append((made,))
    return made


@pytest.mark.parametrize("make", [lambda x: [x], lambda x: {"x": (x,)}, lambda x: Fields(x, 1), endless])
def test_containers_are_handed_on_as_they_are_and_must_not_hold_the_graph(make):
    made = []

    def saved(x, w, grad):
        made.append(make(x.detach()))
        return x, grad, made[-1]

    found = take(saved)
    assert found.split[2] is made[0] and found.whole[2] is made[2]
    assert found.bytes == MATRICES
    for of_x in (lambda x: x, lambda x: x.mT):  # a view that is made without grad mode keeps the graph as well
        for split in (True, False):
            x, w, calls = torch.randn(3, 4, dtype=f64, requires_grad=True), weight(4, 4), []
            out = Takes.apply(x.sin(), w, lambda x, w, g, of=of_x: (x, g, make(of(x))), calls.append).sin()
            run = zbpipe.stage_backward_input if split else torch.autograd.backward
            with pytest.raises((RuntimeError, ValueError)) as failed:
                run([out], [torch.ones_like(out)], *([[x], [w]] if split else []))
            error = failed.value.__cause__ if split else failed.value
            assert isinstance(error, ValueError) and "that has a history; pass the tensor itself in saved" in str(error)
            assert calls == [] and w.grad is None and x.grad is None


@pytest.mark.parametrize("how", ["frozen", "another stage's", "a view", "a view of a frozen one", "detached"])
def test_parameters_are_not_counted(how):
    base = weight(4, 4).requires_grad_(how == "another stage's")
    base.tag = "base"
    of = {
        "a view": lambda w: w.mT,
        "a view of a frozen one": lambda w: base[:2],
        "detached": lambda w: w.detach(),
    }.get(how, lambda w: base)
    found = take(lambda x, w, grad: (x, grad, of(w)))
    assert found.bytes == MATRICES
    if how in ("frozen", "another stage's"):
        assert found.split[2] is base


def test_a_frozen_parameter_that_was_changed_is_refused():
    base = weight(4, 4).requires_grad_(False)
    x, w = torch.randn(3, 4, dtype=f64, requires_grad=True), weight(4, 4)
    out = Takes.apply(x, w, lambda x, w, g: (x, g, base), print).sin()
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    base.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        zbpipe.stage_backward_weight([w], groups)


@pytest.mark.parametrize("reentrant", [False, True])
def test_parameters_are_not_counted_within_a_checkpoint(reentrant):
    """There a saved tensor is another view of the weight."""
    x, w = torch.randn(3, 4, dtype=f64, requires_grad=True), weight(4, 4)
    given = []

    def saved(x, w, grad):
        return x, grad, w

    def work(x, grad, w):
        given.append(w)
        return x.mT @ grad

    out = checkpoint(lambda x: Takes.apply(x.sin(), w, saved, work).sin(), x, use_reentrant=reentrant)
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    assert [group.bytes_held for group in groups] == ([] if reentrant else [MATRICES])
    zbpipe.stage_backward_weight([w], groups)
    assert torch.equal(given[0], w)


class Scaled(torch.Tensor):
    """A tensor with attributes."""

    __slots__ = ("place",)
    scale = 1.0

    @staticmethod
    def of(x):
        made = x.as_subclass(Scaled)
        made.scale, made.place = 2.0, "slot"
        return made


class Wrapped(torch.Tensor):
    """A tensor within another one; unwraps for every operation but detach and views."""

    @staticmethod
    def __new__(cls, inner, unit):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner, unit):
        self.inner, self.unit = inner, unit

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrapped = torch.utils._pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        result = func(*unwrapped[0], **unwrapped[1])
        keeps = func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
        return cls(result, args[0].unit) if keeps else result


class Wrap(Function):
    @staticmethod
    def forward(ctx, x):
        return Wrapped(x.sin(), "m")

    @staticmethod
    def backward(ctx, grad):
        return grad


def noted(x):
    made = x.sin()
    made.scale = 2.0
    return made


def attributes(tensor):
    return type(tensor), getattr(tensor, "scale", None), getattr(tensor, "place", None), getattr(tensor, "unit", None)


SUBCLASSES = {
    "no class": lambda x: noted(x),
    "a class": lambda x: Scaled.of(x),
    "a wrapper": lambda x: Wrapped(x, "m"),
}


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("how", SUBCLASSES)
def test_tensors_keep_their_class_and_attributes(how, history):
    def saved(x, w, grad):
        with torch.set_grad_enabled(history):
            tensor = SUBCLASSES[how](x if how != "a wrapper" else x.detach())
        if how == "a wrapper":
            tensor.requires_grad_(history)
        tensor.extra = "user's"
        return x, grad, tensor

    found = take(saved)
    split, whole = found.split[2], found.whole[2]
    assert attributes(split) == attributes(whole)
    assert split.extra == whole.extra == "user's"
    assert split.grad_fn is None and not split.requires_grad


def test_a_subclass_shares_memory_and_version_with_the_original():
    x, w = torch.randn(3, 4, dtype=f64, requires_grad=True), weight(4, 4)
    h = Scaled.of(x.sin())
    out = Takes.apply(x, w, lambda x, w, g: (x, g, h), print).sin()
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        zbpipe.stage_backward_weight([w], groups)


def test_a_view_that_the_backward_makes_does_not_hold_the_graph():
    """Without grad mode a view needs no gradient, but keeps what it is a view of."""
    found = take(lambda x, w, grad: (x.mT.mT, grad))
    assert found.bytes == MATRICES
    assert found.split[0]._base is None
