"""Activation checkpointing: each block is computed again once a microbatch, in I."""

import functools

import pytest
import torch
from oracle import Stage, at_once, check, interleaved, late, wrong_on_torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

f64 = torch.float64
recomputes_again = wrong_on_torch("each group computes the block again in W")


def block(m, x, a, b):
    m.records.setdefault(("block", m.microbatch), []).append(1)
    return (x @ a).sin() @ b + x


def blocks(use_reentrant):
    def forward(m, x):
        x = checkpoint(block, m, x, m.a, m.b, use_reentrant=use_reentrant)
        x = checkpoint(block, m, x, m.c, m.d, use_reentrant=use_reentrant)
        return x * 2.0

    return Stage(forward, a=(4, 8), b=(8, 4), c=(4, 8), d=(8, 4))


@recomputes_again
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


@recomputes_again
def test_whole_stage_with_hooks_inside():
    def inside(m, x):
        h = m.net[0](x)
        h.register_hook(m.log("h"))
        return m.net[1](h.relu())

    net = nn.Sequential(nn.Linear(4, 8, dtype=f64), nn.Linear(8, 4, dtype=f64))
    check(Stage(lambda m, x: checkpoint(inside, m, x, use_reentrant=False).sin(), net=net), (3, 4))


@recomputes_again
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
@recomputes_again
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


@recomputes_again
def test_dropout_inside_a_block_keeps_its_mask():
    def inside(m, x):
        m.records.setdefault(("block", m.microbatch), []).append(1)
        return nn.functional.dropout(x @ m.a, 0.5) @ m.b

    check(Stage(lambda m, x: checkpoint(inside, m, x, use_reentrant=False), a=(4, 8), b=(8, 4)), (3, 4))


@recomputes_again
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
