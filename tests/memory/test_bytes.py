"""Forward, I and W of one small stage, every byte by hand, with and without checkpointing.

Two linear layers with a GELU between, 1,024 tokens of width 256, hidden width 1,024, float32. SMALL and LARGE are the
bytes of a [1024, 256] and of a [1024, 1024] tensor. The stage's input and its output's gradient are the caller's.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe import memory

SMALL, LARGE = 1024 * 256 * 4, 1024 * 1024 * 4
WEIGHT, BIASES = 1024 * 256 * 4, (1024 * 4, 256 * 4)
GRADS = 2 * WEIGHT + sum(BIASES)
START = 4  # the number from which zbpipe starts the engine


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


class Microbatch:
    """Runs the passes of one microbatch, and drops at once what a pipeline would send away."""

    def __init__(self, net, forward):
        self.net, self.forward_of = net, forward
        self.x = torch.randn(1024, 256, requires_grad=True)
        self.grad = torch.randn(1024, 256)

    def forward(self):
        self.y = self.forward_of(self.x)

    def input_pass(self):
        self.dx, self.groups = zbpipe.stage_backward_input([self.y], [self.grad], [self.x], self.net.parameters())

    def send(self):
        del self.y, self.dx
        self.x.grad = None

    def weight_pass(self):
        zbpipe.stage_backward_weight(self.net.parameters(), self.groups)
        del self.groups


def of(phase):
    return phase.live_begin, phase.peak, phase.live_end


def test_without_checkpointing(net):
    m = Microbatch(net, net)
    with memory.record() as rec:
        with rec.phase("forward"):
            m.forward()
        m.input_pass()
        m.send()
        m.weight_pass()
        m.forward()
        m.input_pass()
        m.send()
        m.weight_pass()
    forward, i, w, i_again, w_again = rec.phases

    # What goes into GELU and what comes out of it stay for the backward; the output is the third.
    assert of(forward) == (0, 2 * LARGE + SMALL, 2 * LARGE + SMALL)
    # GELU's backward has its two tensors, its output's gradient and its input's; then only its output (X of the second
    # product), its input's gradient (dY of the first), the stage's output and the gradient of its input.
    assert of(i) == (2 * LARGE + SMALL, 4 * LARGE + SMALL + START, 2 * LARGE + 2 * SMALL)
    # Held: GELU's output and its input's gradient. The last layer's gradients come first; then GELU's output goes.
    assert of(w) == (2 * LARGE, 2 * LARGE + WEIGHT + BIASES[1], GRADS)
    assert [h.bytes for h in rec.held] == [2 * LARGE, 2 * LARGE]

    assert of(i_again) == tuple(GRADS + level for level in of(i))
    # Now products are added to the gradients that are there, each whole, as in an ordinary backward.
    assert of(w_again) == (GRADS + 2 * LARGE, GRADS + 2 * LARGE + WEIGHT, GRADS)


def test_with_checkpointing(net):
    calls = []

    def run(x):
        calls.append(torch._C._current_graph_task_id() != -1)
        return net(x)

    m = Microbatch(net, lambda x: checkpoint(run, x, use_reentrant=False))
    rng = torch.get_rng_state().nbytes  # the checkpoint keeps one
    with memory.record() as rec:
        with rec.phase("forward"):
            m.forward()
        m.input_pass()
        m.send()
        m.weight_pass()
    forward, i, w = rec.phases
    # GELU's input is gone before the output comes.
    assert of(forward) == (0, 2 * LARGE + rng, SMALL + rng)
    assert calls == [False, True], "computed again once, in I"
    # As without a checkpoint, and its random state.
    assert of(i) == (SMALL + rng, 4 * LARGE + SMALL + START + rng, 2 * LARGE + 2 * SMALL)
    assert of(w) == (2 * LARGE, 2 * LARGE + WEIGHT + BIASES[1], GRADS)
    assert [h.bytes for h in rec.held] == [2 * LARGE]


def test_checkpointed_microbatches_in_flight_are_each_kept_or_each_packed(net):
    rng = torch.get_rng_state().nbytes
    kept, packed = 2 * LARGE, LARGE + rng  # packed: without GELU's output, which the region's input stands for

    def input_pass(m):
        m.forward()
        m.input_pass()
        m.send()
        return rec.live

    for choice, each in (("keep", kept), ("recompute", packed)):
        in_flight = [Microbatch(net, lambda x: checkpoint(net, x, use_reentrant=False)) for _ in range(3)]
        net.zero_grad(set_to_none=True)
        with zbpipe.policy(checkpoint=choice), memory.record() as rec:
            assert [input_pass(m) for m in in_flight] == [each, 2 * each, 3 * each]
            for left in (2, 1, 0):
                in_flight[2 - left].weight_pass()
                assert rec.live - GRADS == left * each


def test_groups_one_by_one(net):
    m = Microbatch(net, net)
    with memory.record() as rec:
        m.forward()
        m.input_pass()
        m.send()
        levels = [rec.live]
        for group in m.groups:
            zbpipe.stage_backward_weight(net.parameters(), [group])
            levels.append(rec.live)
    assert levels[0] == 2 * LARGE
    assert levels[1] in (LARGE + WEIGHT + BIASES[0], LARGE + WEIGHT + BIASES[1])
    assert levels[2:] == [GRADS]


def test_groups_that_are_dropped_without_w(net):
    m = Microbatch(net, net)
    with memory.record() as rec:
        m.forward()
        m.input_pass()
        m.send()
        assert rec.live == 2 * LARGE
        m.groups.clear()
        assert rec.live == 0


def test_fused_accumulation_has_no_temporary(net):
    m = Microbatch(net, net)
    with zbpipe.policy(fused=True), memory.record() as rec:
        for _ in range(2):
            m.forward()
            m.input_pass()
            m.send()
            m.weight_pass()
    w = rec.phases[-1]
    assert of(w) == (GRADS + 2 * LARGE, GRADS + 2 * LARGE + BIASES[1], GRADS), "only a bias is summed apart"
