"""Weights' and inputs' gradients and hooks of compiled stages in halves, against an eager copy's ordinary backward."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.compiled import INEXACT, ORDERS, Block, bytes_held, check_compiled, mlp, not_split, run_input
from support.oracle import at_once, groups_reversed, interleaved, one_weight_pass, random_input, watch_weights
from support.rounding import equal
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbpipe

f32 = torch.float32
ROWS, TOKENS = random_input(4, 8), random_input(2, 6, 16)
WORDS = torch.randint(0, 10, (2, 5))
plain = torch._dynamo.disable
# On which backends a stage is tried: inductor adds kernels of its own, mostly nothing to what is split.
inductor = pytest.param("inductor", marks=pytest.mark.slow)
BOTH, RARELY = ["aot_eager", inductor], ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)]
backends = pytest.mark.parametrize("backend", BOTH)


@pytest.fixture(autouse=True)
def _all_is_split(request, caplog):
    """Unless a test is about it, nothing may fall back."""
    yield
    if not request.node.get_closest_marker("falls_back"):
        assert not_split(caplog) == []


class Weights(nn.Module):
    """Three matrices, for forwards that are given apart."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.mix = nn.Linear(8, 8)

    def forward(self, x, tokens):
        return self.mix(x + self.embedding(tokens)) @ self.embedding.weight.t()


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


def frozen():
    net = Block()
    net.up.requires_grad_(False)
    net.qkv.bias.requires_grad_(False)
    return net


def two_blocks():
    return nn.ModuleList([Block(), Block()])


def block_and_mlp():
    return nn.ModuleList([Block(), mlp(16)])


def compiled(run, **options):
    """Compiled by itself, for plain code around it."""
    return zbpipe.compile(run, backend="aot_eager", dynamic=False, **options)


def several_outputs(net, x):
    h = net[0](x).tanh()
    return h, net[2](h), h.detach().sum()


def graph_break(net, x):
    x = net[0](x)
    torch._dynamo.graph_break()
    return net[1](x)


def shared_with_plain_code():
    run = compiled(lambda net, x: net(x).tanh())
    return plain(lambda net, x: run(net, x) @ net.weight + x)


def computed_outside():
    run = compiled(lambda x, w, c: (x @ w).tanh() @ c)
    return plain(lambda net, x: run(x, net.a + net.b.sin(), net.c.to(f32)))


def computed_from_the_input():
    run = compiled(lambda x, w, b: (x @ w).tanh() @ b)
    return plain(lambda net, x: run(x, net.a * x.sum(), net.b))


def an_output_without_gradient():
    """Of compiled code: the compiler makes zeros where eager code has no gradient."""
    run = compiled(lambda net, x: several_outputs(net, x)[:2])
    return plain(lambda net, x: run(net, x))


def dropout():
    """Of compiled code: it draws other numbers than eager code."""
    return plain(compiled(lambda net, x: nn.functional.dropout(net(x), 0.5)))


def blocks_in_plain_code():
    run = compiled(lambda block, x: block(x))
    return plain(lambda net, x: net[1](run(net[0], x)))


def checkpointed_blocks(reentrant=False):
    run = compiled(lambda block, x: block(x))
    return plain(lambda net, x: checkpoint(run, net, x, use_reentrant=reentrant))


