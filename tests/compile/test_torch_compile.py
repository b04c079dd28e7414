"""Stages and blocks that torch.compile has compiled, on its own. Compiled backwards refuse `retain_graph=True`, which torch's
own module needs."""

import pytest
import torch
from support import oracle
from support.oracle import Stage, check, last_microbatch_first, late, needs_zbpipe, random_input, wrong_on_torch, zb
from torch import nn

pytestmark = pytest.mark.slow
refused_by_torch = wrong_on_torch("donated buffers refuse retain_graph, unless the compiler cached none", always=False)
BACKENDS = ("aot_eager", "inductor")
INPUT = random_input(2, 3, 8)


def residual_block():
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def compiled(function, backend):
    """Compiled at first use, so that the oracle's copies each own their weights."""
    return torch.compile(function, backend=backend, dynamic=False)


def whole_stage(backend):
    forward = compiled(lambda net, x: net[1](x + net[0](x)), backend)
    return Stage(lambda m, x: forward(m.net, x), net=nn.Sequential(residual_block(), nn.Linear(8, 8)))


def each_block(backend):
    run = compiled(lambda block, x: x + block(x), backend)

    def forward(m, x):
        for layer in m.blocks:
            x = run(layer, x)
        return m.head(x)

    return Stage(forward, blocks=nn.ModuleList(residual_block() for _ in range(3)), head=nn.Linear(8, 4))


def one_block(backend):
    forward = compiled(lambda net, x: net(x), backend)
    return Stage(lambda m, x: forward(m.net, x), net=residual_block())


def shared_with_plain_code(backend):
    run = compiled(lambda block, x: x + block(x), backend)
    return Stage(lambda m, x: run(m.block, x) @ m.block[1].weight.t(), block=residual_block())


def hooked(backend):
    run = compiled(lambda block, x: x + block(x), backend)

    def forward(m, x):
        h = run(m.block, x)
        h.register_hook(m.log("h"))
        return h.sin()

    return Stage(forward, block=residual_block())


def log_weights(m):
    for name, w in m.named_parameters():
        w.register_post_accumulate_grad_hook(m.log(name, lambda p: p.grad))


@refused_by_torch
@pytest.mark.parametrize(
    ("make", "backend", "x", "setup"),
    [
        *((make, backend, INPUT, None) for make in (whole_stage, each_block) for backend in BACKENDS),
        *((one_block, backend, torch.ones(2, 3, 8), None) for backend in BACKENDS),  # no input needs a gradient
        (shared_with_plain_code, "aot_eager", INPUT, None),
        (hooked, "aot_eager", INPUT, log_weights),
    ],
)
def test_compiled_stages(make, backend, x, setup):
    check(make(backend), x, setup=setup or (lambda m: None), orders=(oracle.at_once, last_microbatch_first, late))


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
