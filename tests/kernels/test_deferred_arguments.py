"""What zbpipe.defer is given: whether anyone asks for a weight, and what reaches the function."""

import collections
import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch
from support.functions import Asks, function_of, hand_over
from support.oracle import fresh, needs_zbpipe, weight
from torch.utils.checkpoint import checkpoint

import zbpipe

pytestmark = needs_zbpipe  # torch's module takes no work over

f64 = torch.float64


def test_a_stage_input_that_is_no_leaf_is_a_weight():
    w, a, x = fresh(4, 4), weight(4, 4), fresh()
    h = w * 2
    out = Asks.apply(x, h, None, hand_over) @ a
    (dx, dh), groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x, h], [a])
    zbpipe.stage_backward_weight([a], groups)
    torch.testing.assert_close((dx, dh, a.grad), torch.autograd.grad((x @ h @ a).sum(), [x, h, a]))


def counting(calls):
    """The matrix's gradient is handed over, the vector's returned."""
    work = lambda x, grad: calls.append(1) or x.mT @ grad  # noqa: E731
    return lambda x, w, grad: (zbpipe.defer(work, 1, (x, grad)), grad.sum(0))


@pytest.mark.parametrize("which", ["frozen", "not given to the pass"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_work_that_nobody_asks_for_is_not_done(which, needs_grad):
    calls, x, w, b = [], fresh().requires_grad_(needs_grad), weight(4, 4).requires_grad_(which != "frozen"), weight(4)
    out = Asks.apply(x, w, b, counting(calls)).sin()
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [b])
    zbpipe.stage_backward_weight([b], groups)
    assert calls == [] and w.grad is None
    torch.testing.assert_close(b.grad, torch.autograd.grad(((x @ w) + b).sin().sum(), [b])[0])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_whole_backward_into_main_grad(bias, frozen):
    """There a proxy runs the Function."""
    w, b, c = weight(4, 4).requires_grad_(not frozen), weight(4) if bias else None, weight(4, 4)
    calls, trained = [], [p for p in (w, b, c) if p is not None and p.requires_grad]
    for p in trained:
        p.main_grad = torch.zeros_like(p)
    expected = [torch.zeros_like(p) for p in trained]

    def work(x, grad):
        calls.append(1)
        return x.mT @ grad, grad.sum(0)

    for _ in range(2):
        x = fresh()
        whole = (x @ w if b is None else x @ w + b) @ c
        for total, grad in zip(expected, torch.autograd.grad(whole.sum(), trained), strict=True):
            total += grad
        with zbpipe.policy(main_grad=True):
            out = Asks.apply(x, w, b, lambda x, w, grad: zbpipe.defer(work, (1, 2), (x, grad))) @ c
            zbpipe.stage_backward(out, torch.ones_like(out), [x])
    torch.testing.assert_close([p.main_grad for p in trained], expected)
    assert all(p.grad is None for p in trained)
    assert len(calls) == (0 if frozen and not bias else 2)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("prepare", [lambda w: w, lambda w: w.float().double(), lambda w: w + torch.exp(w) * w.sin()])
def test_work_for_weights_that_nobody_names_is_done_once_in_every_backward(prepare, frozen, given):
    """As that of a Function which adds by itself; where no weight is I's to compute, at once."""
    calls = []

    def ask(x, w, grad):
        assert zbpipe.defer(lambda x, grad: calls.append(1), None, (x, grad)) is None
        return None, None

    for how in ("split", "backward", "input alone"):
        calls.clear()
        x, w, p = fresh(), weight(4, 4).requires_grad_(not frozen), weight(4, 4)
        out = Asks.apply(x, prepare(w), torch.ones(4, dtype=f64), ask).sin() @ p
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


def taking(saved, work):
    """`saved(x, w, grad)` is what the work is given."""
    return lambda x, w, grad: (zbpipe.defer(work, 1, saved(x, w, grad)), None)


# Of its node one can tell how long it lives.
sine = function_of(torch.sin, lambda x, grad: grad * x.cos())


def take(saved, **choices):
    """Runs two microbatches split, and one whole; checks the gradients, and that the groups do not hold the graph.
    Returns what the work was given in each, and the bytes of the first group before W."""
    torch.manual_seed(0)
    given, w, bytes_held, nodes = [], weight(4, 4), [], []

    def run(*arguments):
        given.append(arguments)
        x, grad = arguments[:2]
        return torch.Tensor.detach(x).as_subclass(torch.Tensor).mT @ grad

    groups, expected = [], torch.zeros_like(w)
    for _ in range(2):
        x = fresh()
        expected += torch.autograd.grad((sine(x) @ w).sin().sum(), [w])[0]
        out = Asks.apply(sine(x), w, None, taking(saved, run))
        nodes.append(weakref.ref(out.grad_fn.next_functions[0][0]))
        out = out.sin()
        with zbpipe.policy(**choices):
            groups += zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])[1]
        del out
    bytes_held = [group.bytes_held for group in groups]
    held = [node() is not None for node in nodes]
    zbpipe.stage_backward_weight([w], groups)
    torch.testing.assert_close(w.grad, expected)
    x = fresh()
    Asks.apply(sine(x), w, None, taking(saved, run)).sin().sum().backward()
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
            x, w, calls = fresh(), weight(4, 4), []
            out = Asks.apply(x.sin(), w, None, taking(lambda x, w, g, of=of_x: (x, g, make(of(x))), calls.append)).sin()
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_parameters_are_not_counted_within_a_checkpoint(reentrant):
    """There a saved tensor is another view of the weight."""
    x, w = fresh(), weight(4, 4)
    given = []

    def saved(x, w, grad):
        return x, grad, w

    def work(x, grad, w):
        given.append(w)
        return x.mT @ grad

    out = checkpoint(lambda x: Asks.apply(x.sin(), w, None, taking(saved, work)).sin(), x, use_reentrant=reentrant)
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


