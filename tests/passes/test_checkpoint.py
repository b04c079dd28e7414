"""Activation checkpointing: each block is computed again once a microbatch, in I, or once more in W."""

import functools
import gc
import weakref

import pytest
import torch
from support.oracle import Stage, at_once, check, interleaved, late, needs_zbpipe, wrong_on_torch, zb
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

f64 = torch.float64


def computed_once(test):
    """The blocks' hooks are called as often as in an ordinary backward."""
    return wrong_on_torch("each group computes the block again in W")(test)


def block(m, x, a, b):
    m.records.setdefault(("block", m.microbatch), []).append(1)
    return (x @ a).sin() @ b + x


def blocks(use_reentrant):
    def forward(m, x):
        x = checkpoint(block, m, x, m.a, m.b, use_reentrant=use_reentrant)
        x = checkpoint(block, m, x, m.c, m.d, use_reentrant=use_reentrant)
        return x * 2.0

    return Stage(forward, a=(4, 8), b=(8, 4), c=(4, 8), d=(8, 4))


@computed_once
def test_non_reentrant():
    check(blocks(use_reentrant=False), (3, 4))


@wrong_on_torch("reentrant backward needs the accumulators")
def test_reentrant():
    check(blocks(use_reentrant=True), (3, 4), untouched=False)


def test_one_block_is_the_whole_stage():
    def forward(m, x):
        return checkpoint(m.net, x, use_reentrant=False)

    net = nn.Sequential(nn.Linear(4, 8, dtype=f64), nn.ReLU(), nn.Linear(8, 4, dtype=f64))
    check(Stage(forward, net=net), (3, 4))


@computed_once
def test_whole_stage_with_hooks_inside():
    def inside(m, x):
        h = m.net[0](x)
        h.register_hook(m.log("h"))
        return m.net[1](h.relu())

    net = nn.Sequential(nn.Linear(4, 8, dtype=f64), nn.Linear(8, 4, dtype=f64))
    check(Stage(lambda m, x: checkpoint(inside, m, x, use_reentrant=False).sin(), net=net), (3, 4))


@computed_once
def test_nested_non_reentrant():
    def outer(m, x):
        x = checkpoint(block, m, x, m.a, m.b, use_reentrant=False)
        return checkpoint(block, m, x, m.c, m.d, use_reentrant=False).sin()

    stage = Stage(
        lambda m, x: checkpoint(outer, m, x, use_reentrant=False) * m.s, a=(4, 8), b=(8, 4), c=(4, 8), d=(8, 4), s=(4,)
    )
    check(stage, (3, 4))


@wrong_on_torch("reentrant backward needs the accumulators")
def test_reentrant_within_non_reentrant():
    def outer(m, x):
        return checkpoint(block, m, x, m.a, m.b, use_reentrant=True).sin() @ m.c

    check(
        Stage(lambda m, x: checkpoint(outer, m, x, use_reentrant=False), a=(4, 8), b=(8, 4), c=(4, 4)),
        (3, 4),
        untouched=False,
    )


@pytest.mark.parametrize("early_stop", [True, False])
@computed_once
def test_early_stop(early_stop):
    from torch.utils.checkpoint import set_checkpoint_early_stop

    with set_checkpoint_early_stop(early_stop):
        check(blocks(use_reentrant=False), (3, 4), orders=(at_once, late))


def save_products(ctx, op, *args, **kwargs):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


@wrong_on_torch("what was recomputed for I is gone in W")
def test_selective():
    def forward(m, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
        for weights in ((m.a, m.b), (m.c, m.d)):
            x = checkpoint(block, m, x, *weights, use_reentrant=False, context_fn=contexts)
        return x

    check(Stage(forward, a=(4, 8), b=(8, 4), c=(4, 8), d=(8, 4)), (3, 4))


def test_sequential():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, dtype=f64), nn.Tanh()) for _ in range(4)))
    check(Stage(lambda m, x: checkpoint_sequential(m.net, 2, x, use_reentrant=False), net=net), (3, 4))


@computed_once
def test_dropout_inside_a_block_keeps_its_mask():
    def inside(m, x):
        m.records.setdefault(("block", m.microbatch), []).append(1)
        return nn.functional.dropout(x @ m.a, 0.5) @ m.b

    check(Stage(lambda m, x: checkpoint(inside, m, x, use_reentrant=False), a=(4, 8), b=(8, 4)), (3, 4))


@computed_once
def test_weight_shared_inside_and_outside_of_blocks():
    def forward(m, x):
        x = checkpoint(block, m, x @ m.s, m.a, m.b, use_reentrant=False)
        return checkpoint(block, m, x, m.a, m.b, use_reentrant=False) @ m.s

    check(Stage(forward, a=(4, 8), b=(8, 4), s=(4, 4)), (3, 4), orders=(at_once, late, interleaved))


