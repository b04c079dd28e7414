"""W called within another backward: from a hook, or from a Function's backward, whatever that backward is to compute.

torch.autograd.grad() and backward(inputs=) tell their own nodes alone what is wanted; the weights of W are none of theirs.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from support.functions import function_of
from support.oracle import bfloat16_autocast, close, needs_zbpipe, small, zb

pytestmark = needs_zbpipe

f64 = torch.float64

FORWARDS = {
    "product and bias": lambda m, x: F.linear(x, m.a, m.s),
    "einsum": lambda m, x: torch.einsum("bi,oi->bo", x, m.a),
    "einsum of three dimensions": lambda m, x: torch.einsum("bti,oi->bto", x.view(1, 3, 4), m.a),
    "view": lambda m, x: (x @ m.a.view(2, 8).view(4, 4)).sin() @ m.b.unsqueeze(0).squeeze(0),
    "cast": lambda m, x: (x @ m.a.float().double()) * m.s.float(),
    "expanded": lambda m, x: x + m.s.expand(3, 4),
    "part": lambda m, x: x @ m.a[:, :2] @ m.b[:2],
    "computed weight": lambda m, x: x @ (m.a + m.b).tanh(),
    "computed by a product": lambda m, x: x @ (m.a @ m.b),
    "norm": lambda m, x: F.layer_norm(x, (4,), m.s, m.t),
    "convolution": lambda m, x: F.conv1d(x[:, None], m.a[:2, None, :3], m.s[:2]),
    "shared": lambda m, x: (x @ m.a).sin() @ m.a.t(),
    "hooked": lambda m, x: hooked(m.a) and x @ m.a,
    "under autocast": lambda m, x: autocast(m, x),
}


def hooked(w):
    w.register_hook(lambda grad: grad * 1.0)
    return True


def autocast(m, x):
    with bfloat16_autocast():
        return F.linear(x.float(), m.a.float(), m.s.float()).sin() @ m.b.float()


@functools.partial(function_of, lambda x, what: x * 2)
def calls(x, what, grad):
    """Of 2 * x."""
    what()
    return grad * 2


def hook(z, what):
    """2 * z, with a hook that calls `what`."""
    t = z * 2
    t.register_hook(lambda grad: (what(), None)[1])
    return t


CALLERS = {"hook": hook, "Function": calls}

OUTER = {
    "backward": lambda t, z: t.sum().backward(),
    "autograd.grad": lambda t, z: torch.autograd.grad(t.sum(), [z]),
    "backward(inputs=)": lambda t, z: t.sum().backward(inputs=[z]),
    "I": lambda t, z: zb.stage_backward_input([t], [torch.ones_like(t)], [z], []),
}


def run(m, xs):
    """Ordinary backwards: the gradients of inputs and of weights."""
    for x in xs:
        m(x).sum().backward()
    return [t.grad for t in (*xs, *m.parameters())]


def run_split(m, xs, outer, call):
    """Each W is called by `call`, within a backward that `outer` runs."""
    groups = []
    for x in xs:
        out = m(x)
        groups.append(zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())[1])
    for each in groups:
        z = torch.randn(2, requires_grad=True)
        outer(call(z, lambda each=each: zb.stage_backward_weight(m.parameters(), each)), z)
    return [t.grad for t in (*xs, *m.parameters())]


@pytest.mark.parametrize("policy", [{}, {"defer": "all"}], ids=str)
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("caller", CALLERS)
def test_weight_pass_within_another_backward(outer, caller, policy):
    for name, forward in FORWARDS.items():
        results = []
        for way in (run, lambda m, xs: run_split(m, xs, OUTER[outer], CALLERS[caller])):
            torch.manual_seed(0)
            m = small(forward)
            with zb.policy(**policy):
                results.append(way(m, [torch.randn(3, 4, dtype=f64, requires_grad=True) for _ in range(2)]))
        close(*reversed(results), f"gradients, {name}")
