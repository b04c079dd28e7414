"""Between I and W a stage holds the floor, exactly; I and W take no more than they must. Bytes, on the CPU.

The floor is what any W needs: per heavy weight the storage of its X and that of its dY, each storage once, and the
gradients of the light weights that I computed. It is found without zbpipe, by hooks on a copy of the stage that runs an
ordinary backward; what the caller owns (the stage's input, the output's gradient) is not counted.
"""

import copy
import functools
from typing import NamedTuple

import pytest
import torch
from bench.stages import STAGES
from torch import nn

import zbpipe
from zbpipe import memory

pytestmark = pytest.mark.drops_groups

HEAVY = (nn.Linear, nn.Conv2d)
PRODUCTS = ("AddmmBackward0", "MmBackward0", "ConvolutionBackward0", "LinearBackward0")
START = 4
"""Bytes of the one number from which zbpipe starts the engine; it gives the output's gradient to its nodes later on."""


class Watcher:
    """Notes on a copy of a stage the storage of each heavy module's input and of the gradient that its product gets.

    Keeps the tensors themselves: two that live at once cannot share memory by chance.
    """

    def __init__(self, stage):
        self.checkpointed = stage.checkpointed
        self.kept = []
        self.convolutions = {}  # (module, X, dY) by module
        for module in stage.modules():
            if isinstance(module, HEAVY):
                module.register_forward_pre_hook(self.note_input)
                module.register_forward_hook(self.note_output)

    def note_input(self, module, args):
        # What a checkpoint computes in forward is gone: X is then what it computes again, within the backward.
        if (torch._C._current_graph_task_id() != -1) == self.checkpointed:
            self.kept.append(args[0].detach())

    def note_output(self, module, args, out):
        if torch._C._current_graph_task_id() == -1:
            node = out.grad_fn
            while node.name() not in PRODUCTS:
                node = node.next_functions[0][0]
            node.register_prehook(lambda grads: self.note_gradient(module, grads[0].detach()))

    def note_gradient(self, module, grad):
        self.kept.append(grad)
        if isinstance(module, nn.Conv2d):
            self.convolutions[module] = (module, torch.empty(grad.shape[0], module.in_channels, *grad.shape[2:]), grad)

    def bytes(self, *callers):
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self.kept}
        for t in callers:
            storages.pop(t.untyped_storage()._cdata, None)
        return sum(storages.values())


class Reference(NamedTuple):
    """The floor of a split backward, and the peak of an ordinary one of a copy, which keeps all that W needs and drops
    the gradients that W computes: with these kernels in this order no I can do with less. ``kernel`` is the most that a
    convolution's kernel takes to compute its weight's gradient, the gradient included."""

    floor: int
    keeping: int
    kernel: int


def ordinary(stage, x, grad):
    watched = copy.deepcopy(stage)
    watcher = Watcher(watched)
    light = drop_gradients(watched)
    entered = x.detach().requires_grad_()
    with memory.record() as rec:
        y = watched(entered)
        y.backward(grad)
        del y
    kernel = max(map(kernel_bytes, watcher.convolutions.values()), default=0)
    return Reference(watcher.bytes(entered, grad) + bytes_of(light), rec.peak, kernel)


def drop_gradients(stage):
    """Drops each gradient as it comes. Returns the list that keeps those which I computes: no heavy module's."""
    kept = []

    def drop(p, is_light):
        if is_light:
            kept.append(p.grad)
        p.grad = None

    for module in stage.modules():
        for p in module.parameters(recurse=False):
            is_light = not isinstance(module, HEAVY)
            p.register_post_accumulate_grad_hook(lambda p, is_light=is_light: drop(p, is_light))
    return kept


def kernel_bytes(convolution):
    module, x, grad = convolution
    bias = None if module.bias is None else list(module.bias.shape)
    with memory.record() as rec:
        torch.ops.aten.convolution_backward(
            grad, x, module.weight.detach(), bias, module.stride, module.padding, module.dilation, False, [0, 0], 1,
            [False, True, bias is not None],
        )  # fmt: skip
    return rec.peak


def bytes_of(tensors):
    return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)


