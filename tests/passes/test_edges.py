"""Stage outputs given as `GradientEdge`s, so that their memory can be gone before the backward."""

import weakref

import pytest
import torch
from support.functions import Ignoring
from support.oracle import Stage, fresh, needs_zbpipe, zb
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

pytestmark = [pytest.mark.drops_groups, needs_zbpipe]  # torch 2.13 knows no edges here; newer ones do

f64 = torch.float64


def network():
    return Stage(
        lambda m, x: (m.net(x), x @ m.b),
        net=nn.Sequential(nn.Linear(4, 8, dtype=f64), nn.ReLU(), nn.Linear(8, 4, dtype=f64)),
        b=(4, 4),
    )


def expected(m, x, grads):
    """Gradients of the input and of all weights by an ordinary backward of the outputs whose gradient is given."""
    outs = [(out, g) for out, g in zip(m(x), grads, strict=True) if g is not None]
    return list(
        torch.autograd.grad([o for o, _ in outs], [x, *m.parameters()], [g for _, g in outs], allow_unused=True)
    )


def split(m, outputs, grads, x):
    (dinput,), groups = zb.stage_backward_input(outputs, grads, [x], m.parameters())
    zb.stage_backward_weight(m.parameters(), groups)
    return [dinput, *(w.grad for w in m.parameters())]


def whole(m, outputs, grads, x):
    (dinput,) = zb.stage_backward(outputs, grads, (x,))
    return [dinput, *(w.grad for w in m.parameters())]


both_ways = pytest.mark.parametrize("backward", [split, whole])


def random(*shape):
    return torch.randn(shape, dtype=f64)


def halves():
    return Stage(lambda m, x: (x @ m.a).sin().chunk(2, dim=1), a=(4, 4))


@both_ways
@pytest.mark.parametrize(
    ("make", "outputs", "grads"),
    [
        (network, lambda a, b: (get_gradient_edge(a), get_gradient_edge(b)), (random(3, 4), random(3, 4))),
        (network, lambda a, b: (get_gradient_edge(a), b, torch.ones(1)), (random(3, 4), random(3, 4), None)),
        (network, lambda a, b: (get_gradient_edge(a), get_gradient_edge(b), None), (random(3, 4), random(3, 4), None)),
        (halves, lambda a, b: (None, get_gradient_edge(b)), (None, random(3, 2))),
    ],
    ids=["instead of each output", "beside a tensor", "beside None", "of one output of a multi-output node"],
)
def test_edges(make, outputs, grads, backward):
    m, x = make(), fresh()
    grads = [grad if grad is None else grad.to(x.device) for grad in grads]  # made before the test was
    torch.testing.assert_close(backward(m, outputs(*m(x)), grads, x), expected(m, x, grads[:2]))


def test_edges_keep_no_output_alive():
    m, x = network(), fresh()
    out = m(x)[1].sin()
    edge, storage, wrapper = get_gradient_edge(out), StorageWeakRef(out.untyped_storage()), weakref.ref(out)
    del out
    assert wrapper() is None and storage.expired()
    dinputs, _ = zb.stage_backward_input([edge], [torch.ones(3, 4, dtype=f64)], [x], m.parameters())
    assert dinputs[0] is not None


@both_ways
def test_edge_of_a_leaf(backward):
    m, x = Stage(lambda m, x: (x,), a=(4, 4)), fresh()
    grad = torch.randn(3, 4, dtype=f64)
    dinput, weight = backward(m, (get_gradient_edge(x),), (grad,), x)
    torch.testing.assert_close(dinput, grad)
    assert weight is None


@both_ways
def test_edge_keeps_a_python_function_alive(backward):
    m, x = Stage(lambda m, x: (Ignoring.apply(x, m.a, m),), a=(4, 4)), fresh()
    grad = torch.randn(3, 4, dtype=f64)
    (out,) = m(x)
    edge = get_gradient_edge(out)
    del out
    torch.testing.assert_close(backward(m, (edge,), (grad,), x), expected(m, x, (grad,)))


@pytest.mark.parametrize("grads", [None, [None], (None,)])
def test_edge_without_a_gradient_is_refused(grads):
    m, x = network(), fresh()
    edge, ones = get_gradient_edge(m(x)[0]), torch.ones(3, 4, dtype=f64)
    with pytest.raises(AssertionError, match="requires output gradients"):
        zb.stage_backward_input([edge], grads, [x], m.parameters())
    with pytest.raises(AssertionError, match="requires output gradients"):
        zb.stage_backward((edge,), grads, (x,))
    assert x.grad is None
    torch.testing.assert_close(split(m, [edge], [ones], x)[0], expected(m, x, (ones, None))[0])


def test_edges_of_wrong_shape_are_refused():
    m, x = network(), fresh()
    edge = get_gradient_edge(m(x)[0])
    with pytest.raises(ValueError, match=r"\[2, 2\].*\[3, 4\]"):
        zb.stage_backward_input([edge], [torch.ones(2, 2, dtype=f64)], [x], m.parameters())


@pytest.mark.parametrize("number", [1, 2**31, 2**32, 2**32 + 1, 2**70])
def test_edge_to_an_output_number_that_no_node_has_is_refused(number):
    m, x = network(), fresh()
    edge = get_gradient_edge(m(x)[1])
    with pytest.raises(ValueError, match="GradientEdge"):
        zb.stage_backward_input([edge._replace(output_nr=number)], [torch.ones(3, 4)], [x], m.parameters())
    assert x.grad is None
