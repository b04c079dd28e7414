"""What is done again and again leaves nothing behind: no object of Python's, no tensor, no block of its memory."""

import contextlib
import gc
import sys

import pytest
import torch
from support.functions import Asks, hand_over
from support.oracle import input_pass, needs_zbpipe, small

import zbpipe

pytestmark = [
    pytest.mark.drops_groups,
    needs_zbpipe,
    pytest.mark.usefixtures("quick_collections"),
    pytest.mark.skipif(sys.getallocatedblocks() < 1000, reason="make asan has malloc count"),
]

LOOKS, RUNS = 20, 30


def stage():
    return small(lambda m, x: Asks.apply((x @ m.a).sin(), m.b, m.s, hand_over) + m.t)


def both_passes(m, x):
    _, groups = input_pass(m, x)
    assert [(repr(group), group.bytes_held, group.weights) for group in groups]
    zbpipe.stage_backward_weight(m.parameters(), groups, retain_graph=True)
    zbpipe.stage_backward_weight(m.parameters(), groups)


def dropped(m, x):
    input_pass(m, x)


def whole(m, x):
    out = m(x)
    zbpipe.stage_backward(out, torch.ones_like(out), [x])


def input_pass_that_fails(m, x):
    x.register_hook(lambda grad: 1 / 0)
    with contextlib.suppress(RuntimeError):
        input_pass(m, x)


def weight_pass_that_fails_once(m, x):
    handle = m.a.register_hook(lambda grad: 1 / 0)
    _, groups = input_pass(m, x)
    with contextlib.suppress(ZeroDivisionError):
        zbpipe.stage_backward_weight(m.parameters(), groups)
    handle.remove()
    zbpipe.stage_backward_weight(m.parameters(), groups)


def work_that_fails(m, x):
    def ask(x, w, grad):
        return zbpipe.defer(lambda x, grad: 1 / 0, (1, 2), (x, grad))

    out = Asks.apply(x, m.a, m.s, ask)
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    with pytest.raises(ZeroDivisionError):
        zbpipe.stage_backward_weight(None, groups)


def refused(m, x):
    out = m(x)
    for arguments in (([out], [torch.ones(2)], [x], None), ([out], None, [x], [3]), (3, None, [x], None)):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            zbpipe.stage_backward_input(*arguments)
    for arguments in ((m.parameters(), [3]), (None, 3)):
        with pytest.raises(TypeError):
            zbpipe.stage_backward_weight(*arguments)


WAYS = [both_passes, dropped, whole, input_pass_that_fails, weight_pass_that_fails_once, work_that_fails, refused]
KINDS = ("tensors", "objects", "blocks")
kept = []


def counts():
    gc.collect()
    objects = gc.get_objects()
    return sum(issubclass(type(thing), torch.Tensor) for thing in objects), len(objects), sys.getallocatedblocks()


def grows(way):
    """What each run adds one to, still when caches are full: they fill over hundreds of runs."""
    m, before = stage(), counts()
    for _ in range(LOOKS):
        for _ in range(RUNS):
            way(m, torch.randn(3, 4, dtype=torch.float64, requires_grad=True))
        after = counts()
        growing = [kind for kind, was, now in zip(KINDS, before, after, strict=True) if now - was >= RUNS]
        if not growing:
            break
        before = after
    return growing


@pytest.mark.parametrize("policy", [{}, {"defer": "all", "fused": True}])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_grows(way, policy):
    with zbpipe.policy(**policy):
        assert grows(way) == []


@pytest.mark.parametrize(
    ("make", "found"),
    [(lambda: torch.ones(3), [*KINDS]), (list, ["objects", "blocks"]), (lambda: object(), ["blocks"])],
    ids=["tensor", "list", "object"],
)
def test_what_is_left_is_found(make, found):
    """Two each time: what else the process frees meanwhile does not hide them."""
    kept.clear()
    assert grows(lambda *_: kept.extend((make(), make()))) == found