@wrong_on_torch("no input needs a gradient, so there are no groups")
def test_no_input_needs_a_gradient():
    check(blocks(use_reentrant=False), torch.ones(3, 4, dtype=f64))


def test_saved_tensors_hooks_that_move_activations_elsewhere():
    """As CPU off-loading does: what was packed is unpacked once, and may be a new tensor each time."""

    def offload():
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t.clone())

    net = nn.Sequential(nn.Linear(4, 8, dtype=f64), nn.Tanh(), nn.Linear(8, 4, dtype=f64))
    check(Stage(lambda m, x: m.net(x).sin(), net=net), (3, 4), forward_context=offload)


def test_save_on_cpu():
    net = nn.Sequential(nn.Linear(4, 8, dtype=f64), nn.Tanh(), nn.Linear(8, 4, dtype=f64))
    check(Stage(lambda m, x: m.net(x).sin(), net=net), (3, 4), forward_context=torch.autograd.graph.save_on_cpu)


# The policy for what checkpointing has packed: kept in I, left packed until W, or computed whole in I.

CHOICES = ("keep", "recompute", "input_pass")


def block_without_count(m, x, a, b):
    return (x @ a).sin() @ b + x


def calls_of(stage, choice, weight_passes=1):
    """How often the blocks of `stage` (which logs each run as "block") run in a microbatch's forward, I and W."""
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    stage.records.clear()
    calls = []

    def count():
        calls.append(sum(len(runs) for runs in stage.records.values()) - sum(calls))

    with zb.policy(checkpoint=choice):
        out = stage(x)
        count()
        _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], stage.parameters())
        count()
        for part in [groups] if weight_passes == 1 else [[group] for group in groups]:
            zb.stage_backward_weight(stage.parameters(), part)
        count()
    return tuple(calls)


@needs_zbpipe
@pytest.mark.parametrize("choice", CHOICES)
def test_each_block_is_computed_again_once_or_with_recompute_twice(choice):
    assert calls_of(blocks(use_reentrant=False), choice) == (2, 2, 2 if choice == "recompute" else 0)


def nested(m, x):
    def outer(m, x):
        x = checkpoint(block_without_count, m, x, m.a, m.b, use_reentrant=False)
        return checkpoint(block_without_count, m, x, m.c, m.d, use_reentrant=False).sin()

    return checkpoint(outer, m, x, use_reentrant=False)


def dropped_out(m, x):
    def inside(m, x):
        return nn.functional.dropout(x @ m.a, 0.5).sin() @ m.b

    return checkpoint(inside, m, x, use_reentrant=False, preserve_rng_state=True) @ (m.c @ m.d)


def selected(m, x):
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    x = checkpoint(block_without_count, m, x, m.a, m.b, use_reentrant=False, context_fn=contexts)
    return checkpoint(block_without_count, m, x, m.c, m.d, use_reentrant=False)


def offloaded(m, x):
    with torch.autograd.graph.save_on_cpu():
        return block_without_count(m, x, m.a, m.b) @ (m.c @ m.d)


def repacked(m, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t.clone()):
        return block_without_count(m, x, m.a, m.b) @ (m.c @ m.d)


def mixed(m, x):
    """Checkpointed, plain and reentrant parts that share weights."""
    x = checkpoint(block_without_count, m, x, m.a, m.b, use_reentrant=False)
    x = block_without_count(m, x, m.a, m.d)
    return checkpoint(block_without_count, m, x, m.c, m.b, use_reentrant=False)


def convolved(m, x):
    def inside(m, x):
        h = nn.functional.conv1d(x.view(3, 1, 4), m.a.view(4, 1, 8)[:, :, :3], padding=1)
        return nn.functional.layer_norm(h.flatten(1) @ m.b.view(16, 2), (2,), m.s) @ m.b.view(2, 16)

    return checkpoint(inside, m, x, use_reentrant=False)


@needs_zbpipe
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("forward", [nested, dropped_out, selected, offloaded, repacked, mixed, convolved])
def test_gradients_under_every_choice(forward, choice):
    m = Stage(forward, a=(4, 8), b=(8, 4), c=(4, 8), d=(8, 4), s=(2,))
    with zb.policy(checkpoint=choice):
        check(m, (3, 4))
        with zb.policy(defer="all"):
            check(m, (3, 4), orders=(late, interleaved))


@needs_zbpipe
@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop_under_every_choice(early_stop):
    from torch.utils.checkpoint import set_checkpoint_early_stop

    for choice in CHOICES:
        with set_checkpoint_early_stop(early_stop):
            assert calls_of(blocks(use_reentrant=False), choice)[:2] == (2, 2)