def noted(x):
    made = x.sin()
    made.scale = 2.0
    return made


def attributes(tensor):
    return type(tensor), getattr(tensor, "scale", None), getattr(tensor, "place", None), getattr(tensor, "unit", None)


SUBCLASSES = {"no class": lambda x: noted(x), "a class": lambda x: Scaled.of(x), "a wrapper": lambda x: Wrapped(x, "m")}


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


@pytest.mark.parametrize(
    "make",
    [lambda x: Scaled.of(x.sin()), lambda x: weight(4, 4).requires_grad_(False)],
    ids=["a subclass", "a frozen parameter"],
)
def test_what_was_changed_is_refused_as_it_shares_memory_and_version_with_the_original(make):
    x, w = fresh(), weight(4, 4)
    given = make(x)
    out = Asks.apply(x, w, None, taking(lambda x, w, g: (x, g, given), print)).sin()
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        zbpipe.stage_backward_weight([w], groups)


@pytest.mark.parametrize("is_view", [True, False])
def test_weights_whose_memory_is_freed_before_the_weight_pass(is_view):
    """W refuses to read a view; a weight itself may be there for its main_grad alone, as a gathered one's is."""
    x, w = fresh(), weight(4, 4)
    out = Asks.apply(x, w, None, taking(lambda x, w, g: (x, g, w.mT if is_view else w), lambda x, g, w: x.mT @ g)).sin()
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    w.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="their memory has been freed") if is_view else contextlib.nullcontext():
        zbpipe.stage_backward_weight([w], groups)
    assert (w.grad is None) == is_view


def test_a_view_that_the_backward_makes_does_not_hold_the_graph():
    """Without grad mode a view needs no gradient, but keeps what it is a view of."""
    found = take(lambda x, w, grad: (x.mT.mT, grad))
    assert found.bytes == MATRICES
    assert found.split[0]._base is None
