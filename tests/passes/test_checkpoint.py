"""Activation checkpointing: each block is computed again once a microbatch, in I, or once more in W."""

import contextlib
import functools
import weakref

import pytest
import torch
from support import oracle
from support.oracle import Stage, at_once, case, check, close, fresh, input_pass, interleaved, late, needs_zbpipe, zb
from support.program_names import keep_products
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import GraphExecGroup, checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from zbpipe import memory

f64 = torch.float64


ALONE = "an output on weights alone gets no gradient"
AGAIN = "each group computes the block again in W"
REENTRANT = "reentrant backward needs the accumulators"


again = functools.partial(checkpoint, use_reentrant=False)
reentrantly = functools.partial(checkpoint, use_reentrant=True)
selectively = functools.partial(again, context_fn=keep_products)


def count(m):
    if not hasattr(m, "is_uncounted"):
        m.records.setdefault(("block", m.microbatch), []).append(1)


def uncounted(m):
    """With recompute W computes blocks once more than an ordinary backward."""
    m.is_uncounted = True


def block(m, x, a, b):
    count(m)
    return (x @ a).sin() @ b + x


def stage(forward):
    return Stage(forward, a=(4, 8), b=(8, 4), c=(4, 8), d=(8, 4), s=(4, 4))


def blocks(checkpoint=again):
    def forward(m, x):
        x = checkpoint(block, m, x, m.a, m.b)
        return checkpoint(block, m, x, m.c, m.d) * 2.0

    return stage(forward)


def hooked_inside(m, x):
    def inside(m, x):
        h = x @ m.a
        h.register_hook(m.log("h"))
        return h.relu() @ m.b

    return again(inside, m, x).sin()


def nested(m, x):
    def outer(m, x):
        x = again(block, m, x, m.a, m.b)
        return again(block, m, x, m.c, m.d).sin()

    return again(outer, m, x) @ m.s


def reentrant_within(m, x):
    return again(lambda m, x: reentrantly(block, m, x, m.a, m.b).sin() @ m.s, m, x)


def with_dropout(m, x):
    def inside(m, x):
        count(m)
        return nn.functional.dropout(x @ m.a, 0.5).sin() @ m.b

    return again(inside, m, x) @ (m.c @ m.d)


def shared_inside_and_outside(m, x):
    x = again(block, m, x @ m.s, m.a, m.b)
    x = block(m, x, m.a, m.d)
    return again(block, m, x, m.c, m.b) @ m.s


def convolved(m, x):
    def inside(m, x):
        h = nn.functional.conv1d(x.view(3, 1, 4), m.a.view(4, 1, 8)[:, :, :3], padding=1)
        return nn.functional.layer_norm(h.flatten(1) @ m.b.view(16, 2), (2,), m.s[0, :2]) @ m.b.view(2, 16)

    return again(inside, m, x)


def not_in_a_region(m, x):
    return block(m, x, m.a, m.b) @ (m.c @ m.d)