@needs_zbpipe
def test_weight_passes_one_by_one_each_compute_their_block_again():
    """A GraphExecGroup around them shares one recomputation, as it does for ordinary backwards."""
    from torch.utils.checkpoint import GraphExecGroup

    assert calls_of(blocks(use_reentrant=False), "recompute", weight_passes=4) == (2, 2, 4)
    stage = blocks(use_reentrant=False)
    with GraphExecGroup():
        assert calls_of(stage, "recompute", weight_passes=4) == (2, 2, 0), (
            "what I computed again lives as long as the group"
        )


@needs_zbpipe
def test_regions_are_computed_again_last_one_first_and_one_after_the_other():
    order = []

    def inside(number, x, w):
        order.append(number)
        return (x @ w).sin()

    def forward(m, x):
        for number, w in enumerate(m.parameters()):
            x = checkpoint(inside, number, x, w, use_reentrant=False)
        return x

    m = Stage(forward, a=(4, 4), b=(4, 4), c=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    with zb.policy(checkpoint="recompute"):
        _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
        order.clear()
        zb.stage_backward_weight(m.parameters(), groups)
    assert order == [2, 1, 0]


@needs_zbpipe
@pytest.mark.parametrize("normalization", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrised_weights_are_computed_again_once(normalization):
    """What the nodes between product and weight have saved is unpacked in I too."""
    layer = getattr(nn.utils.parametrizations, normalization)(nn.Linear(4, 4, dtype=f64))
    layer.eval()  # spectral_norm changes its buffers when it trains, and so in each computation

    def inside(m, x):
        m.records.setdefault(("block", m.microbatch), []).append(1)
        return m.layer(x).sin()

    m = Stage(lambda m, x: checkpoint(inside, m, x, use_reentrant=False) * 2.0, layer=layer)
    with zb.policy(checkpoint="keep"):
        check(m, (3, 4), orders=(at_once, late))
    assert calls_of(m, "keep") == (1, 1, 0)
    assert calls_of(m, "recompute")[:2] == (1, 1)


@needs_zbpipe
def test_unpack_hook_that_raises_in_the_weight_pass_can_be_tried_again():
    broken = []

    def unpack(t):
        if broken:
            raise OSError("the disk is away")
        return t

    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    m = Stage(block_without_count_forward, a=(4, 8), b=(8, 4))
    expected = torch.autograd.grad(m(x).sum(), list(m.parameters()))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        out = m(x)
    with zb.policy(checkpoint="recompute"):
        _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
        broken.append(1)
        with pytest.raises(OSError, match="the disk is away"):
            zb.stage_backward_weight(m.parameters(), groups)
        broken.clear()
        zb.stage_backward_weight(m.parameters(), groups)
    for w, grad in zip(m.parameters(), expected, strict=True):
        torch.testing.assert_close(w.grad, grad)


def block_without_count_forward(m, x):
    return block_without_count(m, x, m.a, m.b)


@needs_zbpipe
@pytest.mark.parametrize("choice", CHOICES)
def test_packed_data_is_free_after_the_weight_pass(choice):
    """Nothing is held by the hooks' data, whichever way it went."""

    class Box:
        def __init__(self, tensor):
            self.tensor = tensor.detach()

    boxes = []

    def pack(tensor):
        box = Box(tensor)
        boxes.append(weakref.ref(box))
        return box

    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    m = Stage(block_without_count_forward, a=(4, 8), b=(8, 4))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        out = m(x)
    gc.disable()
    try:
        with zb.policy(checkpoint=choice):
            _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
            del out
            assert sum(box() is not None for box in boxes) == (2 if choice == "recompute" else 0)
            zb.stage_backward_weight(m.parameters(), groups)
        assert all(box() is None for box in boxes)
    finally:
        gc.enable()


@needs_zbpipe
def test_what_the_input_pass_computes_again_is_not_kept_for_a_weight_pass_that_will_do_so_too():
    from zbpipe import memory

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return self.down(self.up(x).relu())

    rows = 32
    m = nn.Sequential(*(Wide() for _ in range(3)))
    held = {}
    for choice in CHOICES:
        x, grad = torch.randn(rows, 16, requires_grad=True), torch.randn(rows, 16)
        gc.collect()
        with zb.policy(checkpoint=choice), memory.record() as rec:
            h = x
            for part in m:
                h = checkpoint(part, h, use_reentrant=False, preserve_rng_state=False)
            _, groups = zb.stage_backward_input([h], [grad], [x], m.parameters())
            del h, _
            x.grad = None
            held[choice] = rec.live
            del groups
    inputs, hidden = 4 * rows * 16, 4 * rows * 64
    assert (
        held["keep"] == 2 * inputs + 3 * hidden + 2 * inputs + 3 * hidden
    )  # the first input, the last gradient are ours
    assert held["recompute"] == 2 * inputs + 2 * inputs + 3 * hidden
    assert held["input_pass"] == sum(w.nbytes for w in m.parameters())


def root_in_a_region(m, x):
    return checkpoint(lambda m, x: (torch.sin(x) @ m.a, (m.b * m.c.t()).sum()), m, x, use_reentrant=False)


def within_a_selected_region(m, x):
    def region(x):
        return checkpoint(lambda x: (x.sin() @ m.b.t()).sin(), x * 2, use_reentrant=False).sin()

    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    return checkpoint(region, x, use_reentrant=False, context_fn=contexts), (x @ m.a) + (m.c * 2).sum()


def root_alone_in_a_region(m, x):
    return (x * 2) @ m.a, checkpoint(lambda m: (m.b * m.c.t()).sin(), m, use_reentrant=False)


def root_in_a_selected_region(m, x):
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    return checkpoint(
        lambda m, x: (torch.sin(x) @ m.a, (m.b * m.c.t()).sum(), x @ (m.a * m.a)),
        m,
        x,
        use_reentrant=False,
        context_fn=contexts,
    )


@needs_zbpipe
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    "forward", [root_in_a_region, root_alone_in_a_region, root_in_a_selected_region, within_a_selected_region]
)
def test_output_on_weights_alone_within_a_region(forward, choice):
    with zb.policy(checkpoint=choice):
        check(Stage(forward, a=(4, 8), b=(8, 4), c=(4, 8)), (3, 4))


class KeepsItsResult(Function):
    """Saves an input and its output, and looks at their histories when it unpacks them."""

    @staticmethod
    def forward(ctx, w):
        result = w.sin()
        ctx.save_for_backward(w, result)
        return result

    @staticmethod
    def backward(ctx, grad):
        w, result = ctx.saved_tensors
        assert w.requires_grad and result.grad_fn is not None
        return grad * w.cos()


@needs_zbpipe
@pytest.mark.parametrize("choice", CHOICES)
def test_function_before_a_weight_of_a_region_costs_no_further_recomputation(choice):
    def region(m, x):
        return x @ KeepsItsResult.apply(m.a * m.b)

    def counted(m, x):
        m.log("block")()
        return region(m, x)

    def stage(region):
        return Stage(lambda m, x: checkpoint(region, m, x.sin(), use_reentrant=False), a=(4, 4), b=(4, 4))

    with zb.policy(checkpoint=choice):
        check(stage(region), (3, 4))
    assert calls_of(stage(counted), choice) == (1, 1, 1 if choice == "recompute" else 0)


def output_is_argument(m, x):
    hidden = x.sin() @ m.a
    return checkpoint(lambda h: h.tanh() @ m.b, hidden, use_reentrant=False), hidden


def output_is_argument_that_gives_nothing(m, x):
    hidden, other = x.sin() @ m.a, x.cos()
    return checkpoint(lambda h, other: (other @ m.b).tanh(), hidden, other, use_reentrant=False), hidden


def output_is_captured(m, x):
    hidden = (x.sin() @ m.a).tanh()
    region = checkpoint(lambda x: (hidden.sin() + x) @ m.b, x, use_reentrant=False)
    return checkpoint(lambda h: (h + hidden).cos() @ m.b, region, use_reentrant=False), hidden


@needs_zbpipe
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize(
    "forward", [output_is_argument, output_is_argument_that_gives_nothing, output_is_captured], ids=lambda f: f.__name__
)
def test_output_that_a_region_reads_has_its_history_until_w(forward, needs_grad, choice):
    stage = Stage(forward, a=(4, 4), b=(4, 4))
    with zb.policy(checkpoint=choice):
        check(stage, lambda: torch.randn(3, 4, dtype=f64, requires_grad=needs_grad), orders=(at_once, late))
        x = torch.randn(3, 4, dtype=f64, requires_grad=needs_grad)
        outs = stage(x)
        _, groups = zb.stage_backward_input(outs, [torch.ones_like(out) for out in outs], [x], stage.parameters())
        for group in groups:
            zb.stage_backward_weight(stage.parameters(), [group])
    assert [out.grad_fn for out in outs] == [None, None]


@needs_zbpipe
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("forward", [nested, convolved, root_in_a_region, mixed])
def test_within_a_graph_exec_group(forward, choice):
    from torch.utils.checkpoint import GraphExecGroup

    m = Stage(forward, a=(4, 8), b=(8, 4), c=(4, 8), d=(8, 4), s=(2,))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    expected = torch.autograd.grad([out.sum() for out in outputs_of(m, x)], list(m.parameters()), allow_unused=True)
    outs = outputs_of(m, x)
    with zb.policy(checkpoint=choice), GraphExecGroup():
        _, groups = zb.stage_backward_input(outs, [torch.ones_like(out) for out in outs], [x], m.parameters())
        zb.stage_backward_weight(m.parameters(), groups)
    for w, grad in zip(m.parameters(), expected, strict=True):
        assert (w.grad is None) == (grad is None)
        if grad is not None:
            torch.testing.assert_close(w.grad, grad)


def outputs_of(m, x):
    outs = m(x)
    return list(outs) if isinstance(outs, tuple) else [outs]


@needs_zbpipe
@pytest.mark.parametrize("choice", CHOICES)
def test_unpack_hook_that_raises_in_the_input_pass_leaves_the_graph_usable(choice):
    calls = []

    def unpack(t):
        calls.append(t)
        if len(calls) == 1:
            raise OSError("the disk is away")
        return t

    w = torch.randn(4, 4, dtype=f64, requires_grad=True)
    x = torch.randn(2, 4, dtype=f64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        out = x @ w
    with zb.policy(checkpoint=choice), pytest.raises(RuntimeError):
        zb.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    out.backward(torch.ones_like(out))
    torch.testing.assert_close(w.grad, x.detach().sum(0)[:, None].expand(4, 4))


@needs_zbpipe
def test_what_nodes_behind_a_split_node_have_saved_is_left_too():
    """A product of weights and constants within a region: with recompute, none of it is alive between I and W."""
    from zbpipe import memory

    def inside(m, x, constant):
        return x @ m.a + (constant @ m.b).relu() @ m.c

    m = Stage(lambda m, x: None, a=(4, 4), b=(4, 4), c=(4, 4))
    held = {}
    for choice in ("keep", "recompute"):
        x, constant = torch.randn(64, 4, dtype=f64, requires_grad=True), torch.randn(64, 4, dtype=f64)
        with zb.policy(checkpoint=choice), memory.record() as rec:
            out = checkpoint(inside, m, x, constant, use_reentrant=False, preserve_rng_state=False)
            grad = torch.ones_like(out)
            _, groups = zb.stage_backward_input([out], [grad], [x], m.parameters())
            del out, _
            x.grad = None
            held[choice] = rec.live
        zb.stage_backward_weight(m.parameters(), groups)
        del groups
    rows = 64 * 4 * 8
    assert held == {
        "keep": 2 * rows,
        "recompute": rows,
    }  # the output's gradient, and what relu gave, which two nodes read


@needs_zbpipe
@pytest.mark.parametrize("missing", ["_CheckpointFrame", "_CachedTorchDispatchMode"])
def test_a_torch_without_the_names_that_tell_a_checkpoints_hook(missing, monkeypatch):
    """The caller's own hooks are no checkpoint's, whatever torch calls its own."""
    unpacked = []

    def unpack(box):
        unpacked.append(1)
        return box[0]

    m = Stage(lambda m, x: (x @ m.a).sin() @ m.b, a=(4, 4), b=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    expected = torch.autograd.grad(m(x).sum(), [x, *m.parameters()])
    with monkeypatch.context() as patch, zb.policy(checkpoint="recompute"):
        patch.delattr(torch.utils.checkpoint, missing)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: [tensor.detach()], unpack):
            out = m(x)
        _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
        in_input_pass = len(unpacked)
        zb.stage_backward_weight(m.parameters(), groups)
    torch.testing.assert_close([x.grad, m.a.grad, m.b.grad], list(expected))
    assert len(unpacked) - in_input_pass == 2, "W unpacks the two matrices that I has left packed"


@needs_zbpipe
def test_a_torch_that_cannot_tell_a_selective_region(monkeypatch):
    """Then every region may be one, and I unpacks what W reads, as selective ones need it."""
    stage = Stage(lambda m, x: checkpoint(block, m, x, m.a, m.b, use_reentrant=False).sin(), a=(4, 8), b=(8, 4))
    context = functools.partial(create_selective_checkpoint_contexts, save_products)
    selective = Stage(
        lambda m, x: checkpoint(block, m, x, m.a, m.b, use_reentrant=False, context_fn=context).sin(),
        a=(4, 8),
        b=(8, 4),
    )
    for m in (stage, selective):
        x = torch.randn(3, 4, dtype=f64, requires_grad=True)
        expected = torch.autograd.grad(m(x).sum(), [x, *m.parameters()])
        out = m(x)
        with zb.policy(checkpoint="recompute"), monkeypatch.context() as patch:
            patch.delattr(torch.utils.checkpoint, "_CachedTorchDispatchMode")
            _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
            zb.stage_backward_weight(m.parameters(), groups)
        torch.testing.assert_close([x.grad, m.a.grad, m.b.grad], list(expected))


# What a weight pass that computes regions again reads beside what the groups hold.

CHANGED = "modified by an inplace operation"


def stepping(stage):
    """An optimizer in hooks, as a weight's gradient is complete; what each weight's gradient was."""
    seen = {}

    def step(w):
        seen[w] = w.grad.clone()
        with torch.no_grad():
            w.sub_(w.grad)
        w.grad = None

    for w in stage.parameters():
        w.register_post_accumulate_grad_hook(step)
    return seen


def layers(m, x):
    for w in (m.a, m.b, m.c):
        x = checkpoint(lambda x, w: (x @ w).tanh(), x, w, use_reentrant=False)
    return x


def one_region(m, x):
    return checkpoint(lambda x: (((x @ m.a).tanh() @ m.b).tanh() @ m.c).tanh(), x, use_reentrant=False)


def region_with_computed_weights(m, x):
    return checkpoint(lambda x: ((x @ (m.a * 2.0).t()).tanh() @ m.b.t().exp()).tanh() @ m.c, x, use_reentrant=False)


def nested_regions(m, x):
    def inner(x):
        return (x @ m.a).tanh() @ m.b

    return checkpoint(lambda x: checkpoint(inner, x.sin(), use_reentrant=False).tanh() @ m.c, x, use_reentrant=False)


def packed_elsewhere(m, x):
    """Behind hooks that zbpipe knows nothing of, which may compute what they unpack as a checkpoint does."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        return ((x @ m.a).tanh() @ m.b).tanh() @ m.c


REGIONS = [layers, one_region, region_with_computed_weights, nested_regions, packed_elsewhere]


@needs_zbpipe
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("forward", REGIONS)
@pytest.mark.parametrize("order", ["one call", "one by one", "reversed"])
def test_weights_that_step_between_weight_passes_give_right_gradients_or_a_refusal(order, forward, choice):
    m = Stage(forward, a=(4, 4), b=(4, 4), c=(4, 4))
    for _ in range(2):
        x = torch.randn(3, 4, dtype=f64, requires_grad=True)
        expected = torch.autograd.grad(m(x).sum(), list(m.parameters()))
        with zb.policy(checkpoint=choice):
            seen = stepping(m)
            out = m(x)
            _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
            calls = {"one call": [groups], "one by one": [[g] for g in groups], "reversed": [[g] for g in groups[::-1]]}
            refused = []
            for call in calls[order]:
                before = dict(seen)
                try:
                    zb.stage_backward_weight(m.parameters(), call)
                except RuntimeError as error:
                    assert CHANGED in str(error) and 'checkpoint="keep"' in str(error)
                    assert seen == before and all(w.grad is None for w in m.parameters())
                    refused.append(call)
        assert len(seen) + len(refused) == 3
        for w, grad in zip(m.parameters(), expected, strict=True):
            if w in seen:
                torch.testing.assert_close(seen[w], grad)
            w._post_accumulate_grad_hooks.clear()
        if choice != "recompute" or order == "one call" or (forward is layers and order == "one by one"):
            assert not refused
        if choice == "recompute" and order == "reversed":
            assert refused


@needs_zbpipe
@pytest.mark.parametrize("forward", REGIONS)
def test_weight_that_changed_since_the_input_pass_is_refused_before_anything_is_added(forward):
    m = Stage(lambda m, x: forward(m, x) @ m.plain, a=(4, 4), b=(4, 4), c=(4, 4), plain=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    with zb.policy(checkpoint="recompute"):
        _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
        with torch.no_grad():
            m.a.add_(1.0)
        for part in (groups, groups[::-1]):
            with pytest.raises(RuntimeError, match=CHANGED) as refusal:
                zb.stage_backward_weight(m.parameters(), part)
            assert "Double [4, 4]" in str(refusal.value)
    assert all(w.grad is None for w in m.parameters())


def given_by_name(m, x, given):
    return checkpoint(lambda x, given: ((x * given) @ m.a).sin() @ m.b, x, given=given, use_reentrant=False)


def given_in_place(m, x, given):
    return checkpoint(lambda x, given: ((x * given) @ m.a).sin() @ m.b, x, given, use_reentrant=False)


def closed_over(m, x, given):
    return checkpoint(lambda x: ((x * given) @ m.a).sin() @ m.b, x, use_reentrant=False)


def given_to_the_region_around(m, x, given):
    def inner(x):
        return (x @ m.a).sin() @ m.b

    return checkpoint(
        lambda x, given: checkpoint(inner, x * given, use_reentrant=False) * 2.0, x, given, use_reentrant=False
    )


def given_to_a_computed_weight(m, x, given):
    return x @ (checkpoint(lambda given: (given.sin() @ m.a).sin() * m.b.sin(), given, use_reentrant=False))


@needs_zbpipe
@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(
            given_by_name,
            marks=pytest.mark.skipif(
                torch.__version__ < (2, 12), reason="torch 2.11 keeps no version of what a region is given by name"
            ),
        ),
        given_in_place,
        closed_over,
        given_to_the_region_around,
        given_to_a_computed_weight,
    ],
)
def test_argument_of_a_region_that_changed_is_refused_before_anything_is_added(forward):
    given = torch.randn(4, 4, dtype=f64)
    m = Stage(lambda m, x: forward(m, x, given) @ m.plain, a=(4, 4), b=(4, 4), plain=(4, 4))
    for change in (lambda: None, lambda: given.add_(1.0)):
        x = torch.randn(4, 4, dtype=f64, requires_grad=True)
        expected = torch.autograd.grad(m(x).sum(), list(m.parameters()))
        out = m(x)
        with zb.policy(checkpoint="recompute"):
            _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
            before = given._version
            change()
            if given._version == before:
                zb.stage_backward_weight(m.parameters(), groups)
                for w, grad in zip(m.parameters(), expected, strict=True):
                    torch.testing.assert_close(w.grad, grad)
                    w.grad = None
                continue
            for part in (groups, groups[::-1]):
                with pytest.raises(RuntimeError, match=CHANGED):
                    zb.stage_backward_weight(m.parameters(), part)
        assert all(w.grad is None for w in m.parameters())


@needs_zbpipe
def test_frozen_weight_of_a_region_that_changed_is_refused():
    m = Stage(one_region, a=(4, 4), b=(4, 4), c=(4, 4))
    m.a.requires_grad_(False)
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    with zb.policy(checkpoint="recompute"):
        _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
        m.a.add_(1.0)
        with pytest.raises(RuntimeError, match=CHANGED):
            zb.stage_backward_weight(m.parameters(), groups)
    assert m.b.grad is None and m.c.grad is None


@needs_zbpipe
def test_buffers_that_a_region_writes_are_not_watched():
    """The next microbatch's forward changes what a BatchNorm keeps, and its recomputation does."""
    net = nn.Sequential(nn.Linear(4, 4, dtype=f64), nn.BatchNorm1d(4, dtype=f64), nn.Linear(4, 4, dtype=f64))
    with zb.policy(checkpoint="recompute"):
        check(
            Stage(lambda m, x: checkpoint(m.net, x, use_reentrant=False), net=net), (3, 4), orders=(late, interleaved)
        )


# main_grad, and the backward within the backward of a reentrant checkpoint.


def with_main_grads(m):
    for w in m.parameters():
        w.main_grad = torch.ones(w.shape)
        w.grad_added_to_main_grad = False
    return [1.0 for _ in m.parameters()]


def half_block(x, a, b):
    return (x @ a).sin() @ b


@needs_zbpipe
@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_of_checkpointed_regions_go_to_main_grad(use_reentrant, has_grad):
    def region(m, x, use_reentrant):
        return checkpoint(lambda x: half_block(x, m.a, m.b), x, use_reentrant=use_reentrant)

    a, b, c = (nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((4, 8), (8, 4), (4, 4)))
    m = Stage(lambda m, x: region(m, x, use_reentrant) @ m.c, a=a, b=b, c=c)
    total = with_main_grads(m)
    for w in m.parameters():
        w.grad = torch.full_like(w, 7.0) if has_grad else None
    for _ in range(2):
        x = torch.randn(3, 4).bfloat16().requires_grad_()
        grads = torch.autograd.grad((half_block(x, a, b) @ c).sum(), list(m.parameters()))
        total = [t + g.float() for t, g in zip(total, grads, strict=True)]
        with zb.policy(main_grad=True):
            out = m(x)
            # listed twice, as tied weights may be
            _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], [*m.parameters(), a])
            zb.stage_backward_weight(m.parameters(), groups)
    for w, t in zip(m.parameters(), total, strict=True):
        torch.testing.assert_close(w.main_grad, t)
        assert w.grad_added_to_main_grad
        assert w.grad.eq(7.0).all() if has_grad else w.grad is None


