"""Nothing outlives its use: with the garbage collector off, storages and nodes are gone at once.

`StorageWeakRef`s look at the memory itself, so that holders in C++ count too; weak references in `Node.metadata` look at
the nodes. The detectors first catch planted leaks. Of what is compiled, under which they cannot look, the leak tool says it.
"""

import functools
import gc
import sys
import warnings
import weakref

import pytest
import torch
import torch.distributed.pipelining  # imported by the first failure otherwise, and counted
from support import oracle
from support.functions import Fused, Heeding, Planned
from support.leaks import Watch, no_collector
from support.oracle import ON_TORCH, Stage, needs_zbpipe, wrong_on_torch, zb
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from zbpipe.leaks import Growth, check_tensor_leak

pytestmark = [pytest.mark.drops_groups, pytest.mark.usefixtures("quick_collections")]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


class Mark:
    """An object that lives as long as the node that carries it."""


def mark(node, marks):
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node is None or node in seen or "AccumulateGrad" in node.name():
            continue
        seen.add(node)
        thing = Mark()
        marks.append(weakref.ref(thing))
        node.metadata["mark"] = thing
        todo += [parent for parent, _ in node.next_functions]


def living(marks):
    return sum(ref() is not None for ref in marks)


class Quiet:
    """Stands for the stage on which the Functions of support.functions record their calls."""

    microbatch = 0

    def __init__(self):
        self.records = {}


def attention(m, x):
    h = m.norm(x)
    q, k, v = m.qkv(h).chunk(3, dim=-1)
    return x + m.out(torch.nn.functional.scaled_dot_product_attention(q, k, v))


def main_grad():
    """I adds it."""
    a = weight(8, 8)
    a.main_grad = torch.zeros(8, 8)
    return Stage(lambda m, x: Fused.apply(x.exp(), m.a, Quiet()).sin(), a=a)


def hooked(m, x):
    h = m.net(x.exp())
    h.register_hook(print_nothing)
    h.grad_fn.register_prehook(print_nothing)
    h.grad_fn.register_hook(print_nothing)
    return h.sin()


def print_nothing(*_):
    return None


def layers():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def convolutions():
    return nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 2, 3, padding=1))


weight = functools.partial(oracle.weight, dtype=torch.float32)
# Stages of each kind; new ones each time, and no closure that could hold one.
PARTS = {
    "layers": lambda: Stage(lambda m, x: m.net(x.exp()).sin(), net=layers()),
    "attention": lambda: Stage(attention, norm=nn.LayerNorm(8), qkv=nn.Linear(8, 24), out=nn.Linear(8, 8)),
    "weights_own_computation": lambda: Stage(
        lambda m, x: (x @ (m.a @ m.b).tanh()).sin() @ (m.a + m.b), a=weight(8, 8), b=weight(8, 8)
    ),
    "convolution": lambda: Stage(lambda m, x: m.net(x[:, None].expand(-1, 2, -1).sin()), net=convolutions()),
    "function": lambda: Stage(lambda m, x: Heeding.apply(x.exp(), m.a, Quiet()).sin(), a=weight(8, 8)),
    "checkpointed": lambda: Stage(lambda m, x: checkpoint(m.net, x.exp(), use_reentrant=False).sin(), net=layers()),
    "view_output": lambda: Stage(lambda m, x: m.net(x.exp()).sin().view(-1), net=nn.Linear(8, 8)),
    "main_grad": main_grad,
    "hooked": lambda: Stage(hooked, net=nn.Linear(8, 8)),
}
view_fails = wrong_on_torch("can't detach views in place")


def kinds(*but):
    names = [pytest.param(name, marks=view_fails if name == "view_output" else ()) for name in PARTS if name not in but]
    return pytest.mark.parametrize("kind", names)


def make(kind, device="cpu"):
    with torch.device(device):  # main_grad too
        return PARTS[kind]()


def forward(m, device="cpu", marks=None):
    x = torch.randn(4, 8, device=device, requires_grad=True)
    out = m(x)
    if marks is not None:
        mark(out.grad_fn, marks)
    return x, out


def run_input(m, x, out):
    return zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())


def run_weight(m, groups):
    zb.stage_backward_weight(m.parameters(), groups)


def weights_and_buffers(m):
    gradients = [getattr(w, name, None) for w in m.parameters() for name in ("grad", "main_grad")]
    return [*m.parameters(), *gradients, *m.buffers()]


def raise_planned(*_):
    raise Planned


# What is done with a stage: what these return is held a while longer, and nothing else that they had.


def both_passes(m, device, marks):
    x, out = forward(m, device, marks)
    run_weight(m, run_input(m, x, out)[1])