def offload():
    """As CPU off-loading does: what was packed is unpacked once, and may be a new tensor each time."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t.clone())


def sequential():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, dtype=f64), nn.Tanh()) for _ in range(4)))
    return Stage(lambda m, x: checkpoint_sequential(m.net, 2, x, use_reentrant=False), net=net)


def root_in_a_region(m, x):
    return again(lambda m, x: (torch.sin(x) @ m.a, (m.b * m.c.t()).sum()), m, x)


def within_a_selected_region(m, x):
    def region(x):
        return again(lambda x: (x.sin() @ m.b.t()).sin(), x * 2).sin()

    return selectively(region, x), (x @ m.a) + (m.c * 2).sum()


def root_alone_in_a_region(m, x):
    return (x * 2) @ m.a, again(lambda m: (m.b * m.c.t()).sin(), m)


def root_in_a_selected_region(m, x):
    return selectively(lambda m, x: (torch.sin(x) @ m.a, (m.b * m.c.t()).sum(), x @ (m.a * m.a)), m, x)


# The policy for what checkpointing has packed: kept in I, left packed until W, or computed whole in I.

CHOICES = ("keep", "recompute", "input_pass")


@oracle.table(
    case("non-reentrant", blocks(), wrong=AGAIN),
    case("reentrant", blocks(reentrantly), untouched=False, wrong=REENTRANT),
    case("selective", blocks(selectively), wrong="what was recomputed for I is gone in W"),
    case("the whole stage", stage(lambda m, x: again(block, m, x, m.a, m.b)), wrong=AGAIN),
    case("hooks inside", stage(hooked_inside), wrong=AGAIN),
    case("nested", stage(nested), wrong=AGAIN),
    case("reentrant within non-reentrant", stage(reentrant_within), untouched=False, wrong=REENTRANT),
    case("sequential", sequential()),
    case("dropout keeps its mask", stage(with_dropout), wrong=AGAIN),
    case("weights shared inside and outside", stage(shared_inside_and_outside), wrong=AGAIN),
    case("convolution and norm", stage(convolved), wrong="a weight of two nodes: backward twice"),
    case(
        "no input needs a gradient",
        blocks(),
        torch.ones(3, 4, dtype=f64),
        wrong="no input needs a gradient, so there are no groups",
    ),
    *(
        case(f"an output on weights alone: {forward.__name__}", stage(forward), wrong=ALONE)
        for forward in (root_in_a_region, root_alone_in_a_region, root_in_a_selected_region, within_a_selected_region)
    ),
    case("offloaded", stage(not_in_a_region), forward_context=offload),
    case("saved on the CPU", stage(not_in_a_region), forward_context=torch.autograd.graph.save_on_cpu),
)
@pytest.mark.parametrize("choice", ["keep", *(pytest.param(choice, marks=needs_zbpipe) for choice in CHOICES[1:])])
def test_checkpointing(stage, inputs, options, choice):
    if oracle.ON_TORCH:
        check(stage, *inputs, **options)
        return
    setup = uncounted if choice == "recompute" else lambda m: None
    with zb.policy(checkpoint=choice):
        check(stage, *inputs, setup=setup, **options)
        with zb.policy(defer="all"):
            check(stage, *inputs, setup=setup, orders=(late, interleaved), **options)


def calls_of(stage, choice, weight_passes=1):
    """How often the blocks of `stage` (which logs each run as "block") run in a microbatch's forward, I and W."""
    x = fresh()
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
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("choice", CHOICES)
def test_each_block_is_computed_again_once_or_with_recompute_twice(choice, early_stop):
    again_in_w = 2 if choice == "recompute" else 0
    with set_checkpoint_early_stop(early_stop), zb.policy(checkpoint=choice):
        check(blocks(), (3, 4), orders=(at_once, late), setup=uncounted if again_in_w else lambda m: None)
        calls = calls_of(blocks(), choice)
    assert calls[: 3 if early_stop else 2] == (2, 2, again_in_w)[: 3 if early_stop else 2]


@needs_zbpipe
def test_weight_passes_one_by_one_each_compute_their_block_again():
    """A GraphExecGroup around them shares one recomputation, as it does for ordinary backwards."""
    assert calls_of(blocks(), "recompute", weight_passes=4) == (2, 2, 4)
    with GraphExecGroup():  # what I computed again lives as long as the group
        assert calls_of(blocks(), "recompute", weight_passes=4) == (2, 2, 0)


@needs_zbpipe
def test_regions_are_computed_again_last_one_first_and_one_after_the_other():
    order = []

    def inside(number, x, w):
        order.append(number)
        return (x @ w).sin()

    def forward(m, x):
        for number, w in enumerate(m.parameters()):
            x = again(inside, number, x, w)
        return x

    m = Stage(forward, a=(4, 4), b=(4, 4), c=(4, 4))
    x = fresh()
    with zb.policy(checkpoint="recompute"):
        _, groups = input_pass(m, x)
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
        count(m)
        return m.layer(x).sin()

    m = Stage(lambda m, x: again(inside, m, x) * 2.0, layer=layer)
    with zb.policy(checkpoint="keep"):
        check(m, (3, 4), orders=(at_once, late))
    assert calls_of(m, "keep") == (1, 1, 0)
    assert calls_of(m, "recompute")[:2] == (1, 1)


