"""zbpipe.defer: work that a Function's backward hands over in I is done in W, once, and added as all else is."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from support.functions import Affine, Product
from support.oracle import ORDERS, MainGrad, Stage, check, late, needs_zbpipe, one_weight_pass, watch_weights, weight
from torch import nn
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe._C import will_defer

pytestmark = needs_zbpipe  # torch's module takes no work over

f64 = torch.float64


class Phases:
    """Which pass runs, for the functions that are handed over to say where they were called."""

    def __init__(self):
        self.calls = []
        self.phase = "forward"

    def __call__(self, name):
        self.calls.append((name, self.phase))


@pytest.fixture
def phases(monkeypatch):
    """Tells what `note(name)` is called in: "forward", "I", "W" or "backward"."""
    note = Phases()

    def watch(owner, name, phase):
        run = getattr(owner, name)

        def wrapped(*args, **kwargs):
            before, note.phase = note.phase, phase
            try:
                return run(*args, **kwargs)
            finally:
                note.phase = before

        monkeypatch.setattr(owner, name, wrapped)

    watch(zbpipe, "stage_backward_input", "I")
    watch(zbpipe, "stage_backward_weight", "W")
    watch(torch.autograd, "backward", "backward")
    return note


class Linear(Affine):
    """x @ w + b; b may be None."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        note = ctx.given or (lambda name: None)

        def weight_grads(x, grad):
            note("work")
            return x.mT @ grad, grad.sum(0)

        dw, db = zbpipe.defer(weight_grads, weights=(1, 2), saved=(x, grad))
        return grad @ w.mT, dw, db, None


def two_layers(m, x):
    return Linear.apply(Linear.apply(x, m.a, m.b).sin(), m.c, None)


def layers():
    return {"a": (4, 5), "b": (5,), "c": (5, 3)}


def test_gradients_are_those_of_an_ordinary_backward():
    check(Stage(two_layers, **layers()), (3, 4), exact=True, orders=(*ORDERS, one_weight_pass))


def test_work_is_done_in_the_weight_pass(phases):
    def forward(m, x):
        return Linear.apply(Linear.apply(x, m.a, m.b, phases).sin(), m.c, None, phases)

    check(Stage(forward, **layers()), (3, 4), orders=(late,))
    assert phases.calls == [("work", "W")] * 4 + [("work", "backward")] * 4


def test_gradients_that_exist_are_added_to():
    check(Stage(two_layers, **layers()), (3, 4), existing=True, exact=True)


def test_hooks_of_the_weights_fire_once_each_in_the_weight_pass():
    check(Stage(two_layers, **layers()), (3, 4), setup=watch_weights, exact=True)


def test_hooks_of_the_accumulators_fire_once_each():
    def setup(m):
        for name, w in m.named_parameters():
            node = torch.autograd.graph.get_gradient_edge(w).node
            node.register_prehook(m.log(f"pre {name}"))
            node.register_hook(m.log(f"post {name}", lambda outputs, grads: grads))
            m.kept[name, "node"] = Keep(node)

    check(Stage(two_layers, **layers()), (3, 4), setup=setup)


class Keep:
    """Keeps an object alive as long as the oracle's run."""

    grad = None

    def __init__(self, what):
        self.what = what


@pytest.mark.parametrize("where", ["tensor", "pre", "post"])
def test_hooks_around_the_function(where, phases):
    def forward(m, x):
        h = Linear.apply(x @ m.c, m.a, m.b, phases)
        if where == "tensor":
            h.register_hook(m.log("tensor"))
        elif where == "pre":
            h.grad_fn.register_prehook(m.log("pre"))
        else:
            h.grad_fn.register_hook(m.log("post"))  # is owed all gradients at once
        return h.sin()

    check(Stage(forward, a=(4, 5), b=(5,), c=(4, 4)), (3, 4), orders=(late,))
    assert phases.calls[:2] == [("work", "I" if where == "post" else "W")] * 2


class Partly(Affine):
    """x @ w + b: the weight's gradient is handed over in two halves, the bias's is returned."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        note = ctx.given

        def half(x, grad):
            note("half")
            return x.mT @ grad / 2

        first = zbpipe.defer(half, weights=1, saved=(x, grad))
        second = zbpipe.defer(half, weights=(1,), saved=(x, grad))[0]
        dw = None if first is None else first + second
        return grad @ w.mT, dw, grad.sum(0), None


@pytest.mark.parametrize("watched", [False, True])
def test_several_works_and_a_returned_gradient(phases, watched):
    def forward(m, x):
        return Partly.apply(x, m.a, m.b, phases).sin()

    setup = watch_weights if watched else (lambda m: None)
    check(Stage(forward, a=(4, 5), b=(5,)), (3, 4), setup=setup)
    assert phases.calls[:2] == [("half", "W")] * 2


class HalfNow(Product):
    """x @ w: one half of the weight's gradient is returned in I, the other one handed over."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        half = x.mT @ grad / 2
        later = zbpipe.defer(lambda x, grad: x.mT @ grad / 2, weights=1, saved=(x, grad))
        return grad @ w.mT, half if later is None else half + later


