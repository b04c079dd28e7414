"""Backwards within a pass's backward, such as a reentrant checkpoint's, under policy(main_grad=True)."""

import functools
import sys
import threading

import pytest
import torch
from support.functions import FusedWithDummy, function_of
from support.oracle import Stage, needs_zbpipe, zb
from torch import nn
from torch.utils.checkpoint import checkpoint

from zbpipe._torch import autograd  # the context itself: its references are counted

pytestmark = needs_zbpipe


@functools.partial(function_of, lambda function, x: function(x))
def own(function, x, grad):
    """A checkpoint as others than torch write it."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = function(x)
    torch.autograd.backward(y, grad)
    return None, x.grad


CHECKPOINTS = {
    "not reentrant": lambda function, x: checkpoint(function, x, use_reentrant=False),
    "torch's": lambda function, x: checkpoint(function, x, use_reentrant=True),
    "somebody's own": own,
    "one in another": lambda function, x: own(lambda x: own(function, x), x),
}


def split(m, x, out, weights):
    inputs = [x] if x.requires_grad else []
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], inputs, weights)
    zb.stage_backward_weight(weights, groups)


# In the first one the input pass runs the region, in the second and the last the weight pass does. In the first one a
# weight is listed twice, as a tied one may be.
WAYS = {
    "I": (True, lambda m, x, out: split(m, x, out, [*m.parameters(), m.a])),
    "W": (False, lambda m, x, out: split(m, x, out, list(m.parameters()))),
    "I of all leaves": (True, lambda m, x, out: split(m, x, out, None)),
    "whole": (True, lambda m, x, out: zb.stage_backward(out, torch.ones_like(out), [x])),
    "whole, without inputs": (False, lambda m, x, out: zb.stage_backward(out, torch.ones_like(out), [])),
}


def with_main_grads(m):
    for w in m.parameters():
        w.main_grad = torch.ones(w.shape)
        w.grad_added_to_main_grad = False


def half_block(x, a, b):
    return (x @ a).sin() @ b


@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_gradients_of_checkpointed_regions_go_to_main_grad(kind, way, has_grad):
    needs_input, run = WAYS[way]
    weights = a, b, c, v = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((4, 8), (8, 4), (4, 4), (4,))]
    region = CHECKPOINTS[kind]
    m = Stage(lambda m, x: region(lambda x: half_block(x, m.a, m.b), x * m.v) @ m.c @ m.a, a=a, b=b, c=c, v=v)
    with_main_grads(m)
    total = [1.0 for _ in weights]
    for w in weights:
        w.grad = torch.full_like(w, 7.0) if has_grad else None
    for _ in range(2):
        x = torch.randn(3, 4).bfloat16().requires_grad_(needs_input)
        inner, outer = nn.Parameter(a.detach()), nn.Parameter(a.detach())  # the uses of `a` round apart
        out = half_block(x.detach() * v, inner, b) @ c @ outer
        grads = torch.autograd.grad(out.sum(), [inner, b, c, v, outer])
        total = [t + g.float() for t, g in zip(total, grads[:4], strict=True)]
        total[0] = total[0] + grads[4].float()
        with zb.policy(main_grad=True):
            run(m, x, m(x))
    for w, t in zip(weights, total, strict=True):
        torch.testing.assert_close(w.main_grad, t, rtol=0.02, atol=0.1)
        assert w.grad_added_to_main_grad
        assert w.grad.eq(7.0).all() if has_grad else w.grad is None


def owning():
    """A stage of one weight, in a region, and the weight."""
    m = Stage(lambda m, x: own(lambda x: x @ m.w, x), w=nn.Parameter(torch.randn(4, 4)))
    with_main_grads(m)
    return m, m.w


def test_a_flag_that_the_regions_kernel_makes_itself_stays():
    m, w = owning()
    m.function = lambda m, x: own(lambda x: FusedWithDummy.apply(x, m.w), x)
    del w.grad_added_to_main_grad
    x = torch.randn(3, 4, requires_grad=True)
    with zb.policy(main_grad=True):
        split(m, x, m(x), None)
    assert w.grad_added_to_main_grad is True and w.grad is None


def test_gradients_that_a_hook_moves_to_main_grad_are_not_moved_again():
    """As Megatron's hook of its data parallel wrapper does, which looks at the flag."""
    m, w = owning()

    def move(w):
        if not w.grad_added_to_main_grad:
            w.main_grad += w.grad
        w.grad = None

    w.register_post_accumulate_grad_hook(move)
    for total in (1, 2):
        with zb.policy(main_grad=True):
            x = torch.ones(3, 4, requires_grad=True)
            split(m, x, m(x), list(m.parameters()))
        torch.testing.assert_close(w.main_grad, 1 + total * x.detach().t() @ torch.ones(3, 4))
        assert w.grad is None