def whole_walk(m, device, marks):
    x, out = forward(m, device, marks)
    zb.stage_backward((out, {"a": [out]}), (torch.ones_like(out), {"a": [torch.ones_like(out)]}), (x,))


def output_deallocated(m, device, marks):
    x, out = forward(m, device, marks)
    out = zb.make_viewless(out.exp())
    grads = [torch.ones_like(out)]
    zb.deallocate_output(out)
    run_weight(m, zb.stage_backward_input([out], grads, [x], m.parameters())[1])


def padded_buffer_released(m, device, marks):
    padded = torch.zeros(100, device=device)
    view = padded[:32].view(4, 8)
    x = (view + 1).requires_grad_()
    del view
    assert zb.release_storage(padded) == 400
    out = m(x)
    mark(out.grad_fn, marks)
    run_weight(m, run_input(m, x, out)[1])


def both_passes_and_groups_kept(m, device, marks):
    x, out = forward(m, device, marks)
    groups = run_input(m, x, out)[1]
    run_weight(m, groups)
    return groups


def groups_asked_for_their_fields(m, device, marks):
    for group in run_input(m, *forward(m, device, marks))[1]:
        assert repr(group)
        assert group.weights is not None and group._described is not None


def groups_dropped(m, device, marks):
    run_input(m, *forward(m, device, marks))


def groups_dropped_and_outputs_kept(m, device, marks):
    """Holding the outputs, as a send in flight does, keeps their own memory and no more."""
    x, out = forward(m, device, marks)
    run_input(m, x, out)
    x.grad = None
    return x, out


def refused(m, device, marks):
    x, out = forward(m, device, marks)
    with pytest.raises(ValueError, match="output_grads"):
        zb.stage_backward_input([out], [torch.ones(1, 2, 3)], [x], m.parameters())


def raising_hooks(m, device, marks):
    for at in (0, 1):
        tensors = forward(m, device, marks)
        tensors[at].register_hook(raise_planned)
        with pytest.raises(RuntimeError, match="Failed to run stage backward input"):
            run_input(m, *tensors)


def raising_hook_on_a_weight(m, device, marks):
    handles = [w.register_hook(raise_planned) for w in m.parameters()]
    groups = run_input(m, *forward(m, device, marks))[1]
    with pytest.raises((Planned, RuntimeError)):
        run_weight(m, groups)
    for handle in handles:
        handle.remove()


@pytest.fixture(scope="module", autouse=True)
def made_once():
    """The first node that keeps no more than a weight's shape makes a tensor without values, for the whole process."""
    m = make("convolution")
    run_input(m, *forward(m))


WITHOUT_W = [groups_asked_for_their_fields, groups_dropped, groups_dropped_and_outputs_kept, refused, raising_hooks]
WITH_W = [both_passes, whole_walk, output_deallocated, padded_buffer_released, both_passes_and_groups_kept]
USES = [
    use if use in (both_passes, whole_walk, groups_dropped, raising_hooks) else pytest.param(use, marks=needs_zbpipe)
    for use in [*WITHOUT_W, *WITH_W, raising_hook_on_a_weight]
]


@pytest.mark.parametrize("device", DEVICES)
@kinds()
@pytest.mark.parametrize("use", USES)
def test_all_is_gone_after(use, kind, device):
    if ON_TORCH and kind == "view_output" and "raising" in use.__name__:
        pytest.skip("torch's pass raises before the hook does")
    m, marks = make(kind, device), []
    with no_collector():
        with Watch() as watch:
            held = use(m, device, marks)
        assert watch.storages and len(marks) > 2
        tensors = [thing for thing in held or () if isinstance(thing, torch.Tensor)]
        assert watch.alive(*tensors, *weights_and_buffers(m)) == 0
        if use in WITHOUT_W:
            assert all(w.grad is None for w in m.parameters())
        del held, tensors
        assert watch.alive(*weights_and_buffers(m)) == 0
        assert living(marks) == 0


@needs_zbpipe
@kinds("convolution")
def test_input_pass_frees_what_the_weight_pass_does_not_need(kind):
    """`exp` and `sin` save tensors that no weight gradient reads."""
    m = make(kind)
    with no_collector():
        x = torch.randn(4, 8, requires_grad=True)
        saved = x.detach() * 1.0
        y = x + 0.0
        pre = StorageWeakRef(saved.untyped_storage())
        shifted = y * saved  # `mul` saves `saved`; nothing in W reads it
        out = m(shifted)
        del shifted, y, saved
        assert not pre.expired()
        _, groups = run_input(m, x, out)
        assert pre.expired()
        run_weight(m, groups)


class Packs:
    """Hooks that save copies, and what else they know."""

    def pack(self, tensor):
        return tensor.clone()

    def unpack(self, tensor):
        return tensor