@pytest.mark.parametrize("watched", [False, True])
def test_what_is_returned_and_what_is_handed_over_add_up(watched):
    setup = watch_weights if watched else (lambda m: None)
    check(Stage(lambda m, x: HalfNow.apply(x, m.a).sin(), a=(4, 5)), (3, 4), setup=setup)


def test_a_weight_that_is_used_by_the_function_and_by_a_product(phases):
    def forward(m, x):
        return Linear.apply(x @ m.a, m.a, m.b, phases).sin() @ m.a.mT

    check(Stage(forward, a=(4, 4), b=(4,)), (3, 4))
    assert ("work", "I") not in phases.calls


class GivenTwice(Function):
    """x @ a + x @ b, for two weights that may be one."""

    @staticmethod
    def forward(ctx, x, a, b):
        ctx.save_for_backward(x, a, b)
        return x @ a + x @ b

    @staticmethod
    def backward(ctx, grad):
        x, a, b = ctx.saved_tensors
        da, db = zbpipe.defer(lambda x, g: (x.mT @ g, x.mT @ g), (1, 2), (x, grad))
        return grad @ a.mT + grad @ b.mT, da, db


def test_a_weight_that_is_given_twice():
    check(Stage(lambda m, x: GivenTwice.apply(x, m.a, m.a).sin(), a=(4, 5)), (3, 4))
    check(Stage(lambda m, x: GivenTwice.apply(x, m.a, m.b).sin(), a=(4, 5), b=(4, 5)), (3, 4))


COMPUTED = {
    "view": lambda m, x: m.a.mT,
    "view of a view": lambda m, x: m.a.reshape(2, 10)[:, :].reshape(4, 5).mT,
    "slice": lambda m, x: torch.cat([m.a, m.a])[2:6].mT,
    "cast": lambda m, x: m.a.mT.float().double(),
    "computed": lambda m, x: (m.a.sin() * m.b[:4, None]).mT,
    "computed by a Function": lambda m, x: Scaled.apply(m.a).mT,
}


class Scaled(Function):
    """w.exp(), computed from weights alone; hands over too, though there is no need."""

    @staticmethod
    def forward(ctx, w):
        result = w.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        return zbpipe.defer(lambda grad, result: grad * result, weights=0, saved=(grad, *ctx.saved_tensors))


@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.parametrize("watched", [False, True])
def test_weights_that_are_computed_from_others(how, watched, phases):
    """The gradient travels on, in W, to the parameters."""

    def forward(m, x):
        return Linear.apply(x, COMPUTED[how](m, x), None, phases).sin() @ m.c

    setup = watch_weights if watched else (lambda m: None)
    check(Stage(forward, a=(4, 5), b=(5,), c=(4, 2)), (3, 5), setup=setup)
    assert {phase for _, phase in phases.calls} == {"W", "backward"}


def test_a_weight_that_is_computed_from_the_input_gets_its_gradient_at_once(phases):
    def forward(m, x):
        return Linear.apply(x, x.mT @ m.a, m.b, phases).sin()

    check(Stage(forward, a=(3, 5), b=(5,)), (3, 4), orders=(late,))
    assert phases.calls[:2] == [("work", "I")] * 2


def test_frozen_weights_cost_nothing(phases):
    def forward(m, x):
        return Linear.apply(Linear.apply(x, m.a, m.b, phases), m.c, None, phases)

    parts = {"a": weight(4, 5).requires_grad_(False), "b": weight(5).requires_grad_(False), "c": (5, 3)}
    check(Stage(forward, **parts), (3, 4), orders=(late,))
    assert phases.calls == [("work", "W")] * 2 + [("work", "backward")] * 2


def test_weights_that_the_input_pass_was_not_given_are_left_alone(phases):
    stage = Stage(lambda m, x: Linear.apply(Linear.apply(x, m.a, m.b, phases), m.c, None, phases), **layers())
    check(stage, (3, 4), weights=lambda m: [m.c], orders=(late,))
    assert phases.calls[:2] == [("work", "W")] * 2
    assert phases.calls[2:] == [("work", "backward")] * 4