def grads_of(stage):
    return bytes_of(p.grad for p in stage.parameters())


def make(kind, checkpointed):
    stage = STAGES[kind](checkpointed=checkpointed)
    return stage, torch.randn(stage.shape), torch.randn(stage.shape)


@functools.cache
def reference_of(kind, checkpointed):
    """`ordinary` of what the tests make, each with the generator seeded anew."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ordinary(*make(kind, checkpointed))


def input_pass(stage, x, grad):
    """The groups. All else goes, as when a pipeline has sent it."""
    x.requires_grad_()
    y = stage(x)
    groups = zbpipe.stage_backward_input([y], [grad], [x], stage.parameters())[1]
    x.grad = None
    return groups


every_stage = pytest.mark.parametrize(
    ("kind", "checkpointed"), [(kind, checkpointed) for kind in STAGES for checkpointed in (False, True)]
)


SMALL, LARGE = 1024 * 256 * 4, 1024 * 1024 * 4  # bytes of a [1024, 256] and of a [1024, 1024] tensor


def test_the_watcher_by_hand():
    """One block of the MLP: X and dY of two products, less the caller's x."""
    stage = STAGES["mlp"](blocks=1)
    x, grad = torch.randn(stage.shape), torch.randn(stage.shape)
    assert ordinary(stage, x, grad).floor == 2 * LARGE + SMALL
    assert ordinary(STAGES["transformer"](), *2 * [torch.randn(1, 1024, 256)]).floor == 4 * (16 * SMALL + 4096) - SMALL


@pytest.mark.parametrize("fused", [False, True])
def test_every_byte_by_hand(fused, monkeypatch):
    """Of each phase the live bytes at its beginning, the peak, and at its end."""
    # On aarch64 torch's forward is a product of oneDNN's, which takes as much again for the weight in another order.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    net = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    x, grad = torch.randn(1024, 256, requires_grad=True), torch.randn(1024, 256)
    with zbpipe.policy(fused=fused), memory.record() as rec:
        for _ in range(2):
            with rec.phase("forward"):
                y = net(x)
            groups = zbpipe.stage_backward_input([y], [grad], [x], net.parameters())[1]
            del y
            x.grad = None
            zbpipe.stage_backward_weight(net.parameters(), groups)
            del groups
    forward, i, w, forward_again, i_again, w_again = [(p.live_begin, p.peak, p.live_end) for p in rec.phases]
    # What goes into GELU and what comes out of it stay for the backward; the output is the third.
    assert forward == (0, 2 * LARGE + SMALL, 2 * LARGE + SMALL)
    # GELU's backward has its two tensors, its output's gradient and its input's; then only its output (X of the second
    # product), its input's gradient (dY of the first), the stage's output and the gradient of its input.
    assert i == (2 * LARGE + SMALL, 4 * LARGE + SMALL + START, 2 * LARGE + 2 * SMALL)
    # Held: GELU's output and its input's gradient. The last layer's gradients come first; then GELU's output goes.
    bias, grads = 256 * 4, 2 * SMALL + (1024 + 256) * 4
    assert w == (2 * LARGE, 2 * LARGE + SMALL + bias, grads)
    assert (forward_again, i_again) == tuple(tuple(grads + level for level in phase) for phase in (forward, i))
    # Now products are added to the gradients that are there, each whole, as in an ordinary backward; or only a bias is
    # summed apart.
    assert w_again == (grads + 2 * LARGE, grads + 2 * LARGE + (bias if fused else SMALL), grads)


@pytest.mark.parametrize("choice", ["keep", "recompute"])
def test_checkpointed_microbatches_in_flight_are_each_kept_or_each_packed(choice):
    stage = STAGES["mlp"](blocks=1, checkpointed=True)
    # Packed: without GELU's output, which the region's input stands for.
    each = LARGE + SMALL + (LARGE if choice == "keep" else torch.get_rng_state().nbytes)
    xs, grad = [torch.randn(stage.shape) for _ in range(3)], torch.randn(stage.shape)
    with zbpipe.policy(checkpoint=choice), memory.record() as rec:
        groups = []
        for count, x in enumerate(xs, start=1):
            groups.append(input_pass(stage, x, grad))
            assert rec.live == count * each
        for left in (2, 1, 0):
            zbpipe.stage_backward_weight(stage.parameters(), groups.pop(0))
            assert rec.live - grads_of(stage) == left * each


