"""The names that torch's stage imports from `_backward`."""

import contextlib
import inspect

import pytest
import torch
from support.oracle import ON_TORCH, Stage, zb
from torch.distributed.pipelining import _backward as torchs

import zbpipe

f64 = torch.float64
has_grads_for_inputs = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 has no function of this name")


def function_of(name):
    """zbpipe's in the place of torch's, or torch's own."""
    with contextlib.nullcontext() if ON_TORCH else zbpipe.patch():
        return getattr(torchs, name)


def grads_for_inputs(*args, **kwargs):
    return function_of("_autograd_grad_for_inputs")(*args, **kwargs)


@has_grads_for_inputs
def test_grads_for_inputs_has_torchs_signature():
    ours, theirs = map(inspect.signature, (function_of("_autograd_grad_for_inputs"), torchs._autograd_grad_for_inputs))
    assert list(ours.parameters) == list(theirs.parameters)


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


@has_grads_for_inputs
def test_grads_for_inputs_gives_none_retains_and_allows_unused_ones_as_torchs():
    _, x, out = graph()
    ones, unused = [torch.ones_like(out)], torch.ones(2, requires_grad=True)
    assert grads_for_inputs([out], [3, torch.ones(2)]) == (None, None)
    first = grads_for_inputs([out], ["text", x, torch.ones(2)], ones, retain_graph=True)
    second = grads_for_inputs([out], [x, unused], ones, allow_unused=True)
    assert [g is None for g in (*first, *second)] == [True, False, True, False, True]
    torch.testing.assert_close(first[1], second[0])