def test_an_input_that_needs_no_gradient(phases):
    """Then the whole Function runs in W, where its work runs at once."""
    stage = Stage(lambda m, x: Linear.apply(x, m.a, m.b, phases).sin() @ m.c, **layers())
    check(stage, torch.ones(3, 4, dtype=f64), orders=(late,))
    assert phases.calls[:2] == [("work", "W")] * 2


def test_autograd_grad_for_the_input_alone_computes_nothing_for_weights(phases):
    m = Stage(lambda m, x: Linear.apply(x, m.a, m.b, phases).sin(), a=(4, 5), b=(5,))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    (dx,) = torch.autograd.grad(m(x).sum(), [x])
    assert phases.calls == []
    (da,) = torch.autograd.grad(m(x).sum(), [m.a])
    assert phases.calls == [("work", "forward")]
    expected = torch.autograd.grad((x @ m.a + m.b).sin().sum(), [x, m.a])
    torch.testing.assert_close((dx, da), expected)


class SecondOrder(Product):
    """x @ w whose gradients can be differentiated again."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.mT, zbpipe.defer(lambda x, grad: x.mT @ grad, weights=1, saved=(x, grad))


def test_an_ordinary_backward_can_be_differentiated():
    x, w = (torch.randn(3, 3, dtype=f64, requires_grad=True) for _ in range(2))
    torch.autograd.gradcheck(SecondOrder.apply, (x, w))
    torch.autograd.gradgradcheck(SecondOrder.apply, (x, w))


# Policy


@pytest.mark.parametrize(
    ("defer", "where"),
    [("nothing", "I"), ("matrices", "W"), ("all", "W")],
)
def test_the_policy_decides(defer, where, phases):
    stage = Stage(lambda m, x: Linear.apply(x, m.a, m.b, phases).sin(), a=(4, 5), b=(5,))
    with zbpipe.policy(defer=defer):
        check(stage, (3, 4), orders=(late,))
    assert phases.calls[:2] == [("work", where)] * 2


class Shift(Function):
    @staticmethod
    def forward(ctx, x, b, note):
        ctx.note = note
        return x + b

    @staticmethod
    def backward(ctx, grad):
        note = ctx.note

        def bias_grad(grad):
            note("work")
            return grad.sum(0)

        return grad, zbpipe.defer(bias_grad, weights=1, saved=(grad,)), None


@pytest.mark.parametrize(("choice", "where"), [("matrices", "I"), ("all", "W")])
def test_vectors_alone_wait_only_if_all_is_deferred(choice, where, phases):
    with zbpipe.policy(defer=choice):
        check(Stage(lambda m, x: Shift.apply(x, m.b, phases).sin(), b=(4,)), (3, 4), orders=(late,))
    assert phases.calls[:2] == [("work", where)] * 2


@pytest.mark.parametrize("fused", [False, True])
def test_main_grad_of_another_dtype(fused):
    """Accumulated in float32 by zbpipe; the reference adds each microbatch's gradient itself."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(4, 5, dtype=torch.bfloat16))
    w.main_grad = torch.ones(4, 5)
    expected = torch.ones(4, 5)
    seen = []
    w.register_hook(seen.append)
    for _ in range(2):
        x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
        out = Linear.apply(x, w, None)
        grad = torch.randn_like(out)
        expected += (x.mT @ grad).detach()
        with zbpipe.policy(main_grad=True, fused=fused):
            _, groups = zbpipe.stage_backward_input([out], [grad], [x], [w])
            zbpipe.stage_backward_weight([w], groups)
    assert w.grad is None
    assert len(seen) == 2
    torch.testing.assert_close(w.main_grad, expected, rtol=0, atol=0)


