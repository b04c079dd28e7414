"""Parameter groups: their weights, subsets and order, spent groups, retain_graph."""

import gc
import re

import pytest
import torch
from support.functions import Ignoring, Planned, raising
from support.oracle import Stage, close, fresh, input_pass, needs_zbpipe, net, small, weights_of, wrong_on_torch, zb
from support.processes import in_own_process
from torch import nn

pytestmark = pytest.mark.drops_groups

f64 = torch.float64


def layers():
    return net(nn.Linear(4, 8, dtype=f64), nn.Tanh(), nn.Linear(8, 4, dtype=f64))


def run_input(m):
    x = fresh()
    _, groups = input_pass(m, x)
    return groups, list(torch.autograd.grad(m(x).sum(), list(m.parameters()), allow_unused=True))


def grads_of(m):
    return [w.grad for w in m.parameters()]


def weight_pass(m, groups, **options):
    return zb.stage_backward_weight(m.parameters(), groups, **options)


def test_one_group_per_layer():
    groups, _ = run_input(layers())
    assert type(groups) is list
    assert [len(weights_of(g)) for g in groups] == [2, 2]


@wrong_on_torch("a later weight does not join groups, depending on the order of a set", always=False)
def test_bridged_layers_are_one_group():
    m = Stage(lambda m, x: x @ m.a + x.sin() @ m.b + x.cos() @ (m.a @ m.b), a=(4, 4), b=(4, 4))
    (group,), _ = run_input(m)
    assert len(weights_of(group)) == 2
    assert "3 split nodes" in repr(group)


def test_no_weight_in_the_graph_gives_no_group():
    groups, _ = run_input(Stage(lambda m, x: x.sin(), a=(4, 4)))
    assert groups == []
    assert type(zb.stage_backward_weight([], groups)) is tuple


@needs_zbpipe
def test_a_group_says_what_it_is_and_that_it_is_spent():
    m = layers()
    groups, _ = run_input(m)
    assert not hasattr(groups[0], "__dict__")
    assert all(type(group.weights) is tuple for group in groups)
    assert {id(weight) for group in groups for weight in group.weights} == {id(weight) for weight in m.parameters()}
    for said in (r"\b2 param", r"\b1 split node", r"\d+(\.\d+)? ?(B|KB|kB|KiB|MB|bytes)"):
        assert re.search(said, repr(groups[0])), repr(groups[0])
    weight_pass(m, groups)
    assert all(group.weights == () and "spent" in repr(group) for group in groups)


def in_two_calls(m, groups):
    weight_pass(m, groups[1:])
    assert sorted(grad is not None for grad in grads_of(m)) == [False, False, True, True]
    weight_pass(m, groups[:1])


def none_first(m, groups):
    assert weight_pass(m, []) == (None,) * 4
    weight_pass(m, groups)


def as_a_tuple(m, groups):
    zb.stage_backward_weight(list(m.parameters()), tuple(groups))


def each_with_its_own_weights(m, groups):
    for group in groups:
        zb.stage_backward_weight(weights_of(group), [group])


def for_all_weights(m, groups):
    assert type(zb.stage_backward_weight(None, groups)) is tuple


def one_listed_twice(m, groups):
    try:
        weight_pass(m, [*groups, groups[0]])
    except (RuntimeError, ValueError):
        weight_pass(m, groups)


def and_again(m, groups):
    weight_pass(m, groups)
    for again in (groups, groups[:1], groups[1:]):
        with pytest.raises(RuntimeError, match="already"):
            weight_pass(m, again)


def with_one_that_is_spent(m, groups):
    """Refused before anything is touched."""
    weight_pass(m, groups[:1])
    before = [grad is None for grad in grads_of(m)]
    with pytest.raises(RuntimeError, match="already"):
        weight_pass(m, [groups[1], groups[0]])
    assert before == [grad is None for grad in grads_of(m)]
    weight_pass(m, groups[1:])