@needs_zbpipe
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("pass_", ["I", "W"])
def test_a_pass_whose_unpack_hook_raised_can_be_tried_again(pass_, choice):
    """W itself; after an I the graph is an ordinary backward's."""
    broken = []

    def unpack(t):
        if broken:
            raise OSError("the disk is away")
        return t

    m, x = Stage(one_block, a=(4, 8), b=(8, 4)), fresh()
    expected = torch.autograd.grad(m(x).sum(), list(m.parameters()))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        out = m(x)
    broken += [pass_] if pass_ == "I" else []
    with zb.policy(checkpoint=choice), pytest.raises(RuntimeError) if broken else contextlib.nullcontext():
        _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    if pass_ == "I":
        broken.clear()
        out.backward(torch.ones_like(out))
    else:
        if choice == "recompute":  # else I has unpacked all
            broken.append(pass_)
            with pytest.raises(OSError, match="the disk is away"):
                zb.stage_backward_weight(m.parameters(), groups)
            broken.clear()
        zb.stage_backward_weight(m.parameters(), groups)
    torch.testing.assert_close([w.grad for w in m.parameters()], list(expected))


def one_block(m, x):
    return block(m, x, m.a, m.b)


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

    x = fresh()
    m = Stage(one_block, a=(4, 8), b=(8, 4))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        out = m(x)
    with oracle.without_collector():
        with zb.policy(checkpoint=choice):
            _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
            del out
            assert sum(box() is not None for box in boxes) == (2 if choice == "recompute" else 0)
            zb.stage_backward_weight(m.parameters(), groups)
        assert all(box() is None for box in boxes)


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
        return Stage(lambda m, x: again(region, m, x.sin()), a=(4, 4), b=(4, 4))

    with zb.policy(checkpoint=choice):
        check(stage(region), (3, 4))
    assert calls_of(stage(counted), choice) == (1, 1, 1 if choice == "recompute" else 0)


def output_is_argument(m, x):
    hidden = x.sin() @ m.a
    return again(lambda h: h.tanh() @ m.b, hidden), hidden


def output_is_argument_that_gives_nothing(m, x):
    hidden, other = x.sin() @ m.a, x.cos()
    return again(lambda h, other: (other @ m.b).tanh(), hidden, other), hidden


def output_is_captured(m, x):
    hidden = (x.sin() @ m.a).tanh()
    region = again(lambda x: (hidden.sin() + x) @ m.b, x)
    return again(lambda h: (h + hidden).cos() @ m.b, region), hidden


@needs_zbpipe
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("forward", [output_is_argument, output_is_argument_that_gives_nothing, output_is_captured])
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
@pytest.mark.parametrize("forward", [nested, convolved, root_in_a_region, shared_inside_and_outside])
def test_within_a_graph_exec_group(forward, choice):
    m = Stage(forward, a=(4, 8), b=(8, 4), c=(4, 8), d=(8, 4), s=(4, 4))
    x = fresh()
    expected = torch.autograd.grad([out.sum() for out in outputs_of(m, x)], list(m.parameters()), allow_unused=True)
    outs = outputs_of(m, x)
    with zb.policy(checkpoint=choice), GraphExecGroup():
        _, groups = zb.stage_backward_input(outs, [torch.ones_like(out) for out in outs], [x], m.parameters())
        zb.stage_backward_weight(m.parameters(), groups)
    close([w.grad for w in m.parameters()], expected, "gradients")


def outputs_of(m, x):
    outs = m(x)
    return list(outs) if isinstance(outs, tuple) else [outs]


