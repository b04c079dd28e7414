"""Stages and blocks that torch.compile has compiled, on its own. Compiled backwards refuse `retain_graph=True`, which torch's
own module needs."""

import pytest
import torch
from support.oracle import (
    Stage,
    at_once,
    check,
    last_microbatch_first,
    late,
    needs_zbpipe,
    random_input,
    wrong_on_torch,
    zb,
)
from torch import nn

pytestmark = pytest.mark.slow
refused_by_torch = wrong_on_torch("donated buffers refuse retain_graph, unless the compiler cached none", always=False)
backends = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
orders = (at_once, late, last_microbatch_first)


def residual_block():
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def compiled(function, backend):
    """Compiled at first use, so that the oracle's copies each own their weights."""
    return torch.compile(function, backend=backend, dynamic=False)


@refused_by_torch
@backends
def test_whole_stage(backend):
    forward = compiled(lambda net, x: net[1](x + net[0](x)), backend)
    net = nn.Sequential(residual_block(), nn.Linear(8, 8))
    check(Stage(lambda m, x: forward(m.net, x), net=net), random_input(2, 3, 8), orders=orders)


@refused_by_torch
@backends
def test_each_block(backend):
    run = compiled(lambda block, x: x + block(x), backend)

    def forward(m, x):
        for layer in m.blocks:
            x = run(layer, x)
        return m.head(x)

    blocks = nn.ModuleList(residual_block() for _ in range(3))
    check(Stage(forward, blocks=blocks, head=nn.Linear(8, 4)), random_input(2, 3, 8), orders=orders)


@refused_by_torch
@backends
def test_stage_whose_input_needs_no_gradient(backend):
    forward = compiled(lambda net, x: net(x), backend)
    check(Stage(lambda m, x: forward(m.net, x), net=residual_block()), torch.ones(2, 3, 8), orders=orders)


@refused_by_torch
def test_weight_shared_by_compiled_and_plain_code():
    run = compiled(lambda block, x: x + block(x), "aot_eager")

    def forward(m, x):
        return run(m.block, x) @ m.block[1].weight.t()

    check(Stage(forward, block=residual_block()), random_input(2, 3, 8), orders=orders)


@refused_by_torch
def test_hooks_around_a_compiled_block():
    run = compiled(lambda block, x: x + block(x), "aot_eager")

    def forward(m, x):
        h = run(m.block, x)
        h.register_hook(m.log("h"))
        return h.sin()

    def setup(m):
        for name, w in m.named_parameters():
            w.register_post_accumulate_grad_hook(m.log(name, lambda p: p.grad))

    check(Stage(forward, block=residual_block()), random_input(2, 3, 8), setup=setup, orders=orders)


@needs_zbpipe
def test_compiled_autograd_is_refused_by_name():
    """Its engine compiles every node of a backward; those that a pass adds cannot be."""
    m = Stage(lambda m, x: (x @ m.a).sin() @ m.b, a=(4, 4), b=(4, 4))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    out = m(x)
    try:
        on = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    except AttributeError:
        pytest.skip("this torch has another way to switch compiled autograd on")
    with on, pytest.raises((NotImplementedError, RuntimeError)) as failure:
        zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    refusal = failure.value.__cause__ or failure.value
    assert isinstance(refusal, NotImplementedError)
    assert "compiled autograd" in str(refusal)
    out = m(x)
    expected = torch.autograd.grad(m(x).sum(), [m.a, m.b])
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    zb.stage_backward_weight(m.parameters(), groups)
    torch.testing.assert_close([m.a.grad, m.b.grad], list(expected))
