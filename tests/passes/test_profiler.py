"""The passes and each group are ranges in torch's profiler, and what they compute lies in them."""

import pytest
import torch
from support.functions import Handing, Planned, raising
from support.oracle import Stage, input_pass, needs_zbpipe
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zbpipe

pytestmark = needs_zbpipe


def layers():
    return Stage(lambda m, x: m.down(m.up(x).tanh()), up=nn.Linear(8, 16), down=nn.Linear(16, 8))


def profiled_passes(net):
    """The events of one I and one W."""
    x = torch.randn(4, 8, requires_grad=True)
    out = net(x)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], net.parameters())
        zbpipe.stage_backward_weight(net.parameters(), groups)
    return prof.events()


def ranges(events, name):
    return [event.time_range for event in events if event.name == name]


def inside(inner, outer):
    return outer.start <= inner.start and inner.end <= outer.end


@pytest.mark.parametrize("hooked", [False, True])
def test_products_of_the_weights_lie_in_their_groups_and_these_in_the_weight_pass(hooked):
    net = layers()
    if hooked:
        for w in net.parameters():
            w.register_hook(lambda grad: None)
    events = profiled_passes(net)
    (i,), (w,) = ranges(events, "zbpipe::input_pass"), ranges(events, "zbpipe::weight_pass")
    assert i.end <= w.start
    groups = ranges(events, "zbpipe::group")
    assert len({group.start for group in groups}) == len(groups) >= 2
    assert all(inside(group, w) for group in groups)
    products = ranges(events, "aten::mm")
    in_w = [product for product in products if inside(product, w)]
    assert len(in_w) == 2
    assert all(sum(inside(product, group) for group in groups) == 1 for product in in_w)
    assert len([product for product in products if inside(product, i)]) == 2


def test_work_that_was_handed_over_is_a_range_of_its_own():
    events = profiled_passes(Stage(lambda m, x: Handing.apply(x, m.w), w=nn.Parameter(torch.randn(8, 8))))
    (w,), (work,) = ranges(events, "zbpipe::weight_pass"), ranges(events, "zbpipe::work")
    assert inside(work, w)
    assert sum(inside(product, work) for product in ranges(events, "aten::mm")) == 1


def test_ranges_end_when_a_pass_raises():
    net = layers()
    net.up.weight.register_hook(raising())
    x = torch.randn(4, 8, requires_grad=True)
    _, groups = input_pass(net, x)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        with pytest.raises(Planned):
            zbpipe.stage_backward_weight(net.parameters(), groups)
        zbpipe.stage_backward_weight(net.parameters(), groups)
        torch.ones(2) + 1
    events = prof.events()
    first, second = sorted(ranges(events, "zbpipe::weight_pass"), key=lambda r: r.start)
    assert first.end <= second.start
    (after,) = ranges(events, "aten::add")
    assert after.start >= second.end