@every_stage
def test_a_step_holds_the_floor_and_takes_no_more_than_it_must(kind, checkpointed):
    """W adds weight by weight: beyond what is held and the gradients, what computing the largest one takes."""
    stage, x, grad = make(kind, checkpointed)
    reference = reference_of(kind, checkpointed)
    largest = max(p.nbytes for p in stage.parameters())
    for again in (False, True):
        stage.computed = 0
        with memory.record() as rec:
            groups = input_pass(stage, x, grad)
            assert rec.live == reference.floor, "again" if again else "first"
            assert 0 <= memory.held(groups, stage).bytes - reference.floor <= bytes_of((x, grad))
            zbpipe.stage_backward_weight(stage.parameters(), groups)
        new = 0 if again else grads_of(stage)
        i, w = rec.phases
        assert i.peak <= reference.keeping + START
        assert w.peak <= reference.floor + new + max(largest, reference.kernel), "again" if again else "first"
        assert w.live_end == rec.live == new, "W gives all back"
        assert stage.computed == (1 + checkpointed) * len(stage.blocks), "each block once more, in I"


@pytest.mark.parametrize("kind", STAGES)
def test_group_by_group_gives_back_step_by_step(kind):
    stage, x, grad = make(kind, checkpointed=False)
    with memory.record() as rec:
        groups = input_pass(stage, x, grad)
        while groups:
            before = rec.live - grads_of(stage), memory.held(groups).bytes
            zbpipe.stage_backward_weight(stage.parameters(), [groups.pop()])
            gone, left = before[0] - rec.live + grads_of(stage), before[1] - memory.held(groups).bytes
            assert 0 <= left - gone <= min(left, bytes_of((x, grad))), "but for what the caller holds"
        assert rec.live == grads_of(stage)


def test_the_detector_sees_a_storage_that_stays():
    """A planted fault: groups of which somebody keeps one gradient."""
    stage, x, grad = make("mlp", checkpointed=False)
    with memory.record() as rec:
        _groups = input_pass(stage, x, grad)
        kept = grad.clone()
        assert rec.live == reference_of("mlp", checkpointed=False).floor + kept.nbytes


class Big(torch.autograd.Function):
    """Its node has memory of its own, which goes with the graph."""

    @staticmethod
    def forward(ctx, x):
        ctx.big = torch.empty(1 << 20)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad


def of_a_view(of, x, w, v):
    """A product with a view of what `of` computes of the input, through which nothing flows, and one with the input."""
    base = of(x)
    with torch.no_grad():
        view = base[:, :8]
    return (x @ w).sum() + torch.mm(view, v * 2.0).sum()


@pytest.mark.parametrize(("of", "matrices"), [(Big.apply, 2), (lambda x: x, 1)], ids=["computed", "the input"])
def test_a_view_made_without_grad_mode_holds_no_more_than_its_memory(of, matrices):
    weights = [nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.randn(8, 4))]
    plain = copy.deepcopy(weights)
    with memory.record() as rec:
        held = []
        for _ in range(2):
            x = torch.randn(64, 16, requires_grad=True)
            y = x.detach().clone().requires_grad_()
            of_a_view(of, y, *plain).backward()
            out = of_a_view(of, x, *weights)
            (dinput,), groups = zbpipe.stage_backward_input([out], None, [x], weights)
            assert torch.equal(dinput, y.grad)
            del out, dinput, x, y
            held.append(groups)
        # Of the first product X and a dY of one number; of the second the view's memory, and v times two.
        microbatch = matrices * 64 * 16 * 4 + 4 * START + 8 * 4 * 4
        assert rec.live - sum(w.grad.nbytes for w in plain) <= 2 * microbatch
        for groups in held:
            zbpipe.stage_backward_weight(weights, groups)
    for w, p in zip(weights, plain, strict=True):
        torch.testing.assert_close(w.grad, p.grad, rtol=0, atol=0)