@needs_zbpipe
def test_gradients_that_a_hook_moves_to_main_grad_are_not_moved_again():
    """As Megatron's hook of its data parallel wrapper does."""
    w = nn.Parameter(torch.randn(4, 4))
    m = Stage(lambda m, x: checkpoint(lambda x: x @ m.w, x, use_reentrant=True), w=w)
    with_main_grads(m)

    def move(w):
        w.main_grad += w.grad
        w.grad = None

    w.register_post_accumulate_grad_hook(move)
    x = torch.randn(3, 4, requires_grad=True)
    with zb.policy(main_grad=True):
        out = m(x)
        _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
        zb.stage_backward_weight(m.parameters(), groups)
    torch.testing.assert_close(w.main_grad, 1 + x.detach().t() @ torch.ones(3, 4))
    assert w.grad is None


@needs_zbpipe
def test_input_pass_into_main_grad_refuses_a_reentrant_checkpoint_that_the_weight_pass_would_run():
    m = Stage(lambda m, x, h: x + checkpoint(lambda h: h @ m.w, h * m.v, use_reentrant=True), w=(4, 4), v=(4,))
    with_main_grads(m)
    x, h = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    out = m(x, h)
    with zb.policy(main_grad=True), pytest.raises(RuntimeError) as refused:
        zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    assert "no input that requires a gradient leads to this one" in str(refused.value.__cause__)
    assert x.grad is None and all(w.grad is None and w.main_grad.eq(1).all() for w in m.parameters())
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())  # nothing was touched
    zb.stage_backward_weight(m.parameters(), groups)
    torch.testing.assert_close(m.w.grad, (h * m.v).detach().t().double() @ torch.ones(3, 4).double())


