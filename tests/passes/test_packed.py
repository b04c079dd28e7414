"""What hooks have packed is unpacked as in an ordinary backward: once, and for the node that reads it."""

import contextlib
import functools
import logging

import pytest
import torch
from support.functions import Handing
from support.oracle import Stage, check, interleaved, late, needs_zbpipe, wrong_on_torch, zb
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._composable import checkpoint as composable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

f64 = torch.float64
# With recompute, what W reads is unpacked once more.
ONCE = ["default", pytest.param("input_pass", marks=needs_zbpipe)]
in_flight = functools.partial(check, orders=(late, interleaved))


def network():
    return nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(4, 4, dtype=f64), nn.LayerNorm(4, dtype=f64), nn.Tanh()))
    )


# Hooks that give a tensor back once.


def forgotten_when_unpacked(m, x):
    """By number, as trackers of offloaded activations do."""
    tracker = {}

    def pack(tensor):
        tracker[len(tracker)] = tensor.detach()
        return len(tracker) - 1

    with saved_tensors_hooks(pack, lambda number: tracker.pop(number)):
        return m.net(x)


def computed_again_and_given_by_index(m, x):
    """As a checkpoint of one's own does, which hands out what it has computed again."""
    again, count = [], []

    def keep(tensor):
        again.append(tensor.detach())
        return tensor

    def pack(tensor):
        count.append(1)
        return len(count) - 1

    def unpack(index):
        if not again:
            with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
                m.net(x)
        tensor, again[index] = again[index], None
        return tensor

    with saved_tensors_hooks(pack, unpack):
        return m.net(x)


@wrong_on_torch("each group unpacks")
@pytest.mark.parametrize("choice", ONCE)
@pytest.mark.parametrize("forward", [forgotten_when_unpacked, computed_again_and_given_by_index])
def test_tensors_that_hooks_give_back_once(forward, choice):
    with policy(choice):
        in_flight(Stage(forward, net=network()), (3, 4))


def policy(choice):
    return contextlib.nullcontext() if choice == "default" else zb.policy(checkpoint=choice)


# Hooks that load what they have offloaded into two buffers of its shape, in turn.


def written_to(buffer, tensor):
    buffer.copy_(tensor)


def written_past_the_version_counter(buffer, tensor):
    buffer.data.copy_(tensor)


GIVEN = {
    "a detached one": lambda buffer: buffer.detach(),
    "a view": lambda buffer: buffer.view_as(buffer),
    "its data": lambda buffer: buffer.data,
    "the very tensor": lambda buffer: buffer,
}


def with_buffers(write, given, run=lambda net, x: net(x)):
    def forward(m, x):
        def pack(tensor):
            of_weight = any(tensor is w or tensor._base is w for w in m.parameters())
            return tensor if of_weight else ("host", tensor.detach().clone())

        def unpack(packed):
            if isinstance(packed, torch.Tensor):
                return packed
            pair = m.buffers_of.setdefault(packed[1].shape, [torch.empty_like(packed[1]) for _ in range(2)])
            pair.reverse()
            write(pair[0], packed[1])
            return GIVEN[given](pair[0])

        with saved_tensors_hooks(pack, unpack):
            return run(m.net, x)

    m = Stage(forward, net=network())
    m.buffers_of = {}
    return m


writes = pytest.mark.parametrize("write", [written_to, written_past_the_version_counter])


@needs_zbpipe
@pytest.mark.parametrize("choice", ["default", "recompute", "input_pass"])
@pytest.mark.parametrize("given", GIVEN)
@writes
def test_buffers_that_are_filled_anew_before_the_weight_pass(write, given, choice):
    m = with_buffers(write, given)
    with policy(choice):
        check(m, (3, 4))
        with zb.policy(defer="all"):
            check(m, (3, 4))


@needs_zbpipe
@pytest.mark.parametrize("given", GIVEN)
@writes
@pytest.mark.parametrize("is_compiled", [False, True])
def test_buffers_of_work_that_is_handed_over(is_compiled, write, given):
    def handing(net, x):
        return Handing.apply(Handing.apply(x, net[0].weight.mT).sin(), net[3].weight.mT)

    compiled = zb.compile(lambda net, x: net(x), backend="aot_eager", dynamic=False)
    check(with_buffers(write, given, compiled if is_compiled else handing), (3, 4))


# Regions that are computed again within a context that can be entered once.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.load = nn.Linear(4, 12, dtype=f64), nn.Linear(4, 4, dtype=f64), 0

    def forward(self, x):
        self.load += 1
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0])


@contextlib.contextmanager
def keeping_the_load(block):
    before = block.load
    yield
    block.load = before


def computed_again_in(context):
    return lambda block: {"context_fn": lambda: (contextlib.nullcontext(), context(block))}


def math_kernel():
    return sdpa_kernel([SDPBackend.MATH])


SINGLE_USE = {
    "contextmanager": computed_again_in(keeping_the_load),
    "sdpa_kernel": lambda block: {"context_fn": lambda: (math_kernel(), math_kernel())},
    "fork_rng": computed_again_in(lambda block: torch.random.fork_rng()),
    "debug": lambda block: {"debug": True},
}


def blocks(m, x):
    for block in m.net:
        x = checkpoint(block, x, use_reentrant=False, **SINGLE_USE[m.way](block)) if m.way else block(x)
    return x


def two_blocks(way=None):
    m = Stage(blocks, net=nn.Sequential(Block(), Block()))
    m.way = way
    return m


@wrong_on_torch("each group computes the region again")
@pytest.mark.parametrize("choice", ONCE)
@pytest.mark.parametrize("way", SINGLE_USE)
def test_contexts_that_can_be_entered_once(way, choice, monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest cannot format what debug=True logs
    with policy(choice):
        in_flight(two_blocks(way), (3, 4))


@wrong_on_torch("each group computes the region again")
@pytest.mark.parametrize("choice", ONCE)
def test_composable_checkpoint(choice):
    with policy(choice):
        in_flight(two_blocks(), (3, 4), setup=lambda m: [composable(block) for block in m.net])


# What a region counts as it runs.


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 2, bias=False, dtype=f64)
        self.experts = nn.ModuleList(nn.Linear(4, 4, dtype=f64) for _ in range(2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        weight, index = self.router(x).softmax(-1).max(-1)
        self.count += len(index)
        y = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            (token,) = torch.where(index == k)
            y = y.index_add(0, token, expert(x[token]) * weight[token, None])
        return x + y


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 4, dtype=f64), nn.BatchNorm1d(4, dtype=f64), nn.GELU(), nn.Linear(4, 4, dtype=f64)
        )

    @property
    def count(self):
        return self.net[1].num_batches_tracked

    def forward(self, x):
        return x + self.net(x)


@needs_zbpipe
@pytest.mark.parametrize(("choice", "times"), [("default", 2), ("input_pass", 2), ("recompute", 3)])
@pytest.mark.parametrize("kind", [Experts, Normed])
def test_what_a_region_counts_is_counted_as_often_as_it_is_computed(kind, choice, times):
    once, m = kind(), kind()
    inputs = [torch.randn(6, 4, dtype=f64, requires_grad=True) for _ in range(4)]
    for x in inputs:
        once(x)
    outs, groups = [checkpoint(m, x, use_reentrant=False) for x in inputs], []
    with policy(choice):
        for x, out in zip(inputs, outs, strict=True):
            groups.append(zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())[1])
        for of_microbatch in groups:
            zb.stage_backward_weight(m.parameters(), of_microbatch)
    assert m.count == times * once.count