WAYS = [in_two_calls, none_first, as_a_tuple, each_with_its_own_weights]
OURS = [for_all_weights, one_listed_twice, and_again, with_one_that_is_spent]


@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=needs_zbpipe) for way in OURS)])
def test_weight_pass(way):
    m = layers()
    groups, expected = run_input(m)
    way(m, groups)
    torch.testing.assert_close(grads_of(m), expected)


RETAINED = {
    "product": lambda m, x: x @ m.a,
    "layers": lambda m, x: (x @ m.a).tanh() @ m.b + m.s,
    "deferred": lambda m, x: x * m.s,
    "whole": lambda m, x: Ignoring.apply(x, m.a, m),
    "weights' own computation": lambda m, x: x @ (m.a @ m.a.sin()),
    "behind a view": lambda m, x: x * m.t.view(1, 4),  # whose memory the next W reads
    "convolution of a computed weight": lambda m, x: nn.functional.conv1d(x[:, None], (m.a * 2)[:, None, :3]),
}


@wrong_on_torch("the first W deletes the group's keys")
@pytest.mark.parametrize("what", RETAINED)
def test_retain_graph_keeps_the_groups(what):
    m = small(RETAINED[what])
    groups, expected = run_input(m)
    for times in (1, 2):
        weight_pass(m, groups, retain_graph=True)
        close(grads_of(m), [grad if grad is None else grad * times for grad in expected], "gradients")
    weight_pass(m, groups)
    close(grads_of(m), [grad if grad is None else grad * 3 for grad in expected], "gradients")


@needs_zbpipe
def test_groups_outlive_the_list_the_weights_and_the_outputs():
    m = layers()
    groups, _ = run_input(m)
    last = groups[-1]
    del groups, m
    gc.collect()
    zb.stage_backward_weight(None, [last])


@needs_zbpipe
def test_hook_that_clears_the_callers_lists_during_the_weight_pass():
    """And has their memory used again, which ends in a crash where a group was still in use."""
    in_own_process("""
        from torch import nn

        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        expected = [torch.zeros_like(w) for w in net.parameters()]
        lists, kept = [], []

        def hook(_):
            for mine in lists:
                mine.clear()
            kept.append([bytearray(16 * n) for n in range(64)])

        for _ in range(20):
            x = torch.randn(3, 4, requires_grad=True)
            weights = list(net.parameters())
            for total, grad in zip(expected, torch.autograd.grad(net(x).sum(), weights)):
                total += grad
            out = net(x)
            groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], weights)[1]
            del out
            lists[:] = [groups, weights]
            handles = [w.register_hook(hook) for w in weights]
            zb.stage_backward_weight(weights, groups)
            assert groups == weights == []
            for handle in handles:
                handle.remove()
        torch.testing.assert_close([w.grad for w in net.parameters()], expected)
    """)


@needs_zbpipe
def test_group_asked_by_a_hook_during_its_own_weight_pass():
    m = layers()
    groups, expected = run_input(m)
    answers = []

    def hook(_):
        for group in groups:
            answers.append(repr(group))
            assert group.bytes_held >= 0
            with pytest.raises(RuntimeError, match="while its weight pass runs"):
                _ = group.weights

    m.net[0].weight.register_hook(hook)
    weight_pass(m, groups)
    assert len(answers) == 2
    assert all("running" in answer for answer in answers), answers
    torch.testing.assert_close(grads_of(m), expected)