@pytest.mark.parametrize("way", WAYS)
def test_the_dummy_of_a_fused_kernel_is_not_added(way):
    w = nn.Parameter(torch.randn(4, 4))
    m = Stage(lambda m, x: own(lambda x: FusedWithDummy.apply(x, m.a), x * m.v), a=w, v=nn.Parameter(torch.ones(4)))
    with_main_grads(m)
    needs_input, run = WAYS[way]
    for total in (1, 2):  # nobody resets the flag
        x = torch.ones(3, 4, requires_grad=needs_input)
        with zb.policy(main_grad=True):
            run(m, x, m(x))
        assert w.main_grad.eq(1 + 3 * total).all() and w.grad is None and w.grad_added_to_main_grad


def test_backwards_of_other_threads_and_later_ones_are_left_alone():
    run_backward = torch.autograd._engine_run_backward
    m, other = owning()[0], owning()[0]

    def elsewhere():
        other(torch.ones(3, 4, requires_grad=True)).sum().backward()

    def in_between(x):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(timeout=60)
        return x @ m.w

    m.function = lambda m, x: own(in_between, x)
    x = torch.ones(3, 4, requires_grad=True)
    out = m(x)
    other.w.grad = None
    with zb.policy(main_grad=True):
        split(m, x, out, list(m.parameters()))
    assert m.w.main_grad.eq(4).all() and m.w.grad is None
    assert other.w.main_grad.eq(1).all() and other.w.grad.eq(3).all()
    assert torch.autograd._engine_run_backward is run_backward
    m(torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert m.w.main_grad.eq(4).all() and m.w.grad is not None


@pytest.mark.parametrize(("size", "words"), [(4, "a hook's"), (3, r"a weight of \[4, 4\] has a main_grad of \[3\]")])
def test_after_an_inner_backward_that_raises_nothing_is_left(size, words):
    run_backward = torch.autograd._engine_run_backward
    m, w = owning()
    w.main_grad = torch.zeros(4, 4) if size == 4 else torch.zeros(3)
    w.grad = torch.full((4, 4), 7.0)
    if size == 4:
        w.register_hook(lambda grad: (_ for _ in ()).throw(ZeroDivisionError("a hook's")))
    x = torch.ones(3, 4, requires_grad=True)
    with zb.policy(main_grad=True), pytest.raises(RuntimeError) as caught:
        zb.stage_backward(m(x), torch.ones(3, 4), [x])
    assert caught.match("Failed to run stage backward")
    with pytest.raises(type(caught.value.__cause__), match=words):
        raise caught.value.__cause__
    assert w.grad.eq(7).all() and not w.main_grad.any() and torch.autograd._engine_run_backward is run_backward


def test_a_functions_attribute_is_no_leaf():
    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.variable = torch.ones(3)
            return x * 2

    x = torch.ones(3, requires_grad=True)
    out = Keeping.apply(x)
    (leaf,) = autograd.leaves_behind([out])
    assert leaf is x


def test_what_inner_backwards_go_through_is_let_go_of_as_often_as_it_is_taken():
    def through(run, outputs):
        return run()

    before = sys.getrefcount(through)
    for _ in range(3):
        with autograd.inner_backwards_through(through):
            assert sys.getrefcount(through) > before
    assert sys.getrefcount(through) == before