class AddsItself(Product):
    """x @ w that accumulates into w.main_grad as fused kernels do."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors

        def accumulate(x, grad, w):
            w.main_grad += x.mT @ grad

        dw = zbpipe.defer(accumulate, weights=ctx.given, saved=(x, grad, w))
        return grad @ w.mT, dw, None


@pytest.mark.parametrize("which", [1, None])
@pytest.mark.parametrize("watched", [False, True])
def test_a_kernel_that_adds_the_gradient_itself(which, watched):
    """The parameter comes to it as it is, with its attributes; nothing is added a second time."""

    def setup(m):
        m.a.main_grad = torch.zeros_like(m.a)
        m.kept["a", "main"] = MainGrad(m.a)
        if watched:
            watch_weights(m)

    check(Stage(lambda m, x: AddsItself.apply(x, m.a, which).sin() @ m.b, a=(4, 5), b=(5, 2)), (3, 4), setup=setup)


# Errors and retries


class Fails(Function):
    """x @ w whose work raises as often as `failures` says."""

    @staticmethod
    def forward(ctx, x, w, failures, calls):
        ctx.save_for_backward(x, w)
        ctx.failures, ctx.calls = failures, calls
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        failures, calls = ctx.failures, ctx.calls

        def work(x, grad):
            calls.append(len(failures))
            if failures:
                raise failures.pop()
            return x.mT @ grad

        return grad @ w.mT, zbpipe.defer(work, weights=1, saved=(x, grad)), None, None


FAILING = {
    "directly": lambda m, x, f, c: Fails.apply(x @ m.b, m.a, f, c).sin(),
    "behind a cast": lambda m, x, f, c: Fails.apply(x @ m.b, m.a.mT.mT, f, c).sin(),
    "behind nodes that have saved tensors": lambda m, x, f, c: Fails.apply(x @ m.b.exp(), m.a.exp() * m.a, f, c).sin(),
}


@pytest.mark.parametrize("how", FAILING)
@pytest.mark.parametrize("watched", [False, True])
def test_a_weight_pass_whose_work_raised_can_be_repeated(how, watched):
    """Twice; then everything has been added once, and work that had returned is not called again."""
    torch.manual_seed(0)
    failures, calls, other_calls, hooks = [ValueError("first"), ValueError("second")], [], [], []

    def forward(m, x):
        return Fails.apply(FAILING[how](m, x, failures, calls), m.c, [], other_calls)

    def build():
        torch.manual_seed(1)
        return Stage(forward, a=(4, 4), b=(4, 4), c=(4, 4))

    m = build()
    if watched:
        for w in m.parameters():
            w.register_hook(lambda grad: hooks.append(1))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    for message in ("second", "first"):
        with pytest.raises(ValueError, match=message):
            zbpipe.stage_backward_weight(m.parameters(), groups)
    zbpipe.stage_backward_weight(m.parameters(), groups)
    assert calls == [2, 1, 0]
    assert other_calls == [0]
    assert len(hooks) == (3 if watched else 0)
    assert all(group.spent for group in groups)

    whole = build()
    whole(x.detach().requires_grad_()).sum().backward()
    for got, expected in zip(m.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


@pytest.mark.parametrize("watched", [False, True])
def test_work_is_not_called_again_when_a_hook_raises_behind_it(watched):
    calls = []
    m = Stage(lambda m, x: Fails.apply(x, m.a, [], calls).sin() @ m.b, a=(4, 4), b=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    raised = []

    def hook(grad):
        if not raised:
            raised.append(1)
            raise ValueError("the hook")

    (m.a if watched else m.b).register_hook(hook)
    out = m(x)
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    with pytest.raises(ValueError, match="the hook"):
        zbpipe.stage_backward_weight(m.parameters(), groups)
    zbpipe.stage_backward_weight(m.parameters(), groups)
    assert calls == [0]
    expected = torch.autograd.grad(((x @ m.a).sin() @ m.b).sum(), [m.a, m.b])
    torch.testing.assert_close((m.a.grad, m.b.grad), expected)


def test_retained_groups_do_the_work_again():
    calls = []
    m = Stage(lambda m, x: Fails.apply(x, m.a, [], calls).sin(), a=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    zbpipe.stage_backward_weight(m.parameters(), groups, retain_graph=True)
    zbpipe.stage_backward_weight(m.parameters(), groups, retain_graph=True)
    zbpipe.stage_backward_weight(m.parameters(), groups)
    assert calls == [0, 0, 0]
    (expected,) = torch.autograd.grad((x @ m.a).sin().sum(), [m.a])
    torch.testing.assert_close(m.a.grad, 3 * expected)


class Returns(Affine):
    """Work that returns whatever the test wants."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        what = ctx.given
        dw, db = zbpipe.defer(lambda: what, weights=(1, 2))
        return grad @ w.mT, dw, db, None