def checkpoint_within(net, x):
    for block in net:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def in_autocast(net, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        return net(x)


def only_first(outputs):
    return [torch.ones_like(outputs[0]), None]


def row(net, *inputs, backends=("aot_eager",), **options):
    """made: makes the forward, compiled by itself. policy: what the passes are called within."""
    return net, inputs, backends, options


STAGES = {
    "transformer block": row(Block, TOKENS, backends=RARELY),
    "mlp": row(mlp, ROWS, backends=BOTH),
    "mlp, other orders": row(mlp, ROWS, orders=[groups_reversed, interleaved, one_weight_pass], microbatches=3),
    "convolution": row(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 1), nn.GroupNorm(1, 2)),
        random_input(2, 3, 6, 6),
        backends=RARELY,
    ),
    "batch norm whose statistics change": row(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)),
        random_input(2, 3, 6, 6),
    ),
    "weight used twice": row(lambda: nn.Linear(8, 8), ROWS, forward=lambda net, x: net(net(x).tanh()), backends=BOTH),
    "two weights with one gradient": row(
        Weights, ROWS, forward=lambda net, x: x @ (net.a + net.b) @ net.c, backends=BOTH, microbatches=3
    ),
    "weight shared with plain code": row(lambda: nn.Linear(8, 8), ROWS, made=shared_with_plain_code),
    "tied embedding": row(Tied, random_input(2, 5, 8), WORDS),
    "no input needs a gradient": row(lambda: nn.Sequential(nn.Embedding(10, 8), mlp()), WORDS),
    "frozen weights": row(frozen, TOKENS),
    "some weights given": row(Block, TOKENS, weights=lambda stage: [stage.net.up.weight, stage.net.norm1.bias]),
    "None for all weights": row(Block, TOKENS, weights=None),
    "weights that are computed outside": row(Weights, ROWS, made=computed_outside),
    "weight computed from the input": row(Weights, ROWS, made=computed_from_the_input),
    "several outputs": row(mlp, ROWS, forward=several_outputs),
    "output without gradient": row(
        mlp, ROWS, made=an_output_without_gradient, output_grads=only_first, orders=[at_once]
    ),
    "graph break": row(block_and_mlp, TOKENS, forward=graph_break),
    "blocks in a plain stage": row(block_and_mlp, TOKENS, made=blocks_in_plain_code),
    "hooks": row(Block, TOKENS, setup=watch_weights),
    **{f"defer={choice}": row(Block, TOKENS, policy={"defer": choice}) for choice in ("all", "nothing", "matrices")},
    **{
        f"vectors that the cut leaves alone, {choice}": row(Pooling, random_input(5, 6, 4), policy={"defer": choice})
        for choice in ("matrices", "all")
    },
    **{
        f"checkpoint around it, {choice}": row(Block, TOKENS, made=checkpointed_blocks, policy={"checkpoint": choice})
        for choice in ("keep", "recompute", "input_pass")
    },
    "checkpoint within": row(two_blocks, TOKENS, forward=checkpoint_within, backends=BOTH),
    # Its backward is an ordinary one, of a graph within the graph: nothing is split.
    "reentrant checkpoint around it": row(mlp, ROWS, made=lambda: checkpointed_blocks(reentrant=True), untouched=False),
    "autocast": row(mlp, ROWS, forward=in_autocast, backends=RARELY, rtol=2e-2, atol=2e-2, orders=[at_once]),
    "dropout": row(mlp, ROWS, made=dropout),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, *getattr(backend, "values", (backend,)), marks=getattr(backend, "marks", ()))
        for name, (_, _, backends, _) in STAGES.items()
        for backend in backends
    ],
)
def test_compiled_stage(name, backend):
    net, inputs, _, options = STAGES[name]
    options = dict(options)
    made, policy = options.pop("made", None), options.pop("policy", {})
    if made:
        options["forward"] = made()
    with zbpipe.policy(**policy):
        check_compiled(net(), *inputs, backend=backend, **options)


@backends
def test_checkpoint_around_a_block_beside_a_plain_one(backend):
    run = zbpipe.compile(lambda block, x: block(x), backend=backend, dynamic=False)
    forward = plain(lambda net, x: net[1](checkpoint(run, net[0], x, use_reentrant=False)))
    inexact = INEXACT if backend == "inductor" else {}
    check_compiled(block_and_mlp(), TOKENS, forward=forward, orders=ORDERS[:2], **inexact)


def test_passes_within_autocast():
    """The halves were traced with their casts: autocast around I and W changes nothing."""
    device = torch.get_default_device().type
    with torch.autocast(device, torch.bfloat16):
        check_compiled(mlp(), ROWS, forward=torch.autocast(device, enabled=False)(lambda net, x: net(x)))


def twins(make):
    """A stage, and another with the same weights."""
    net, reference = make(), make()
    reference.load_state_dict(net.state_dict())
    return net, reference


def assert_same_grads(net, reference):
    torch.testing.assert_close([w.grad for w in net.parameters()], [w.grad for w in reference.parameters()])


def test_main_grad():
    net, reference = twins(Block)
    for w in net.parameters():
        w.main_grad = torch.zeros_like(w)
    forward = compiled(net)
    with zbpipe.policy(main_grad=True):
        for _ in range(2):
            x = torch.randn(2, 6, 16, requires_grad=True)
            zbpipe.stage_backward_weight(net.parameters(), run_input(net, x, forward))
            reference(x.detach()).sum().backward()
    assert all(w.grad is None for w in net.parameters())
    torch.testing.assert_close([w.main_grad for w in net.parameters()], [w.grad for w in reference.parameters()])


DYNAMIC = [(2, 6), (3, 5), (4, 9), (2, 6)]


@pytest.mark.parametrize(
    ("backend", "dynamic", "sizes"),
    [
        ("aot_eager", True, DYNAMIC),
        pytest.param("inductor", True, DYNAMIC, marks=pytest.mark.slow),
        ("aot_eager", None, [(2, 4), (2, 5), (2, 6), (2, 4)]),
    ],
)
def test_sizes_that_change(backend, dynamic, sizes):
    """By code for all sizes, or compiled again."""
    net, reference = twins(Block)
    forward, pending = zbpipe.compile(net, backend=backend, dynamic=dynamic), []
    for i, size in enumerate(sizes):
        x = torch.randn(*size, 16, requires_grad=True)
        ref = x.detach().clone().requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=bool(dynamic) and i > 0):
            pending.append(run_input(net, x, forward))
        reference(ref).sum().backward()
        torch.testing.assert_close(x.grad, ref.grad)
    for groups in reversed(pending):
        zbpipe.stage_backward_weight(net.parameters(), groups)
    assert_same_grads(net, reference)


def test_evaluation_in_between():
    net, reference = twins(lambda: nn.Sequential(mlp(), nn.Dropout(0.0)))
    forward = compiled(net)
    for _ in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        groups = run_input(net, x, forward)
        net.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(forward(x), reference(x))
        net.train()
        zbpipe.stage_backward_weight(net.parameters(), groups)
        reference(x.detach()).sum().backward()
    assert_same_grads(net, reference)