@needs_zbpipe
@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize(
    "parts",
    [
        lambda m, x: (m.a, lambda w: x @ w),
        lambda m, x: ((m.a * m.a).sin(), lambda w: x @ w),
        lambda m, x: (m.a.exp(), lambda w: (x @ w).sin() @ m.a),
        lambda m, x: ((m.a @ m.a).softmax(-1), lambda w: x @ w + m.a),
    ],
    ids=["product", "outside", "outside and product", "softmax"],
)
def test_state_of_hooks_that_lists_the_groups_is_collected(parts, policy):
    """A cycle through what a task, or a node outside the closure, left packed: the collector is told of both."""
    state, x = Packs(), torch.randn(4, 4, requires_grad=True)
    m = Stage(None, a=nn.Parameter(torch.randn(4, 4)))
    with torch.autograd.graph.saved_tensors_hooks(state.pack, state.unpack):
        w, use = parts(m, x)
        out = use(w)
    with zb.policy(checkpoint=policy):
        _, state.groups = run_input(m, x, out)
    gone = weakref.ref(state)
    del state, w, use, out
    gc.collect()
    assert gone() is None


@needs_zbpipe
def test_warning_made_an_error_in_the_input_pass_frees_all():
    """It is raised when the engine's run is over, past the point where groups are handed over."""
    a = nn.Parameter(torch.randn(8, 8))
    m = Stage(lambda m, x: (x @ m.a).sin()[torch.tensor([1, 0, 1], dtype=torch.uint8)] @ m.a, a=a)
    for _ in range(2):
        with no_collector(), Watch() as watch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = torch.randn(3, 8, requires_grad=True)
            out, marks = m(x), []
            mark(out.grad_fn, marks)
            warnings.simplefilter("error")
            with pytest.raises((RuntimeError, UserWarning)):
                run_input(m, x, out)
            del x, out
            assert watch.alive(a) == 0
            assert living(marks) == 0
    assert a.grad is None


def test_weights_and_output_gradients_have_no_more_references_than_before():
    m = make("layers")
    x, out = forward(m)
    grad = torch.ones_like(out)
    counted = [grad, *m.parameters()]
    before = [sys.getrefcount(thing) for thing in counted]
    _, groups = zb.stage_backward_input([out], [grad], [x], m.parameters())
    zb.stage_backward_weight(m.parameters(), groups)
    del groups, _
    after = [sys.getrefcount(thing) for thing in counted]
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


class Compiled:
    """What is compiled, and what is checkpointed of it."""

    def __init__(self, checkpointed):
        self.net = layers()
        self.run = torch.compile(self.net, backend="aot_eager")
        self.checkpointed = checkpointed

    def __call__(self, x):
        x = x.exp()
        return (checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)).sin()

    def parameters(self):
        return self.net.parameters()


@needs_zbpipe
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look
@pytest.mark.parametrize("use", USES)
def test_of_what_is_compiled_nothing_is_left(use):
    models = [Compiled(checkpointed=False), Compiled(checkpointed=True)]
    for m in models * 2:  # compiled, and all that is made once
        use(m, "cpu", [])
    with no_collector(), check_tensor_leak(action="record", allow=[m.net for m in models]) as check:
        for m in models:
            use(m, "cpu", [])
    assert not check.report and check.report.cycles == [], check.report


@needs_zbpipe
def test_nothing_is_hung_on_reused_receive_buffers():
    m, buffer = make("layers"), torch.randn(4, 8, requires_grad=True)
    with Growth() as growth:
        for _ in range(6):
            run_weight(m, run_input(m, buffer, m(buffer))[1])
            buffer.grad = None
            growth.step()
        assert len({*growth.counts}) == len({*growth.bytes}) == 1
        assert growth.grown() == []
    assert not buffer._backward_hooks


# The detectors themselves.


def test_the_detectors_see_what_a_cycle_through_a_node_holds():
    """The collector cannot see it."""
    m, marks = make("layers"), []
    with Watch() as watch:
        x, out = forward(m, marks=marks)
        handle = out.grad_fn.register_prehook(lambda grads, out=out: None)
        del x, out
    assert watch.alive(*m.parameters()) > 0 and living(marks) == len(marks) > 2
    handle.remove()
    assert watch.alive(*m.parameters()) == 0 and living(marks) == 0


def leave_a_cycle():
    with no_collector():
        cycle = [torch.ones(2)]
        cycle.append(cycle)
        del cycle


def test_the_detector_sees_a_tensor_in_a_cycle():
    with pytest.raises(AssertionError, match=r"gc\.garbage"):
        leave_a_cycle()
