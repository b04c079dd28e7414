"""What runs in W, and what is held for it: products counted by their FLOPs, memory to the byte, nothing leaked."""

import gc
import weakref

import pytest
import torch
from support.compiled import Block, bytes_held, mlp, run_input
from support.oracle import Stage, weight, without_collector
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe import memory

pytestmark = pytest.mark.drops_groups

inductor = pytest.param("inductor", marks=pytest.mark.slow)
backends = pytest.mark.parametrize("backend", ["aot_eager", inductor])
f32 = 4
WIDTH, BATCH, TOKENS = 16, 2, 6
ROWS = BATCH * TOKENS
VECTORS = 4 * WIDTH  # gradients of two norms, which I computes
FLOOR = f32 * (ROWS * (WIDTH + 3 * WIDTH + WIDTH + WIDTH + WIDTH + 4 * WIDTH + 4 * WIDTH + WIDTH) + VECTORS)
"""Of a block: input and output gradient of its four products."""


def block_input():
    return torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)


def passes(net, compiled, x):
    out = compiled(x)
    grad = torch.ones_like(out)
    return lambda: zbpipe.stage_backward_input([out], [grad], [x], net.parameters())[1]


@backends
@pytest.mark.parametrize("recompute", [False, True])
def test_profile_of_a_block(backend, recompute):
    """At least nine tenths of the weight products' FLOPs are within the weight pass."""
    net = Block()
    compiled = zbpipe.compile(net, backend=backend, recompute=recompute)
    zbpipe.stage_backward_weight(net.parameters(), passes(net, compiled, block_input())())
    input_pass = passes(net, compiled, block_input())
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as prof:
        with record_function("test: I"):
            groups = input_pass()
        with record_function("test: W"):
            zbpipe.stage_backward_weight(net.parameters(), groups)
    found = {"test: I": 0, "test: W": 0}
    events = prof.events()
    for range_ in (event for event in events if event.name in found):
        found[range_.name] = sum(
            event.flops or 0
            for event in events
            if range_.time_range.start <= event.time_range.start <= range_.time_range.end
        )
    weights = sum(2 * ROWS * w.numel() for w in net.parameters() if w.dim() == 2)
    assert found["test: W"] >= 0.9 * weights
    assert found["test: I"] <= 1.1 * weights


@pytest.mark.slow
def test_held_of_a_block_by_inductor():
    """Inductor's forward saves less than eager code's: what W reads of it is computed in I, or by W from less."""
    net = Block()
    compiled = zbpipe.compile(net)
    assert bytes_held(run_input(net, block_input(), compiled)) <= FLOOR


@pytest.mark.parametrize("choice", ["all", "nothing"])
def test_held_by_policy(choice):
    net = mlp()
    compiled = zbpipe.compile(net, backend="aot_eager")
    weights = sum(w.numel() for w in net.parameters())
    floor = 4 * (8 + 16 + 16 + 8)
    with zbpipe.policy(defer=choice):
        held = bytes_held(run_input(net, torch.randn(4, 8, requires_grad=True), compiled))
    assert held == f32 * {"all": floor, "nothing": weights}[choice]


def test_recomputation_holds_less():
    """Under checkpointing within the graph both halves need what is computed again; W may do so once more."""

    def forward(net, x):
        h = net[0](x)
        return net[1](h.exp()) + net[2](h.exp().tanh())

    held = {}
    for recompute in (False, True):
        net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 8))
        compiled = zbpipe.compile(
            lambda x, net=net: checkpoint(forward, net, x, use_reentrant=False),
            backend="aot_eager",
            recompute=recompute,
        )
        held[recompute] = bytes_held(run_input(net, torch.randn(4, 8, requires_grad=True), compiled))
    gradients = 4 * (16 + 8)  # of up's output; of both outputs, which is one
    assert held == {False: f32 * (4 * 8 + 2 * 4 * 16 + gradients), True: f32 * (4 * 8 + 4 * 16 + gradients)}


@backends
def test_memory_of_both_passes(backend):
    """What I alone needs goes in I; W lets go of everything."""
    net = Block()
    compiled = zbpipe.compile(net, backend=backend)
    for _ in range(2):  # gradients exist from the first on
        zbpipe.stage_backward_weight(net.parameters(), passes(net, compiled, block_input())())
    x = block_input()
    with memory.record() as rec:
        out = compiled(x)
        grad = torch.ones_like(out)
        groups = zbpipe.stage_backward_input([out], [grad], [x], net.parameters())[1]
        del out, grad
        x.grad = None
        after_i = rec.live
        held = bytes_held(groups)
        zbpipe.stage_backward_weight(net.parameters(), groups)
        del groups
        after_w = rec.live
    assert after_i == held
    assert after_w == 0


@backends
@pytest.mark.parametrize("end", ["W", "dropped", "failed"])
def test_nothing_is_leaked(backend, end):
    """With the garbage collector off: all that a microbatch made is gone when its groups are."""
    net = mlp()
    compiled = zbpipe.compile(net, backend=backend)
    for _ in range(2):
        zbpipe.stage_backward_weight(net.parameters(), run_input(net, torch.randn(4, 8, requires_grad=True), compiled))
    with without_collector(), memory.record() as rec:
        x = torch.randn(4, 8, requires_grad=True)
        groups = run_input(net, x, compiled)
        died = weakref.ref(groups[0])
        if end == "W":
            zbpipe.stage_backward_weight(net.parameters(), groups)
        elif end == "failed":
            hook = net[0].weight.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                zbpipe.stage_backward_weight(net.parameters(), groups)
            hook.remove()
        del groups, x
        assert died() is None
        assert rec.live == 0


def test_compiled_code_goes_with_its_module():
    net = mlp()
    compiled = zbpipe.compile(net, backend="aot_eager")
    zbpipe.stage_backward_weight(net.parameters(), run_input(net, torch.randn(4, 8, requires_grad=True), compiled))
    alive = weakref.ref(net)
    del net, compiled
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


def test_groups_print_and_are_accounted():
    net = Block()
    compiled = zbpipe.compile(net, backend="aot_eager")
    groups = run_input(net, block_input(), compiled)
    assert memory.held(groups, net).bytes == FLOOR
    (group,) = groups
    assert len(group.weights) == 12


def test_parameter_that_w_reads_is_copied():
    """fully_shard frees what it gathered after I; and an optimizer may step before W."""

    a, b = (weight(8, 8, dtype=torch.float32) for _ in range(2))
    net = Stage(lambda m, x: x @ (m.a @ m.b), a=a, b=b)
    compiled = zbpipe.compile(net, backend="aot_eager")
    x = torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(net(x).sum(), [net.a, net.b])
    groups = run_input(net, x, compiled)
    for w in net.parameters():
        w.untyped_storage().resize_(0)
    zbpipe.stage_backward_weight(net.parameters(), groups)
    torch.testing.assert_close([net.a.grad, net.b.grad], list(expected))