@needs_zbpipe
def test_reentrant_checkpoint_that_leads_to_neither_input_nor_weight_is_refused():
    m = Stage(lambda m, x, d: checkpoint(lambda x, d: x @ m.w, x, d, use_reentrant=True), w=(4, 4))
    x, dummy = torch.randn(3, 4, dtype=f64), torch.ones(1, requires_grad=True)
    out = m(x, dummy)
    with pytest.raises(RuntimeError) as refused:
        zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    assert "leads to no input and to none of the weights" in str(refused.value.__cause__)
    weights = [*m.parameters(), dummy]  # as the refusal says
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], weights)
    zb.stage_backward_weight(weights, groups)
    torch.testing.assert_close(m.w.grad, x.t() @ torch.ones(3, 4, dtype=f64))


@needs_zbpipe
def test_whole_backward_into_main_grad_refuses_a_reentrant_checkpoint():
    m = Stage(lambda m, x: checkpoint(lambda x: x @ m.w, x, use_reentrant=True).sin(), w=(4, 4))
    with_main_grads(m)
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    with zb.policy(main_grad=True), pytest.raises(RuntimeError) as refusal:
        zb.stage_backward(out, torch.ones_like(out), [x])
    assert "use_reentrant=False" in str(refusal.value.__cause__)
    assert m.w.grad is None and m.w.main_grad.eq(1).all()
    out.backward(torch.ones_like(out))
    assert m.w.grad is not None


