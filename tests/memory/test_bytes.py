"""Forward, I and W of one small stage, every byte by hand. Of other stages, and checkpointed ones: test_floor.py.

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

    def __init__(self, net, forward=None):
        self.net, self.forward_of = net, forward or net
        self.x = torch.randn(1024, 256, requires_grad=True)
        self.grad = torch.randn(1024, 256)

    def input_pass(self, rec):
        with rec.phase("forward"):
            y = self.forward_of(self.x)
        _, self.groups = zbpipe.stage_backward_input([y], [self.grad], [self.x], self.net.parameters())
        self.x.grad = None

    def weight_pass(self):
        zbpipe.stage_backward_weight(self.net.parameters(), self.groups)
        del self.groups


def steps(net, **policy):
    """Of each phase of two the live bytes at its beginning, the peak, and at its end."""
    m = Microbatch(net)
    with zbpipe.policy(**policy), memory.record() as rec:
        for _ in range(2):
            m.input_pass(rec)
            m.weight_pass()
    return [(p.live_begin, p.peak, p.live_end) for p in rec.phases]


def test_without_checkpointing(net):
    forward, i, w, forward_again, i_again, w_again = steps(net)
    # What goes into GELU and what comes out of it stay for the backward; the output is the third.
    assert forward == (0, 2 * LARGE + SMALL, 2 * LARGE + SMALL)
    # GELU's backward has its two tensors, its output's gradient and its input's; then only its output (X of the second
    # product), its input's gradient (dY of the first), the stage's output and the gradient of its input.
    assert i == (2 * LARGE + SMALL, 4 * LARGE + SMALL + START, 2 * LARGE + 2 * SMALL)
    # Held: GELU's output and its input's gradient. The last layer's gradients come first; then GELU's output goes.
    assert w == (2 * LARGE, 2 * LARGE + WEIGHT + BIASES[1], GRADS)
    assert (forward_again, i_again) == tuple(tuple(GRADS + level for level in phase) for phase in (forward, i))
    # Now products are added to the gradients that are there, each whole, as in an ordinary backward.
    assert w_again == (GRADS + 2 * LARGE, GRADS + 2 * LARGE + WEIGHT, GRADS)


def test_fused_accumulation_has_no_temporary(net):
    *_, w = steps(net, fused=True)
    assert w == (GRADS + 2 * LARGE, GRADS + 2 * LARGE + BIASES[1], GRADS), "only a bias is summed apart"


@pytest.mark.parametrize("choice", ["keep", "recompute"])
def test_checkpointed_microbatches_in_flight_are_each_kept_or_each_packed(net, choice):
    # Packed: without GELU's output, which the region's input stands for.
    each = 2 * LARGE if choice == "keep" else LARGE + torch.get_rng_state().nbytes
    in_flight = [Microbatch(net, lambda x: checkpoint(net, x, use_reentrant=False)) for _ in range(3)]
    with zbpipe.policy(checkpoint=choice), memory.record() as rec:
        for count, m in enumerate(in_flight, start=1):
            m.input_pass(rec)
            assert rec.live == count * each
        for left, m in zip((2, 1, 0), in_flight, strict=True):
            m.weight_pass()
            assert rec.live - GRADS == left * each
