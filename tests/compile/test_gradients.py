"""Weights' and inputs' gradients and hooks of compiled stages in halves, against an eager copy's ordinary backward."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.compiled import INEXACT, ORDERS, Block, bytes_held, check_compiled, mlp, not_split, run_input
from support.oracle import at_once, groups_reversed, interleaved, one_weight_pass, random_input
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbpipe

f32 = torch.float32
inductor = pytest.param("inductor", marks=pytest.mark.slow)
backends = pytest.mark.parametrize("backend", ["aot_eager", inductor])
# Where inductor adds kernels of its own, and nothing to what is split.
rarely_inductor = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])


@pytest.fixture(autouse=True)
def _all_is_split(request, caplog):
    """Unless a test is about it, nothing may fall back."""
    yield
    if not request.node.get_closest_marker("falls_back"):
        assert not_split(caplog) == []


@rarely_inductor
def test_transformer_block(backend):
    check_compiled(Block(), random_input(2, 6, 16), backend=backend)


@backends
def test_mlp(backend):
    check_compiled(mlp(), random_input(4, 8), backend=backend)


@pytest.mark.parametrize("order", [groups_reversed, interleaved, one_weight_pass])
def test_order(order):
    check_compiled(mlp(), random_input(4, 8), orders=[order], microbatches=3)


@rarely_inductor
def test_convolution(backend):
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 1), nn.GroupNorm(1, 2))
    check_compiled(net, random_input(2, 3, 6, 6), backend=backend)


def test_batch_norm_whose_statistics_change():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
    check_compiled(net, random_input(2, 3, 6, 6))


@backends
def test_weight_used_twice(backend):
    check_compiled(nn.Linear(8, 8), random_input(4, 8), forward=lambda net, x: net(net(x).tanh()), backend=backend)


@backends
def test_two_weights_with_one_gradient(backend):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

        def forward(self, x):
            return x @ (self.a + self.b)

    check_compiled(Sum(), random_input(4, 8), backend=backend, microbatches=3)


def test_weight_shared_with_plain_code():
    run = zbpipe.compile(lambda net, x: net(x).tanh(), backend="aot_eager")

    forward = torch._dynamo.disable(lambda net, x: run(net, x) @ net.weight + x)
    check_compiled(nn.Linear(8, 8), random_input(4, 8), forward=forward)


def test_tied_embedding():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 8)
            self.mix = nn.Linear(8, 8)

        def forward(self, x, tokens):
            return self.mix(x + self.embedding(tokens)) @ self.embedding.weight.t()

    check_compiled(Tied(), random_input(2, 5, 8), torch.randint(0, 10, (2, 5)))


def test_first_stage_whose_input_needs_no_gradient():
    check_compiled(nn.Sequential(nn.Embedding(10, 8), mlp()), torch.randint(0, 10, (2, 5)))


def test_frozen_weights():
    net = Block()
    net.up.requires_grad_(False)
    net.qkv.bias.requires_grad_(False)
    check_compiled(net, random_input(2, 6, 16))


def test_some_weights_given():
    check_compiled(Block(), random_input(2, 6, 16), weights=lambda stage: [stage.net.up.weight, stage.net.norm1.bias])
    check_compiled(Block(), random_input(2, 6, 16), weights=None)


def test_weights_that_are_computed_outside():
    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))

    run = zbpipe.compile(lambda x, w, c: (x @ w).tanh() @ c, backend="aot_eager")
    plain = torch._dynamo.disable(lambda net, x: run(x, net.a + net.b.sin(), net.c.to(f32)))
    check_compiled(Computed(), random_input(4, 8), forward=plain)


def test_weight_computed_from_the_input_is_no_weight():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    run = zbpipe.compile(lambda x, w, b: (x @ w).tanh() @ b, backend="aot_eager")
    plain = torch._dynamo.disable(lambda net, x: run(x, net.a * x.sum(), net.b))
    check_compiled(Gated(), random_input(4, 8), forward=plain)


def test_several_outputs():
    def forward(net, x):
        h = net[0](x).tanh()
        return h, net[2](h), h.detach().sum()

    check_compiled(mlp(), random_input(4, 8), forward=forward)


def test_output_without_gradient():
    """Against the same compiled code, for the compiler makes zeros where eager code has no gradient."""

    def compute(net, x):
        h = net[0](x).tanh()
        return h, net[2](h)

    run = zbpipe.compile(compute, backend="aot_eager", dynamic=False)
    forward = torch._dynamo.disable(lambda net, x: run(net, x))

    def only_first(outputs):
        return [torch.ones_like(outputs[0]), None]

    check_compiled(mlp(), random_input(4, 8), forward=forward, output_grads=only_first, orders=[at_once])


def test_graph_break_and_several_graphs():
    def forward(net, x):
        x = net[0](x)
        torch._dynamo.graph_break()
        return net[1](x)

    check_compiled(nn.ModuleList([Block(), mlp(16)]), random_input(2, 6, 16), forward=forward)


def test_compiled_blocks_in_a_plain_stage():
    run = zbpipe.compile(lambda block, x: block(x), backend="aot_eager")

    @torch._dynamo.disable
    def forward(net, x):
        for block in net[:2]:
            x = run(block, x)
        return net[2](x)

    check_compiled(nn.ModuleList([Block(), Block(), mlp(16)]), random_input(2, 6, 16), forward=forward)


def test_hooks():
    def setup(stage):
        for name, w in stage.named_parameters():
            w.register_post_accumulate_grad_hook(stage.log(f"after {name}", lambda p: p.grad))
            w.register_hook(stage.log(f"grad of {name}"))

    def forward(net, x):
        return net(x)

    check_compiled(Block(), random_input(2, 6, 16), forward=forward, setup=setup)


@pytest.mark.parametrize("choice", ["all", "nothing", "matrices"])
def test_policy(choice):
    with zbpipe.policy(defer=choice):
        check_compiled(Block(), random_input(2, 6, 16))


def test_main_grad():
    net, reference = Block(), Block()
    reference.load_state_dict(net.state_dict())
    for w in net.parameters():
        w.main_grad = torch.zeros_like(w)
    compiled = zbpipe.compile(net, backend="aot_eager")
    with zbpipe.policy(main_grad=True):
        for _ in range(2):
            x = torch.randn(2, 6, 16, requires_grad=True)
            zbpipe.stage_backward_weight(net.parameters(), run_input(net, x, compiled))
            reference(x.detach()).sum().backward()
    for w, expected in zip(net.parameters(), reference.parameters(), strict=True):
        assert w.grad is None
        torch.testing.assert_close(w.main_grad, expected.grad)


@backends
def test_checkpoint_around_a_compiled_block(backend):
    run = zbpipe.compile(lambda block, x: block(x), backend=backend, dynamic=False)

    @torch._dynamo.disable
    def forward(net, x):
        return net[1](checkpoint(run, net[0], x, use_reentrant=False))

    inexact = INEXACT if backend == "inductor" else {}
    check_compiled(
        nn.ModuleList([Block(), mlp(16)]), random_input(2, 6, 16), forward=forward, orders=ORDERS[:2], **inexact
    )


@pytest.mark.parametrize("choice", ["keep", "recompute", "input_pass"])
def test_checkpoint_policies_around_a_compiled_block(choice):
    run = zbpipe.compile(lambda block, x: block(x), backend="aot_eager", dynamic=False)
    forward = torch._dynamo.disable(lambda net, x: checkpoint(run, net, x, use_reentrant=False))
    with zbpipe.policy(checkpoint=choice):
        check_compiled(Block(), random_input(2, 6, 16), forward=forward)


@backends
def test_checkpoint_within_a_compiled_stage(backend):
    def forward(net, x):
        for block in net:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    check_compiled(nn.ModuleList([Block(), Block()]), random_input(2, 6, 16), forward=forward, backend=backend)


def test_reentrant_checkpoint_around_a_compiled_block():
    """Its backward is an ordinary one, of a graph within the graph: nothing is split."""
    run = zbpipe.compile(lambda block, x: block(x), backend="aot_eager", dynamic=False)
    forward = torch._dynamo.disable(lambda net, x: checkpoint(run, net, x, use_reentrant=True))
    check_compiled(mlp(), random_input(4, 8), forward=forward, untouched=False)


@rarely_inductor
def test_autocast(backend):
    def forward(net, x):
        with torch.autocast("cpu", torch.bfloat16):
            return net(x)

    check_compiled(mlp(), random_input(4, 8), forward=forward, backend=backend, rtol=2e-2, atol=2e-2, orders=[at_once])


def test_passes_within_autocast():
    """The halves were traced with their casts: autocast around I and W changes nothing."""
    with torch.autocast("cpu", torch.bfloat16):
        check_compiled(mlp(), random_input(4, 8), forward=torch.autocast("cpu", enabled=False)(lambda net, x: net(x)))


def test_dropout():
    """Against the same compiled code, for it draws other numbers than eager code."""
    run = zbpipe.compile(lambda net, x: nn.functional.dropout(net(x), 0.5), backend="aot_eager", dynamic=False)
    check_compiled(mlp(), random_input(4, 8), forward=torch._dynamo.disable(run))


@backends
def test_dynamic_shapes(backend):
    net = Block()
    reference = Block()
    reference.load_state_dict(net.state_dict())
    compiled = zbpipe.compile(net, backend=backend, dynamic=True)
    pending = []
    for i, (batch, tokens) in enumerate([(2, 6), (3, 5), (4, 9), (2, 6)]):
        x = torch.randn(batch, tokens, 16, requires_grad=True)
        ref = x.detach().clone().requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            pending.append(run_input(net, x, compiled))
        reference(ref).sum().backward()
        torch.testing.assert_close(x.grad, ref.grad)
    for groups in pending:
        zbpipe.stage_backward_weight(net.parameters(), groups)
    for w, expected in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(w.grad, expected.grad)


def test_recompilation_for_another_size():
    net, reference = mlp(), mlp()
    reference.load_state_dict(net.state_dict())
    compiled = zbpipe.compile(net, backend="aot_eager")
    pending = []
    for rows in (4, 5, 6, 4):
        x = torch.randn(rows, 8, requires_grad=True)
        pending.append(run_input(net, x, compiled))
        reference(x.detach()).sum().backward()
    for groups in reversed(pending):
        zbpipe.stage_backward_weight(net.parameters(), groups)
    for w, expected in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(w.grad, expected.grad)


def test_evaluation_in_between():
    net, reference = nn.Sequential(mlp(), nn.Dropout(0.0)), mlp()
    reference.load_state_dict(net[0].state_dict())
    compiled = zbpipe.compile(net, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        groups = run_input(net, x, compiled)
        net.eval()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), reference(x))
        with torch.inference_mode():
            torch.testing.assert_close(compiled(x), reference(x))
        net.train()
        zbpipe.stage_backward_weight(net.parameters(), groups)
        reference(x.detach()).sum().backward()
    for w, expected in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(w.grad, expected.grad)


@backends
def test_ordinary_backward_is_the_compilers_own(backend):
    """No split is active: to the bit what torch.compile gives, before and after a split one."""
    net, other = Block(), Block()
    other.load_state_dict(net.state_dict())
    ours, theirs = zbpipe.compile(net, backend=backend), torch.compile(other, backend=backend)
    for is_split in (False, True, False):
        x = torch.randn(2, 6, 16, requires_grad=True)
        if is_split:
            zbpipe.stage_backward_weight(net.parameters(), run_input(net, x, ours))
            net.zero_grad()
            continue
        y = x.detach().clone().requires_grad_()
        ours(x).sum().backward()
        theirs(y).sum().backward()
        assert torch.equal(x.grad, y.grad)
        for w, expected in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(w.grad, expected.grad)
        net.zero_grad()
        other.zero_grad()


def test_weight_pass_twice_with_retain_graph():
    net, reference = mlp(), mlp()
    reference.load_state_dict(net.state_dict())
    compiled = zbpipe.compile(net, backend="aot_eager")
    x = torch.randn(4, 8, requires_grad=True)
    groups = run_input(net, x, compiled)
    zbpipe.stage_backward_weight(net.parameters(), groups, retain_graph=True)
    zbpipe.stage_backward_weight(net.parameters(), groups)
    (2 * reference(x.detach()).sum()).backward()
    for w, expected in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(w.grad, expected.grad)
    assert bytes_held(groups) == 0


def test_kept_tensor_that_is_changed_is_refused():
    net = mlp()
    compiled = zbpipe.compile(net, backend="aot_eager")
    x = torch.randn(4, 8, requires_grad=True)
    groups = run_input(net, x, compiled)
    with torch.no_grad():
        x.add_(1)  # the first product reads it
    with pytest.raises(RuntimeError, match="modified"):
        zbpipe.stage_backward_weight(net.parameters(), groups)
    assert all(w.grad is None for w in net.parameters())


def test_passes_in_several_threads():
    """Two microbatches' I at once, the first one that compiles the halves; W elsewhere."""
    net, reference = mlp(), mlp()
    reference.load_state_dict(net.state_dict())
    compiled = zbpipe.compile(net, backend="aot_eager")
    inputs = [torch.randn(4, 8, requires_grad=True) for _ in range(4)]
    outputs = [compiled(x) for x in inputs]

    def run_i(out, x):
        return zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], net.parameters())[1]

    with ThreadPoolExecutor(2) as pool:
        pending = list(pool.map(run_i, outputs, inputs))
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda groups: zbpipe.stage_backward_weight(net.parameters(), groups), pending))
    for x in inputs:
        reference(x.detach()).sum().backward()
    for w, expected in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(w.grad, expected.grad)


class Pooling(nn.Module):
    """A scale in the shape of a matrix, which the input pass computes on its way, and a vector with a product of its
    own, which by default does not wait without a matrix."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 1, 4))
        self.query = nn.Parameter(torch.randn(4))

    def forward(self, x):
        hidden = x * self.scale
        return ((hidden @ self.query).softmax(1).unsqueeze(-1) * hidden).sum(1)


@pytest.mark.parametrize("defer", ["matrices", "all"])
def test_vectors_that_the_cut_leaves_alone(defer):
    with zbpipe.policy(defer=defer):
        check_compiled(Pooling(), random_input(5, 6, 4))
