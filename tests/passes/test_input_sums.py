"""How the gradients of inputs come into their ``.grad``: added as an accumulator adds, with the hooks behind it."""

import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from support.functions import handing_through
from support.oracle import needs_zbpipe, zb

pytestmark = [pytest.mark.drops_groups, needs_zbpipe]

f64 = torch.float64


def backward(is_split, out, grad, inputs, weights=()):
    """Returns the groups of an input pass."""
    if is_split:
        return zb.stage_backward_input([out], [grad], inputs, list(weights))[1]
    out.backward(grad)
    return []


def as_ordinary(scenario):
    """``scenario(is_split)`` gives the same both ways: tensors, and what hooks have seen."""
    ordinary, split = scenario(False), scenario(True)
    assert [type(one) for one in split] == [type(one) for one in ordinary] != []
    for one, other in zip(ordinary, split, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(other, one)
        else:
            assert other == one


def leaf(*shape):
    torch.manual_seed(0)
    return torch.randn(*(shape or (3, 4)), dtype=f64, requires_grad=True)


# Where x.grad is there, where hooks see the sum, and where x gets no gradient.
HOOKED = {
    "used": lambda x: (x * 2.0).sin(),
    "handed through": lambda x: x + 0.0,
    "without a gradient": lambda x: handing_through(torch.sin, lambda grad: None)(x),
}


@pytest.mark.parametrize("forward", HOOKED.values(), ids=HOOKED)
def test_hooks_of_an_input_come_in_an_accumulators_order(forward):
    def scenario(is_split):
        x, calls = leaf(), []

        def log(name, *grads):
            calls.append(name)
            calls.extend(g.clone() for g in (*grads, x.grad) if g is not None)

        def after(x):
            log("after")
            torch.autograd.Variable._execution_engine.queue_callback(lambda: log("at the end"))

        accumulator = x.view_as(x).grad_fn.next_functions[0][0]
        x.register_hook(lambda grad: log("on the tensor", grad))
        accumulator.register_prehook(lambda grads: log("before", *grads))
        x.register_post_accumulate_grad_hook(after)
        accumulator.register_hook(lambda _, grads: log("behind", *grads))
        for _ in range(2):
            backward(is_split, forward(x), torch.ones_like(x), [x])
        return calls

    as_ordinary(scenario)


@pytest.mark.parametrize("first", [True, False], ids=["sparse, then dense", "dense, then sparse"])
def test_sparse_and_dense_gradients_add_up(first):
    def scenario(is_split):
        x = leaf(5, 2)
        ids = torch.tensor([0, 2, 2])
        for is_sparse in (first, not first):
            out = F.embedding(ids, x, sparse=True) if is_sparse else x[ids]
            backward(is_split, out, torch.ones_like(out), [x])
        return [x.grad.to_dense()]

    as_ordinary(scenario)


def embedded_sum(x, y):
    return F.embedding(torch.tensor([0, 2, 2]), x + y, sparse=True)


def test_inputs_share_no_sparse_gradient():
    def scenario(is_split):
        x, y = leaf(5, 2), leaf(5, 2)
        for _ in range(3):
            backward(is_split, embedded_sum(x, y), torch.ones(3, 2, dtype=f64), [x, y])
        return [x.grad.to_dense(), y.grad.to_dense()]

    as_ordinary(scenario)


def test_an_input_shares_no_sparse_gradient_with_a_weight():
    def scenario(is_split):
        x, w = leaf(5, 2), leaf(5, 2)
        groups = []
        for _ in range(2):
            groups += backward(is_split, embedded_sum(x, w), torch.ones(3, 2, dtype=f64), [x], [w])
        if is_split:
            zb.stage_backward_weight([w], groups)
        return [x.grad.to_dense(), w.grad.to_dense()]

    as_ordinary(scenario)


@pytest.mark.parametrize("whose", ["the caller's", "a Function's"])
def test_sparse_gradients_of_others_are_not_added_to(whose):
    def scenario(is_split):
        x = leaf(5, 2)
        constant = torch.ones(5, 2, dtype=f64).to_sparse()
        for _ in range(2):
            if whose == "the caller's":
                backward(is_split, x + 0.0, constant, [x])
            else:
                out = handing_through(torch.sin, lambda grad: constant)(x)
                backward(is_split, out, torch.ones_like(out), [x])
        return [x.grad.to_dense(), constant.to_dense()]

    as_ordinary(scenario)


def test_inputs_share_no_gradient_that_has_no_storage():
    def scenario(is_split):
        x, y = (torch.ones(2, 3).to_mkldnn().requires_grad_() for _ in range(2))
        for _ in range(2):
            out = (x + y).to_dense()
            backward(is_split, out, torch.ones_like(out), [x, y])
        return [x.grad.to_dense(), y.grad.to_dense()]

    as_ordinary(scenario)


def hooked(hook):
    def forward(x):
        x = x * 1.0
        x.register_hook(hook)
        return x

    return forward


LATER = {
    "a Function": handing_through(torch.clone, lambda grad: grad.mul_(7.0)),
    "a hook": hooked(lambda grad: grad.mul_(7.0)),
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("write", LATER.values(), ids=LATER)
def test_what_is_written_to_a_gradient_later_in_the_backward_does_not_reach_an_input(write, watched):
    def scenario(is_split):
        x, y, w = leaf(), leaf(), leaf(4, 4)
        seen = []
        if watched:
            y.register_post_accumulate_grad_hook(lambda y: seen.append(y.grad.clone()))
        for _ in range(2):
            out = (write(x @ w) + y) * 1.0
            groups = backward(is_split, out, torch.ones_like(out), [x, y], [w])
            if is_split:
                zb.stage_backward_weight([w], groups)
        return [x.grad, y.grad, w.grad, *seen]

    as_ordinary(scenario)


def scratch(way):
    """Two inputs, whose gradients are one buffer that is filled anew for each."""
    buffer = torch.zeros(3, 4, dtype=f64)

    def fill(factor):
        return lambda grad: torch.mul(grad, factor, out=buffer)

    def forward(x, y):
        if way == "Functions":
            return handing_through(torch.clone, fill(2.0))(x) + handing_through(torch.clone, fill(3.0))(y)
        return x.sin() + y

    def watch(x, factor):
        if way == "tensors' hooks":
            x.register_hook(fill(factor))
        elif way == "accumulators' hooks":
            accumulator = x.view_as(x).grad_fn.next_functions[0][0]
            accumulator.register_prehook(lambda grads: (fill(factor)(grads[0]),))
            return accumulator
        return None

    return forward, watch


@pytest.mark.parametrize("way", ["Functions", "tensors' hooks", "accumulators' hooks"])
def test_inputs_do_not_share_a_scratch_buffer(way):
    def scenario(is_split):
        forward, watch = scratch(way)
        x, y = leaf(), leaf()
        watched = [watch(x, 2.0), watch(y, 3.0)]  # accumulators live as long as somebody has them
        for _ in range(2):
            out = forward(x, y)
            backward(is_split, out, torch.ones_like(out), [x, y])
        return [x.grad, y.grad, len(watched)]

    as_ordinary(scenario)


def test_two_tensors_on_one_edge_have_a_grad_each():
    z = leaf()
    x = z.view(-1)
    twin = zb.make_viewless(x)
    grads = []
    for _ in range(2):
        out = x * 2.0 + twin * 3.0
        dinputs, _ = zb.stage_backward_input([out], [torch.ones_like(out)], [x, twin], [])
        grads.append(dinputs[0].clone())
    assert x.grad is not twin.grad
    torch.testing.assert_close([x.grad, twin.grad], [sum(grads)] * 2)


def test_an_ordinary_backward_of_another_thread_adds_to_it_too():
    x = torch.zeros(200_000, requires_grad=True)
    x.grad = torch.zeros_like(x)
    rounds, interval = 100, sys.getswitchinterval()

    def run(is_split):
        for _ in range(rounds):
            backward(is_split, x * 1.0, torch.ones_like(x), [x])

    threads = [threading.Thread(target=run, args=(is_split,)) for is_split in (False, True)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert x.grad.min() == x.grad.max() == 2 * rounds


PARTS = {
    "plain": lambda x, w: x.sin(),
    "a product": lambda x, w: x @ w,
    "a Function's": lambda x, w: handing_through(torch.sin, lambda grad: grad)(x),
}


@pytest.mark.parametrize("forward", PARTS.values(), ids=PARTS)
def test_a_hook_of_an_input_is_called_once_where_others_of_its_nodes_outputs_go_on(forward):
    x, w = leaf(2, 4), leaf(4, 4)
    for _ in range(2):
        a, b = forward(x, w).unbind(0)
        calls = []
        a.register_hook(lambda grad, calls=calls: calls.append(grad.clone()) or grad * 2.0)
        out = a * b
        (da, dx), groups = zb.stage_backward_input([out], [torch.ones_like(out)], [a, x], [w])
        torch.testing.assert_close([*calls, da], [b.detach(), 2.0 * b.detach()])
        assert not dx[0].any() and dx[1].any()
        zb.stage_backward_weight([w], groups)


# ---- memory that is taken away and brought back between a forward and its backward


def moved(tensor):
    """As an offloader does it: the tensor gets another accumulator, its graph leads to the old one."""
    kept = tensor.data
    tensor.data = kept.half()
    tensor.data = kept


@pytest.mark.parametrize("listed", [True, False], ids=["weights listed", "all leaves"])
@pytest.mark.parametrize("when", ["behind the forward", "within the forward"])
@pytest.mark.parametrize("what", ["the weight", "the input"])
def test_what_was_moved_away_and_back_gets_its_gradient(what, when, listed):
    def scenario(is_split):
        w, x = leaf(4, 4), leaf()
        groups, grads = [], []
        for _ in range(2):
            hidden = (x @ w).sin()
            if when == "within the forward":
                moved(w if what == "the weight" else x)
            out = hidden @ w + x
            if when == "behind the forward":
                moved(w if what == "the weight" else x)
            ones = torch.ones_like(out)
            if is_split:
                (dinput,), each = zb.stage_backward_input([out], [ones], [x], [w] if listed else None)
                groups += each
                grads.append(dinput.clone())
            else:
                before = 0 if x.grad is None else x.grad.clone()
                out.backward(ones)
                grads.append(x.grad - before)
        if is_split:
            zb.stage_backward_weight(None, groups)
        return [w.grad, x.grad, *grads]

    as_ordinary(scenario)


# ---- backwards within the backward


@pytest.mark.parametrize("forward", [lambda x, w: x.sin() * 2.0, lambda x, w: x.sin() @ w], ids=["plain", "a product"])
def test_a_hook_that_runs_through_the_same_graph_is_refused(forward):
    x, w = leaf(), leaf(4, 4)
    hidden = x * 3.0
    out = forward(hidden, w)
    begun = []

    def run_once(grad):
        if not begun:
            begun.append(True)
            hidden.backward(torch.ones_like(hidden), retain_graph=True)

    hidden.register_hook(run_once)
    with pytest.raises(RuntimeError, match="Failed to run stage backward input") as raised:
        zb.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    assert "has run a backward through the graph" in str(raised.value.__cause__)
