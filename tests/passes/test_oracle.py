"""The detectors first catch planted faults: a split backward that is right passes the oracle, broken ones do not."""

import types

import pytest
import torch
from support.oracle import Stage, check, late
from torch import nn

f64 = torch.float64


def naive(break_input=lambda *_: None, break_weight=lambda *_: None):
    """The slow, obviously right split for stages without hooks: two runs of autograd over one graph."""

    def stage_backward_input(outputs, grads, inputs, weights):
        roots = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
        roots = [[out for out, _ in roots], [grad for _, grad in roots]]
        wanted = [i for i in inputs if isinstance(i, torch.Tensor) and i.requires_grad]
        found = [None] * len(wanted)
        if roots[0]:
            found = torch.autograd.grad(roots[0], wanted, roots[1], retain_graph=True, allow_unused=True)
        for inp, grad in zip(wanted, found, strict=True):
            inp.grad = grad
        break_input(grads, inputs, list(weights))
        dinputs = tuple(i.grad if isinstance(i, torch.Tensor) else None for i in inputs)
        return dinputs, [roots]

    def stage_backward_weight(weights, groups):
        weights = [w for w in weights if w.requires_grad]
        for roots in groups:
            if roots[0]:
                torch.autograd.backward(*roots, inputs=weights)
        break_weight(weights)

    return types.SimpleNamespace(stage_backward_input=stage_backward_input, stage_backward_weight=stage_backward_weight)


def stage(forward=lambda m, x: m.net(x).sin() @ m.a):
    return Stage(forward, net=nn.Linear(4, 4, dtype=f64), a=(4, 4))


def test_right_split_passes():
    check(stage(), (3, 4), impl=naive())


def double(weights):
    weights[0].grad.mul_(2.0)


def forget(weights):
    weights[2].grad = None


def transpose(weights):
    if weights[0].grad.is_contiguous():
        weights[0].grad = weights[0].grad.t().contiguous().t()


def change_last_bit(weights):
    weights[0].grad.mul_(1 + 2**-50)


@pytest.mark.parametrize(
    ("fault", "message"), [(double, "gradient of weight a"), (forget, "net.bias: got None"), (transpose, "strides")]
)
def test_wrong_weight_gradients_are_found(fault, message):
    with pytest.raises(AssertionError, match=message):
        check(stage(), (3, 4), impl=naive(break_weight=fault), orders=(late,), microbatches=1)


def test_two_gradients_in_one_memory_are_found():
    m = Stage(lambda m, x: x @ (m.a + m.b), a=(4, 4), b=(4, 4))

    def same_tensor(weights):
        weights[1].grad = weights[0].grad

    with pytest.raises(AssertionError, match="share memory"):
        check(m, (3, 4), impl=naive(break_weight=same_tensor), microbatches=1)


def test_wrong_last_bit_is_found_where_asked_for():
    with pytest.raises(AssertionError, match="after the first microbatch"):
        check(stage(), (3, 4), impl=naive(break_weight=change_last_bit), exact=True)
    check(stage(), (3, 4), impl=naive(break_weight=change_last_bit))


def writes_a_weights_gradient(grads, inputs, weights):
    weights[0].grad = torch.ones_like(weights[0])


def wrong_input_gradient(grads, inputs, weights):
    inputs[0].grad = inputs[0].grad.clone().add_(1e-12)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (writes_a_weights_gradient, "after I"),
        (wrong_input_gradient, "dinputs"),
        (lambda grads, inputs, weights: grads[0].add_(1.0), "output gradients given to I"),
    ],
    ids=["weight's gradient", "input's gradient", "output's gradient"],
)
def test_wrong_gradients_in_the_input_pass_are_found(fault, message):
    with pytest.raises(AssertionError, match=message):
        check(stage(), (3, 4), impl=naive(fault))


def test_hook_that_runs_twice_is_found():
    def forward(m, x):
        h = m.net(x)
        h.register_hook(m.log("h"))
        return h @ m.a

    with pytest.raises(AssertionError, match="calls"):
        check(stage(forward), (3, 4), impl=naive())


def test_gradient_for_a_leaf_that_is_no_weight_is_found():
    def adds_to_all(weights, groups):
        torch.autograd.backward(*groups[0])

    impl = naive()
    impl.stage_backward_weight = adds_to_all
    with pytest.raises(AssertionError, match="not among the weights"):
        check(stage(), (3, 4), impl=impl, weights=lambda m: [m.a])