# Products that W computes by running their node again, which unpacks all that it has saved.
NOT_PLAIN = {
    "scaled addmm": lambda m, x: torch.addmm(m.s, x, m.a, alpha=2),
    "scaled addmm, weight on the left": lambda m, x: torch.addmm(m.t, m.a.t(), x.t(), beta=0.5).t(),
    "scaled baddbmm": lambda m, x: torch.baddbmm(m.s, x[None], m.a[None].expand(1, 4, 4), beta=0.5)[0],
    "complex": lambda m, x: (torch.complex(x, x) @ m.z).real,
    "convolution": lambda m, x: nn.functional.conv1d(x[:, None], m.k, padding=1).sum(1),
    "two weights": lambda m, x: torch.addmm(m.s, x, torch.addmm(m.t, m.a, m.b, alpha=2), alpha=2),
}


@needs_zbpipe
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("packing", ["selective", "checkpoint", "hooks"])
@pytest.mark.parametrize("form", NOT_PLAIN)
def test_products_that_are_not_plain_are_unpacked_no_more_often_than_others(form, packing, choice):
    """A checkpointed region is computed again once in I; hooks unpack each tensor once. With recompute, once more."""
    counts = []

    def region(m, x):
        counts[-1] += packing != "hooks"
        return NOT_PLAIN[form](m, x.sin()).sin()

    def unpack(tensor):
        counts[-1] += 1
        return tensor

    def forward(m, x):
        counts.append(0)
        if packing == "hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
                return region(m, x)
        contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
        options = {"context_fn": contexts} if packing == "selective" else {}
        return checkpoint(region, m, x, use_reentrant=False, **options)

    m = Stage(
        forward,
        a=(4, 4),
        b=(4, 4),
        s=(4,),
        t=(4, 4),
        z=nn.Parameter(torch.randn(4, 4, dtype=torch.complex128)),
        k=(2, 1, 3),
    )
    with zb.policy(checkpoint=choice):
        check(m, (4, 4), orders=(at_once,))
    split, ordinary = sum(counts[:2]), sum(counts[2:])  # two microbatches each
    if choice != "recompute" or packing == "selective":
        assert split == ordinary
    elif packing == "checkpoint":
        assert (ordinary, split) == (4, 6)
    else:
        assert ordinary < split <= 2 * ordinary
