"""The other names that torch code imports from `_backward`."""

import importlib
import inspect

import pytest
import torch
from support.oracle import ON_TORCH, Stage, zb
from torch.distributed.pipelining import _backward as torchs

f64 = torch.float64
NAMES = (
    "_get_grad_fn_or_grad_acc",
    "construct_reverse_graph",
    "reverse_closure",
    "get_param_groups",
    "_autograd_grad_for_inputs",
    "_null_coalesce_accumulate",
)


def module():
    """Where `patch()` takes these names from."""
    return zb if ON_TORCH else importlib.import_module("zbpipe._upstream")


@pytest.mark.parametrize("name", NAMES)
def test_name_exists_with_torchs_signature(name):
    if name == "_autograd_grad_for_inputs" and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11 has no function of this name")
    ours = getattr(module(), name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(getattr(torchs, name)).parameters)


@pytest.mark.parametrize("name", ["stage_backward", "stage_backward_input", "stage_backward_weight"])
def test_public_functions_have_torchs_signature(name):
    from importlib.util import find_spec, module_from_spec

    spec = find_spec("torch.distributed.pipelining._backward")
    original = module_from_spec(spec)
    spec.loader.exec_module(original)
    ours, theirs = inspect.signature(getattr(zb, name)), inspect.signature(getattr(original, name))
    assert list(ours.parameters) == list(theirs.parameters)
    assert [p.default for p in ours.parameters.values()] == [p.default for p in theirs.parameters.values()]


def graph():
    m = Stage(lambda m, x: (x @ m.a).sin() @ m.b, a=(4, 4), b=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    return m, x, m(x)


def test_grad_fn_of_a_non_leaf():
    _, _, out = graph()
    assert module()._get_grad_fn_or_grad_acc(out) is out.grad_fn


def test_accumulator_of_a_leaf():
    m, _, _ = graph()
    node = module()._get_grad_fn_or_grad_acc(m.a)
    assert node.variable is m.a


def test_no_node_for_a_tensor_without_gradient():
    assert module()._get_grad_fn_or_grad_acc(torch.ones(2)) is None


def test_reverse_graph_leads_from_leaves_to_the_output():
    m, x, out = graph()
    names = module()
    edges = names.construct_reverse_graph([out.grad_fn])
    (user,) = edges[names._get_grad_fn_or_grad_acc(m.b)]
    assert user is out.grad_fn
    (first,) = edges[names._get_grad_fn_or_grad_acc(x)]
    assert first.name() == "MmBackward0"


def test_reverse_closure_of_the_input():
    m, x, out = graph()
    names = module()
    edges = names.construct_reverse_graph([out.grad_fn])
    closure, met = names.reverse_closure([names._get_grad_fn_or_grad_acc(x)], set(), edges)
    assert sorted(node.name().split("::")[-1] for node in closure) == sorted(
        ["AccumulateGrad", "MmBackward0", "SinBackward0", "MmBackward0"]
    )
    assert met == set()


def test_reverse_closure_of_a_weight_stops_at_the_targets():
    m, x, out = graph()
    names = module()
    edges = names.construct_reverse_graph([out.grad_fn])
    acc = names._get_grad_fn_or_grad_acc(m.b)
    closure, met = names.reverse_closure([acc], {out.grad_fn}, edges)
    assert closure == {acc}
    assert met == {out.grad_fn}


def test_param_groups():
    m, x, out = graph()
    names = module()
    edges = names.construct_reverse_graph([out.grad_fn])
    of = names._get_grad_fn_or_grad_acc
    groups = names.get_param_groups([of(x)], [of(m.a), of(m.b)], edges)
    assert [set(g["params"]) for g in groups] == [{of(m.a)}, {of(m.b)}]
    assert [len(g["intermediates"]) for g in groups] == [1, 1]


def test_autograd_grad_for_inputs_puts_none_where_no_gradient_can_be():
    _, x, out = graph()
    result = module()._autograd_grad_for_inputs([out], ["text", x, torch.ones(2)], [torch.ones_like(out)])
    assert [g is None for g in result] == [True, False, True]


def test_autograd_grad_for_inputs_without_inputs():
    _, _, out = graph()
    assert module()._autograd_grad_for_inputs([out], [3, torch.ones(2)]) == (None, None)


def test_autograd_grad_for_inputs_retains_the_graph_if_told():
    _, x, out = graph()
    ones = [torch.ones_like(out)]
    (first,) = module()._autograd_grad_for_inputs([out], [x], ones, retain_graph=True)
    (second,) = module()._autograd_grad_for_inputs([out], [x], ones)
    torch.testing.assert_close(first, second)


def test_autograd_grad_for_inputs_allows_unused_ones_if_told():
    _, x, out = graph()
    unused = torch.ones(2, requires_grad=True)
    result = module()._autograd_grad_for_inputs([out], [x, unused], [torch.ones_like(out)], allow_unused=True)
    assert result[1] is None


def test_null_coalesce_accumulate():
    add, one = module()._null_coalesce_accumulate, torch.ones(2)
    assert add(None, None) is None
    assert add(one, None) is one
    assert add(None, one) is one
    torch.testing.assert_close(add(one, one), torch.full((2,), 2.0))