@needs_zbpipe
def test_group_asked_by_a_destructor_during_its_own_weight_pass():
    """Of an object that a tensor carries which the weight pass lets go of."""
    in_own_process("""
        class Last:
            def __del__(self):
                freed.append(1)
                try:
                    ask(groups)
                except RuntimeError:
                    pass

        for ask in (
            lambda groups: repr(groups),
            lambda groups: groups[0].bytes_held,
            lambda groups: groups[0].weights,
            lambda groups: groups.clear(),
        ):
            freed = []
            w = torch.randn(3, 3, requires_grad=True)
            x = torch.randn(2, 3, requires_grad=True)
            h = x
            for _ in range(3):
                data = torch.randn(2, 3)
                data.mark = Last()
                h = torch.addmm(torch.tanh(h), data, w)
                del data
            w.register_hook(lambda grad: None)
            groups = zb.stage_backward_input([h], [torch.ones(2, 3)], [x], [w])[1]
            del h
            zb.stage_backward_weight([w], groups)
            assert len(freed) == 3, freed
            assert w.grad is not None
    """)


def two_branches(m, x):
    """A convolution, or a norm, whose output somebody keeps."""
    kept = m.layer(x * 2.0)
    return kept, kept.relu().sum()


LAYERS = {
    "convolution": (lambda: nn.Conv2d(3, 4, 3), "matrices", (2, 3, 6, 6)),
    "norm": (lambda: nn.LayerNorm(6), "all", (2, 6)),
    "product": (lambda: nn.Linear(6, 4), "matrices", (2, 6)),
    "whole": (lambda: nn.LayerNorm(6), "nothing", (2, 6)),
}


@needs_zbpipe
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("end", ["weight pass", "retried", "retained first", "dropped"])
def test_what_a_node_has_saved_goes_with_its_weight_pass_whoever_keeps_its_output(layer, end):
    make, defer, shape = LAYERS[layer]
    m = Stage(two_branches, layer=make())
    x = torch.randn(shape, requires_grad=True)
    kept, out = m(x)
    node = kept.grad_fn
    names = [name for name in dir(node) if name.startswith("_raw_saved_")]
    assert names
    expected = torch.autograd.grad(m(x)[1], list(m.parameters()))
    m.layer.weight.register_hook(raising() if end == "retried" else lambda grad: None)
    with zb.policy(defer=defer):
        _, groups = zb.stage_backward_input([out], None, [x], m.parameters())
        if end == "retained first":
            weight_pass(m, groups, retain_graph=True)
            m.zero_grad()
        if end == "retried":
            with pytest.raises(Planned):
                weight_pass(m, groups)
        if end != "dropped":
            weight_pass(m, groups)
            torch.testing.assert_close([w.grad for w in m.parameters()], list(expected))
    del groups
    for name in names:
        if isinstance(getattr(node, name), tuple):
            continue
        with pytest.raises(RuntimeError, match="after they have already been freed"):
            getattr(node, name.replace("_raw", ""))


@needs_zbpipe
def test_graph_of_a_failed_input_pass_keeps_what_its_nodes_have_saved():
    """The groups that it has made go, the nodes that have not run are the user's."""
    conv = nn.Conv2d(3, 4, 3)
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    h = conv(x)
    h.register_hook(raising())
    out = h.relu().sum()
    with pytest.raises(RuntimeError, match="Failed to run stage backward input"):
        zb.stage_backward_input([out], None, [x], conv.parameters())
    h.sum().backward()
    torch.testing.assert_close(conv.bias.grad, torch.full((4,), 2.0 * 16))


@needs_zbpipe
def test_groups_of_symbolic_sizes_can_be_asked_about():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    x = mode.from_tensor(torch.randn(6, 8))
    with mode:
        x.requires_grad_()
        weights = [nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(1, 3, 3))]
        out = nn.functional.conv1d((x @ weights[0])[:, None], weights[1][:, :1]).sum()
        _, groups = zb.stage_backward_input([out], None, [x], weights)
        for group in groups:
            assert not group.spent
            assert len(group.weights) == 1
            assert "1 parameter" in repr(group)
            assert group.bytes_held >= 0
            assert group._reads_weights in (True, False)
            assert all(size >= 0 for *_, tensors in group._described[2] for _, _, size, *_ in tensors)