def held_after_input_pass(forward, x, grad, weights, choice):
    """The bytes that are alive between I and W, beside `x` and `grad`. W runs then."""
    with zb.policy(checkpoint=choice), memory.record() as rec:
        _, groups = zb.stage_backward_input([forward(x)], [grad], [x], weights)
        del _
        x.grad = None
        held = rec.live
    zb.stage_backward_weight(weights, groups)
    return held


@needs_zbpipe
def test_what_nodes_behind_a_split_node_have_saved_is_left_too():
    """A product of weights and constants within a region: with recompute, none of it is alive between I and W."""

    def inside(m, x, constant):
        return x @ m.a + (constant @ m.b).relu() @ m.c

    m = Stage(lambda m, x: None, a=(4, 4), b=(4, 4), c=(4, 4))
    held = {}
    for choice in ("keep", "recompute"):
        x, constant, grad = fresh(64, 4), torch.randn(64, 4, dtype=f64), torch.ones(64, 4, dtype=f64)
        region = functools.partial(again, inside, m, constant=constant, preserve_rng_state=False)
        held[choice] = held_after_input_pass(region, x, grad, list(m.parameters()), choice)
    # What relu gave, which two nodes read.
    assert held == {"keep": 64 * 4 * 8, "recompute": 0}


@needs_zbpipe
@pytest.mark.parametrize("missing", ["_CheckpointFrame", "_CachedTorchDispatchMode"])
def test_a_torch_without_the_names_that_tell_a_checkpoints_hook(missing, monkeypatch):
    """The caller's own hooks are no checkpoint's, whatever torch calls its own."""
    unpacked = []

    def unpack(box):
        unpacked.append(1)
        return box[0]

    m = Stage(lambda m, x: (x @ m.a).sin() @ m.b, a=(4, 4), b=(4, 4))
    x = fresh()
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
    for m in (blocks(again), blocks(selectively)):
        x = fresh()
        expected = torch.autograd.grad(m(x).sum(), [x, *m.parameters()], allow_unused=True)
        out = m(x)
        with zb.policy(checkpoint="recompute"), monkeypatch.context() as patch:
            patch.delattr(torch.utils.checkpoint, "_CachedTorchDispatchMode")
            _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
            zb.stage_backward_weight(m.parameters(), groups)
        close([x.grad, *(w.grad for w in m.parameters())], expected, "gradients")


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
        x = again(lambda x, w: (x @ w).tanh(), x, w)
    return x


def one_region(m, x):
    return again(lambda x: (((x @ m.a).tanh() @ m.b).tanh() @ m.c).tanh(), x)


def region_with_computed_weights(m, x):
    return again(lambda x: ((x @ (m.a * 2.0).t()).tanh() @ m.b.t().exp()).tanh() @ m.c, x)


def nested_regions(m, x):
    def inner(x):
        return (x @ m.a).tanh() @ m.b

    return again(lambda x: again(inner, x.sin()).tanh() @ m.c, x)


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
        x = fresh()
        expected = torch.autograd.grad(m(x).sum(), list(m.parameters()))
        with zb.policy(checkpoint=choice):
            seen = stepping(m)
            _, groups = input_pass(m, x)
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
@pytest.mark.parametrize(("forward", "frozen"), [*((forward, False) for forward in REGIONS), (one_region, True)])
def test_weight_that_changed_since_the_input_pass_is_refused_before_anything_is_added(forward, frozen):
    m = Stage(lambda m, x: forward(m, x) @ m.plain, a=(4, 4), b=(4, 4), c=(4, 4), plain=(4, 4))
    m.a.requires_grad_(not frozen)
    x = fresh()
    with zb.policy(checkpoint="recompute"):
        _, groups = input_pass(m, x)
        with torch.no_grad():
            m.a.add_(1.0)
        for part in (groups, groups[::-1]):
            with pytest.raises(RuntimeError, match=CHANGED) as refusal:
                zb.stage_backward_weight(m.parameters(), part)
            assert "float64[4, 4]" in str(refusal.value)
    assert all(w.grad is None for w in m.parameters())