@backends
def test_ordinary_backward_is_the_compilers_own(backend):
    """No split is active: to the bit what torch.compile gives, before and after a split one."""
    net, other = twins(Block)
    ours, theirs = zbpipe.compile(net, backend=backend), torch.compile(other, backend=backend)
    for is_split in (False, True, False):
        x = torch.randn(2, 6, 16, requires_grad=True)
        if is_split:
            zbpipe.stage_backward_weight(net.parameters(), run_input(net, x, ours))
        else:
            y = x.detach().clone().requires_grad_()
            ours(x).sum().backward()
            theirs(y).sum().backward()
            assert equal(x.grad, y.grad)
            assert all(equal(w.grad, v.grad) for w, v in zip(net.parameters(), other.parameters(), strict=True))
        net.zero_grad()
        other.zero_grad()


def test_weight_pass_twice_with_retain_graph():
    net, reference = twins(mlp)
    x = torch.randn(4, 8, requires_grad=True)
    groups = run_input(net, x, compiled(net))
    zbpipe.stage_backward_weight(net.parameters(), groups, retain_graph=True)
    zbpipe.stage_backward_weight(net.parameters(), groups)
    (2 * reference(x.detach()).sum()).backward()
    assert_same_grads(net, reference)
    assert bytes_held(groups) == 0


def test_kept_tensor_that_is_changed_is_refused():
    net, x = mlp(), torch.randn(4, 8, requires_grad=True)
    groups = run_input(net, x, compiled(net))
    with torch.no_grad():
        x.add_(1)  # the first product reads it
    with pytest.raises(RuntimeError, match="modified"):
        zbpipe.stage_backward_weight(net.parameters(), groups)
    assert all(w.grad is None for w in net.parameters())


@backends
def test_gradient_that_lies_in_what_is_kept_and_is_changed_is_refused(backend):
    """The views of inductor's code count no changes of what they are views of."""
    z, w = torch.randn(4, 8), nn.Parameter(torch.randn(8, 8))
    run = zbpipe.compile(lambda x: (x.view(4, 8) + z @ w).sin(), backend=backend, dynamic=False)
    x = torch.randn(2, 2, 8, requires_grad=True)
    hidden = x * 1
    hidden.register_hook(lambda grad: grad.mul_(2))
    out = run(hidden)
    (dx,), groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    torch.testing.assert_close(dx, 2 * (x.view(4, 8) + z @ w).cos().view(2, 2, 8))
    with pytest.raises(RuntimeError, match="modified"):
        zbpipe.stage_backward_weight([w], groups)
    assert w.grad is None


@pytest.mark.parametrize(
    "view",
    [torch.conj, lambda x: x.conj().imag, torch.view_as_real, lambda x: x.mT],
    ids=["conjugated", "negated", "as real", "transposed"],
)
def test_gradient_that_is_another_reading_of_what_is_kept(view):
    z, w = torch.randn(4, 4, dtype=torch.complex128), nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
    forward, pending, expected = lambda x: view(x) + z @ w if view is torch.conj else view(x + z @ w), [], 0
    run = compiled(forward)
    for _ in range(2):
        x = torch.randn(4, 4, dtype=torch.complex128, requires_grad=True)
        grad = torch.randn_like(forward(x))
        dx, dw = torch.autograd.grad(forward(x), [x, w], grad)
        (found,), groups = zbpipe.stage_backward_input([run(x)], [grad], [x], [w])
        torch.testing.assert_close(found, dx)
        expected, pending = expected + dw, [*pending, groups]
    for groups in pending:
        zbpipe.stage_backward_weight([w], groups)
    torch.testing.assert_close(w.grad, expected)


@backends
@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda w: w.detach().mul_(3), "modified"), (lambda w: w.untyped_storage().resize_(0), "memory has been freed")],
    ids=["stepped", "freed"],
)
def test_view_of_a_weight_that_is_changed_is_refused(backend, change, words):
    a, b = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
    x = torch.randn(4, 8, requires_grad=True)
    out = zbpipe.compile(lambda x, a, b: x @ (a @ b), backend=backend, dynamic=False)(x, a[:], b[:])
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [a, b])
    change(a)
    with pytest.raises(RuntimeError, match=words):
        zbpipe.stage_backward_weight([a, b], groups)
    assert a.grad is None and b.grad is None


def test_passes_in_several_threads():
    """Two microbatches' I at once, the first one that compiles the halves; W elsewhere."""
    net, reference = twins(mlp)
    forward = compiled(net)
    inputs = [torch.randn(4, 8, requires_grad=True) for _ in range(4)]
    outputs = [forward(x) for x in inputs]

    def run_i(out, x):
        return zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], net.parameters())[1]

    with ThreadPoolExecutor(2) as pool:
        pending = list(pool.map(run_i, outputs, inputs))
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda groups: zbpipe.stage_backward_weight(net.parameters(), groups), pending))
    for x in inputs:
        reference(x.detach()).sum().backward()
    assert_same_grads(net, reference)