WRONG = {
    "too few": ((torch.zeros(4, 5, dtype=f64),), "returned 1 gradients; expected 2"),
    "no sequence": (torch.zeros(4, 5, dtype=f64), "returned 1 gradients; expected 2"),
    "no tensor": ((3, None), "returned a int as gradient 0; expected a tensor or None"),
    "wrong shape": ((torch.zeros(3, 3, dtype=f64), None), "returned an invalid gradient"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("watched", [False, True])
def test_results_that_are_no_gradients_are_refused(what, watched):
    value, message = WRONG[what]
    m = Stage(lambda m, x: Returns.apply(x, m.a, m.b, value).sin(), a=(4, 5), b=(5,))
    if watched:
        m.a.register_hook(lambda grad: None)
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    with pytest.raises(Exception, match=message):
        zbpipe.stage_backward_weight(m.parameters(), groups)
    assert m.a.grad is None and m.b.grad is None
    with pytest.raises(Exception, match=message if what != "wrong shape" else "invalid gradient"):
        m(x).sum().backward()


class Some(Affine):
    """Returns None for the weight and a gradient, of a dtype and shape that autograd mends, for the bias."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.mT, *zbpipe.defer(lambda grad: (None, grad.float()), weights=(1, 2), saved=(grad,))


@pytest.mark.parametrize("watched", [False, True])
def test_gradients_are_mended_as_a_functions_own_and_may_be_none(watched):
    setup = watch_weights if watched else (lambda m: None)
    check(Stage(lambda m, x: Some.apply(x, m.a, m.b).sin(), a=(4, 5), b=(5,)), (3, 4), setup=setup, rtol=1e-6, atol=0)


class Asks(Product):
    """Calls zbpipe.defer with the arguments that a test wants."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.mT, ctx.given(x, w, grad), None


REFUSED = {
    "function": (lambda x, w, g: zbpipe.defer(3, 1), TypeError, "function is a int; expected a callable"),
    "saved": (lambda x, w, g: zbpipe.defer(print, 1, [x]), TypeError, "saved is a list; expected a tuple"),
    "weights": (lambda x, w, g: zbpipe.defer(print, "w"), TypeError, "weights names a str; expected the position"),
    "a tensor": (lambda x, w, g: zbpipe.defer(print, (w,)), TypeError, "weights names a Parameter; expected the pos"),
    "bool": (lambda x, w, g: zbpipe.defer(print, (True,)), TypeError, "weights names a bool; expected the position"),
    "empty": (lambda x, w, g: zbpipe.defer(print, ()), ValueError, "weights is empty"),
    "position": (lambda x, w, g: zbpipe.defer(print, 3), ValueError, "weights names argument 3 of the forward of Asks"),
    "negative": (lambda x, w, g: zbpipe.defer(print, (1, -1)), ValueError, r"weights names argument -1 of"),
    "huge": (lambda x, w, g: zbpipe.defer(print, 1 << 80), ValueError, "weights names argument a huge number of"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("split", [False, True])
def test_bad_arguments_are_refused_before_anything_is_called(what, split):
    ask, error, message = REFUSED[what]
    x, w = torch.randn(3, 3, dtype=f64, requires_grad=True), weight(3, 3)
    out = Asks.apply(x, w, ask)
    if split:
        with pytest.raises(RuntimeError) as failed:
            zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
        raised = failed.value.__cause__
        assert isinstance(raised, error)
        with pytest.raises(error, match=message):
            raise raised
    else:
        with pytest.raises(error, match=message):
            out.sum().backward()
    assert w.grad is None


def test_without_a_backward_the_function_is_called():
    assert torch.equal(zbpipe.defer(torch.neg, 1, (torch.ones(2),)), -torch.ones(2))
    assert zbpipe.defer(lambda: None, (0, 1)) == (None, None)
    assert not will_defer((0,))


def test_will_defer_says_what_defer_would_do():
    said = []

    def ask(x, w, grad):
        said.append((will_defer((1,)), will_defer((1, 0)), will_defer((0,)), will_defer(None)))
        return x.mT @ grad

    def run(split, listed=True, **choices):
        x, w, other = (torch.randn(3, 3, dtype=f64, requires_grad=True) for _ in range(3))
        out = Asks.apply(x, w, ask) @ other
        with zbpipe.policy(**choices):
            if split:
                weights = [w, other] if listed else [other]
                zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], weights)
            else:
                out.sum().backward()
        return said.pop()

    assert run(split=True) == (True, False, False, True)
    assert run(split=True, defer="nothing") == (False,) * 4
    assert run(split=True, listed=False) == (False,) * 4
    assert run(split=False) == (False,) * 4


# Memory


class Big(Product):
    """x @ w; what its work is given is told to `given`."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        given = ctx.given

        def work(x, grad, w):
            given.extend((x, grad, w))
            return x.mT @ grad

        return grad @ w.mT, zbpipe.defer(work, weights=1, saved=(x, grad, w)), None


def split_big(given, rows=64, width=32):
    x = torch.randn(rows, width, dtype=f64, requires_grad=True)
    w = weight(width, width)
    h = x.sin()
    out = Big.apply(h, w, given).sin()
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    return x, w, groups


def test_saved_tensors_are_counted_each_storage_once_and_parameters_are_not():
    given = []
    _, w, groups = split_big(given)
    (group,) = groups
    assert group.bytes_held == 2 * 64 * 32 * 8  # the input and the output gradient
    held = zbpipe.memory.held(groups)
    assert held.bytes == group.bytes_held
    (task,) = group._describe()
    assert task[1] == "handed over"
    assert [(role, shape) for role, _, _, shape, *_ in task[5]] == [("saved", (64, 32)), ("saved", (64, 32))]
    assert all(weights[0] is w for *_, weights in task[5])
    zbpipe.stage_backward_weight([w], groups)
    x, grad, same_w = given
    assert same_w is w
    assert x.grad_fn is None and not x.requires_grad and not grad.requires_grad
    assert group.bytes_held == 0


def test_a_stage_input_is_counted_and_goes_with_its_gradient():
    """It is a leaf that requires a gradient, as parameters are."""
    x, w = torch.randn(64, 32, dtype=f64, requires_grad=True), weight(32, 32)
    out = Big.apply(x, w, [])
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    assert groups[0].bytes_held == 2 * 64 * 32 * 8
    kept = weakref.ref(x)
    del x
    assert kept() is None


@pytest.mark.parametrize("how", ["weight pass", "dropped"])
def test_everything_is_freed_at_once(how):
    """Without the garbage collector: nothing is in a cycle."""

    class Called:
        def __call__(self, x, grad):
            return x.mT @ grad

    gc.collect()
    gc.disable()
    try:
        work, x, w = Called(), torch.randn(8, 4, dtype=f64, requires_grad=True), weight(4, 4)
        kept = weakref.ref(work)
        out = Asks.apply(x.sin(), w, lambda x, w, grad, work=work: zbpipe.defer(work, 1, (x, grad)))
        node = weakref.ref(out.grad_fn)
        _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
        del work, out
        assert kept() is not None
        if how == "weight pass":
            zbpipe.stage_backward_weight([w], groups)
        else:
            del groups
        assert kept() is None
        assert node() is None
    finally:
        gc.enable()


class Queue:
    """Of a module that keeps its groups, and whose work asks it."""

    def __init__(self):
        self.groups = None

    def compute(self, x, grad):
        return x.mT @ grad

    def input_pass(self, w):
        x = torch.randn(8, 4, dtype=f64, requires_grad=True)
        out = Asks.apply(x.sin(), w, lambda x, w, grad: zbpipe.defer(self.compute, 1, (x, grad)))
        _, self.groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])


def test_groups_that_their_own_work_reaches_are_garbage_when_nobody_else_has_them():
    w = weight(4, 4)
    gc.collect()
    queue = Queue()
    queue.input_pass(w)
    gone, group = weakref.ref(queue), weakref.ref(queue.groups[0])
    del queue
    assert gone() is not None
    gc.collect()
    assert gone() is None and group() is None
    assert w.grad is None


def test_groups_that_somebody_has_are_no_garbage():
    w = weight(4, 4)
    queue = Queue()
    queue.input_pass(w)
    gc.collect()
    assert queue.groups[0].bytes_held == 2 * 8 * 4 * 8
    zbpipe.stage_backward_weight([w], queue.groups)
    assert w.grad is not None
    gc.collect()
    assert queue.groups[0].spent


def test_a_gradient_that_work_returns_becomes_the_weights_own():
    """It is taken, not copied, where nobody else has it."""
    addresses = []

    def work(x, grad):
        result = x.mT @ grad
        addresses.append(result.data_ptr())
        return result

    for hooked in (False, True):
        x, w = torch.randn(8, 4, dtype=f64, requires_grad=True), weight(4, 4)
        if hooked:
            w.register_hook(lambda grad: None)
        out = Asks.apply(x, w, lambda x, w, grad: zbpipe.defer(work, 1, (x, grad)))
        _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
        zbpipe.stage_backward_weight([w], groups)
        assert w.grad.data_ptr() == addresses[-1]


def test_a_gradient_that_somebody_else_has_is_copied():
    buffer = torch.ones(4, 4, dtype=f64)
    x, w = torch.randn(8, 4, dtype=f64, requires_grad=True), weight(4, 4)
    out = Asks.apply(x, w, lambda x, w, grad: zbpipe.defer(lambda: buffer, 1))
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    zbpipe.stage_backward_weight([w], groups)
    w.grad.add_(1)
    assert torch.equal(buffer, torch.ones(4, 4, dtype=f64))


@pytest.mark.parametrize("which", [0, 2])
def test_saved_tensors_that_were_changed_are_refused(which):
    """Those that were passed in `saved`, also a parameter."""
    given = []
    x, w = torch.randn(8, 4, dtype=f64, requires_grad=True), weight(4, 4)
    h = x.sin()
    out = Big.apply(h, w, given)
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    with torch.no_grad():
        (h if which == 0 else w).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        zbpipe.stage_backward_weight([w], groups)
    assert w.grad is None and given == []


def test_an_output_that_is_saved_for_the_work_is_still_its_value():
    """The stage's output is detached; the work has an alias of its own."""

    def forward(m, x):
        return SavesOutput.apply(x, m.a)

    check(Stage(forward, a=(4, 4)), (3, 4))


class SavesOutput(Function):
    """tanh(x @ w)."""

    @staticmethod
    def forward(ctx, x, w):
        y = (x @ w).tanh()
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, w, y = ctx.saved_tensors
        dw = zbpipe.defer(lambda x, y, grad: x.mT @ (grad * (1 - y * y)), 1, (x, y, grad))
        return (grad * (1 - y * y)) @ w.mT, dw


# What runs around it


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant, phases):
    def forward(m, x):
        h = checkpoint(lambda x: Linear.apply(x, m.a, m.b, phases).sin(), x, use_reentrant=reentrant)
        return Linear.apply(h, m.c, None, phases)

    check(Stage(forward, **layers()), (3, 4), untouched=not reentrant, orders=(late,))
    # A reentrant checkpoint runs an ordinary backward within I.
    assert phases.calls[:4] == [("work", "backward" if reentrant else "W")] * 2 + [("work", "W")] * 2


@pytest.mark.parametrize("choice", ["keep", "recompute", "input_pass"])
def test_checkpoint_policies(choice, phases):
    def forward(m, x):
        return checkpoint(lambda x: Linear.apply(x, m.a, m.b, phases).sin(), x, use_reentrant=False)

    with zbpipe.policy(checkpoint=choice):
        check(Stage(forward, a=(4, 5), b=(5,)), (3, 4), orders=(late,))
    assert phases.calls[:2] == [("work", "I" if choice == "input_pass" else "W")] * 2


class Outer(Function):
    """(x @ w).sin() @ v by autograd within: its backward runs one over an inner Function that hands over too."""

    @staticmethod
    def forward(ctx, x, w, v, note):
        ctx.save_for_backward(x, w, v)
        ctx.note = note
        return (x @ w).sin() @ v

    @staticmethod
    def backward(ctx, grad):
        x, w, v = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = Linear.apply(Linear.apply(x, w, None, ctx.note).sin(), v, None, ctx.note)
            dx, dw = torch.autograd.grad(out, [x, w], grad)
        note = ctx.note

        def work(x, w, grad):
            note("outer")
            return (x @ w).sin().mT @ grad

        dv = zbpipe.defer(work, weights=2, saved=(x, w.detach(), grad))
        return dx, dw, dv, None


def test_a_backward_within_the_functions_backward_runs_its_work_at_once(phases):
    stage = Stage(lambda m, x: Outer.apply(x, m.a, m.c, phases) @ m.d, a=(4, 5), c=(5, 3), d=(3, 2))
    check(stage, (3, 4), orders=(late,))
    assert phases.calls[:4] == [("work", "I")] * 2 + [("outer", "W")] * 2


def test_work_may_run_autograd():
    def work(x, grad):
        w = torch.zeros(4, 4, dtype=f64, requires_grad=True)
        with torch.enable_grad():
            return torch.autograd.grad(x @ w, [w], grad)

    class Its(Product):
        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w.mT, zbpipe.defer(work, 1, (x, grad))

    for setup in (lambda m: None, watch_weights):
        check(Stage(lambda m, x: Its.apply(x, m.a).sin(), a=(4, 4)), (3, 4), setup=setup)


@pytest.mark.parametrize("where", ["forward", "surroundings of W"])
def test_work_sees_autocast_as_it_was_where_it_was_handed_over(where):
    seen = []

    class Mixed(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            x, w = ctx.saved_tensors

            def work(x, grad):
                seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
                return (x.mT @ grad).to(torch.float32)

            return (grad @ w.mT).to(torch.float32), zbpipe.defer(work, 1, (x, grad))

    def amp(on):
        return torch.autocast("cpu", dtype=torch.bfloat16) if on else contextlib.nullcontext()

    torch.manual_seed(0)
    x, w = torch.randn(64, 64, requires_grad=True), nn.Parameter(torch.randn(64, 64))
    in_forward = where == "forward"
    with amp(in_forward):
        out = Mixed.apply(x, w)
        whole = Mixed.apply(x, w)
    grad = torch.ones_like(out)
    _, groups = zbpipe.stage_backward_input([out], [grad], [x], [w])
    with amp(not in_forward):
        zbpipe.stage_backward_weight([w], groups)
        assert torch.is_autocast_enabled("cpu") != in_forward
        assert torch.is_autocast_cache_enabled()
    (expected,) = torch.autograd.grad(whole, [w], grad)
    assert torch.equal(w.grad, expected)
    assert [enabled for enabled, _ in seen] == [in_forward, in_forward]
    assert seen[0][1] is False


def ones_for(outputs):
    """The generator of random numbers is the threads' common one."""
    return [torch.ones_like(out) for out in outputs]


def test_several_threads_each_with_its_own_model():
    errors = []

    def train(seed):
        try:
            torch.manual_seed(seed)
            stage = Stage(two_layers, **layers())
            check(stage, (3, 4), setup=watch_weights, orders=(late,), output_grads=ones_for)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_a_thread_that_the_backward_starts_runs_the_work_at_once():
    where = []

    def ask(x, w, grad):
        result = []
        thread = threading.Thread(
            target=lambda: result.append(zbpipe.defer(lambda x, g: x.mT @ g, 1, (x.detach(), grad)))
        )
        thread.start()
        thread.join()
        where.append(result[0] is not None)
        return result[0]

    check(Stage(lambda m, x: Asks.apply(x, m.a, ask), a=(4, 4)), (3, 4), orders=(late,))
    assert all(where)


def test_weight_pass_on_another_thread():
    given = []
    x, w, groups = split_big(given)
    thread = threading.Thread(target=zbpipe.stage_backward_weight, args=([w], groups))
    thread.start()
    thread.join()
    (expected,) = torch.autograd.grad((x.sin() @ w).sin().sum(), [w])
    torch.testing.assert_close(w.grad, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces a Function
def test_compiled_around_a_function_that_hands_over():
    """Traced, the work is part of the compiled backward; nothing is lost."""
    stage = Stage(
        lambda m, x: torch.compile(lambda x: Linear.apply(x, m.a, m.b).sin(), backend="aot_eager")(x) @ m.c, **layers()
    )
    check(stage, (3, 4), orders=(late,))


class NoMemoryForAView(TorchDispatchMode):
    """Fails at the second tensor that is to lose its history, once."""

    def __init__(self):
        super().__init__()
        self.left = 2

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("no memory for a view")
        return function(*args, **(kwargs or {}))


class WithHistory(Affine):
    """x @ w + b, whose work returns gradients that have a history."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        calls = ctx.given

        def work(x, grad):
            calls.append(1)
            return (x.mT @ grad).requires_grad_(), grad.sum(0).requires_grad_()

        return grad @ w.mT, *zbpipe.defer(work, weights=(1, 2), saved=(x, grad)), None


@pytest.mark.parametrize("watched", [False, True])
def test_results_of_work_are_kept_when_memory_runs_out_right_behind_it(watched):
    calls = []
    m = Stage(lambda m, x: WithHistory.apply(x, m.a, m.b, calls), a=(4, 5), b=(5,))
    if watched:
        m.b.register_hook(lambda grad: None)
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    grad = torch.randn_like(out)
    _, groups = zbpipe.stage_backward_input([out], [grad], [x], m.parameters())
    with NoMemoryForAView(), pytest.raises(torch.OutOfMemoryError):
        zbpipe.stage_backward_weight(m.parameters(), groups)
    zbpipe.stage_backward_weight(m.parameters(), groups)
    assert calls == [1]
    torch.testing.assert_close((m.a.grad, m.b.grad), (x.detach().mT @ grad, grad.sum(0)))
    assert m.a.grad.grad_fn is None and not m.a.grad.requires_grad


@pytest.mark.parametrize("device", ["xpu", "mps", "hpu"])
def test_work_sees_autocast_of_any_device_as_it_was_where_it_was_handed_over(device):
    """Whether the device is there does not matter for that."""
    seen = []

    class Looks(Product):
        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors

            def weight_grad(x, grad):
                seen.append((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
                return x.mT @ grad

            return grad @ w.mT, zbpipe.defer(weight_grad, 1, (x, grad))

    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    x, w = (torch.randn(4, 4, dtype=f64, requires_grad=True) for _ in range(2))
    try:
        for on, dtype in ((True, torch.bfloat16), (False, torch.float16)):
            out = Looks.apply(x, w)
            torch.set_autocast_enabled(device, on)
            torch.set_autocast_dtype(device, dtype)
            _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
            torch.set_autocast_enabled(device, not on)
            torch.set_autocast_dtype(device, torch.float16)
            zbpipe.stage_backward_weight([w], groups)
            assert torch.is_autocast_enabled(device) == (not on)
            assert torch.get_autocast_dtype(device) == torch.float16
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
    assert seen[0] == (True, torch.bfloat16)
    assert seen[1][0] is False