def given_to_the_region_around(m, x, given):
    def inner(x):
        return (x @ m.a).sin() @ m.b

    return again(lambda x, given: again(inner, x * given) * 2.0, x, given)


GIVEN = {
    "by name": lambda m, x, given: again(lambda x, given: ((x * given) @ m.a).sin() @ m.b, x, given=given),
    "in place": lambda m, x, given: again(lambda x, given: ((x * given) @ m.a).sin() @ m.b, x, given),
    "closed over": lambda m, x, given: again(lambda x: ((x * given) @ m.a).sin() @ m.b, x),
    "to the region around": given_to_the_region_around,
    "to a computed weight": lambda m, x, given: x @ again(lambda given: (given.sin() @ m.a).sin() * m.b.sin(), given),
}


@needs_zbpipe
@pytest.mark.parametrize("how", GIVEN)
def test_argument_of_a_region_that_changed_is_refused_before_anything_is_added(how):
    if how == "by name" and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11 keeps no version of what a region is given by name")
    given = torch.randn(4, 4, dtype=f64)
    m = Stage(lambda m, x: GIVEN[how](m, x, given) @ m.plain, a=(4, 4), b=(4, 4), plain=(4, 4))
    for change in (lambda: None, lambda: given.add_(1.0)):
        x = fresh(4, 4)
        expected = torch.autograd.grad(m(x).sum(), list(m.parameters()))
        with zb.policy(checkpoint="recompute"):
            _, groups = input_pass(m, x)
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
def test_buffers_that_a_region_writes_are_not_watched():
    """The next microbatch's forward changes what a BatchNorm keeps, and its recomputation does."""
    net = nn.Sequential(nn.Linear(4, 4, dtype=f64), nn.BatchNorm1d(4, dtype=f64), nn.Linear(4, 4, dtype=f64))
    with zb.policy(checkpoint="recompute"):
        check(Stage(lambda m, x: again(m.net, x), net=net), (3, 4), orders=(late, interleaved))


@needs_zbpipe
@pytest.mark.filterwarnings("ignore:none of the weights:UserWarning")
def test_reentrant_checkpoint_that_leads_to_neither_input_nor_weight_is_refused():
    m = Stage(lambda m, x, d: reentrantly(lambda x, d: x @ m.w, x, d), w=(4, 4))
    x, dummy = torch.randn(3, 4, dtype=f64), torch.ones(1, requires_grad=True)
    out = m(x, dummy)
    with pytest.raises(RuntimeError) as refused:
        zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    assert "leads to no input and to none of the weights" in str(refused.value.__cause__)
    weights = [*m.parameters(), dummy]  # as the refusal says
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], weights)
    zb.stage_backward_weight(weights, groups)
    torch.testing.assert_close(m.w.grad, x.t() @ torch.ones(3, 4, dtype=f64))


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
        return (selectively if packing == "selective" else again)(region, m, x)

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


@needs_zbpipe
def test_what_the_input_pass_computes_again_is_not_kept_for_a_weight_pass_that_will_do_so_too():
    rows = 32
    m = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(3)))

    def regions(x):
        for part in m:
            x = again(part, x, preserve_rng_state=False)
        return x

    held = {}
    for choice in CHOICES:
        x, grad = torch.randn(rows, 16, requires_grad=True), torch.randn(rows, 16)
        held[choice] = held_after_input_pass(regions, x, grad, list(m.parameters()), choice)
    inputs, hidden = 4 * rows * 16, 4 * rows * 64
    assert (
        held["keep"] == 2 * inputs + 3 * hidden + 2 * inputs + 3 * hidden
    )  # the first input, the last gradient are ours
    assert held["recompute"] == 2 * inputs + 2 * inputs + 3 * hidden
    assert held["input_pass"] == sum(w.nbytes for w in m.parameters())
