"""Stage inputs: what they may be, what they get, and that nothing behind them is touched."""

import pytest
import torch
from support.oracle import Stage, check, needs_zbpipe, wrong_on_torch, zb
from torch import nn

f64 = torch.float64


def split(m, outputs, grads, inputs):
    dinputs, groups = zb.stage_backward_input(outputs, grads, inputs, m.parameters())
    zb.stage_backward_weight(m.parameters(), groups)
    return dinputs


def test_several_inputs():
    check(Stage(lambda m, x, y, z: (x @ m.a) * y + z @ m.b, a=(4, 4), b=(4, 4)), (3, 4), (3, 4), (3, 4))


def test_inputs_that_are_not_tensors_get_none():
    check(Stage(lambda m, n, x, s, o: x @ m.a * n, a=(4, 4)), 3, (3, 4), "text", None)


def test_input_that_needs_no_gradient():
    check(Stage(lambda m, x, y: (x @ m.a) * (y @ m.b), a=(4, 4), b=(4, 4)), (3, 4), torch.ones(3, 4, dtype=f64))


def test_integer_input():
    check(Stage(lambda m, x, i: x[i] @ m.a, a=(4, 4)), (3, 4), torch.tensor([0, 2, 2]))


def test_unused_input_gets_none():
    check(Stage(lambda m, x, y: x @ m.a, a=(4, 4)), (3, 4), (3, 4))


@wrong_on_torch("without an input that needs a gradient there are no groups")
def test_no_input_needs_a_gradient():
    check(Stage(lambda m, x: (x @ m.a).sin() @ m.b + m.c, a=(4, 4), b=(4, 4), c=(4,)), torch.ones(3, 4, dtype=f64))


@wrong_on_torch("without an input that needs a gradient there are no groups")
def test_stage_without_inputs():
    check(Stage(lambda m: (m.a @ m.b).sin() * m.c, a=(4, 4), b=(4, 4), c=(4,)))


@wrong_on_torch("no input is in the graph, so there are no groups")
def test_only_unused_inputs_need_gradients():
    check(Stage(lambda m, x, y: (x @ m.a).sin(), a=(4, 4)), torch.ones(3, 4, dtype=f64), (3, 4))


def test_embedding_as_first_stage_with_a_second_float_input():
    check(Stage(lambda m, ids, x: m.table[ids] + x, table=(9, 4)), torch.tensor([1, 1, 8]), (3, 4))


def test_input_used_twice():
    check(Stage(lambda m, x: (x @ m.a) * (x @ m.b) + x, a=(4, 4), b=(4, 4)), (3, 4))


def test_input_used_as_both_sides_of_a_product():
    check(Stage(lambda m, x: (x @ x) @ m.a, a=(4, 4)), (4, 4))


@wrong_on_torch("adds the gradient to itself")
def test_one_input_listed_twice_gets_the_same_gradient_once():
    m = Stage(lambda m, x: x @ m.a, a=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    first, second = split(m, [out], [torch.ones_like(out)], [x, x])
    expected = torch.ones(3, 4, dtype=f64) @ m.a.detach().t()
    torch.testing.assert_close([first, second], [expected, expected])


@wrong_on_torch("adds the gradient to itself")
def test_one_input_listed_twice_has_its_grad_set_once():
    m = Stage(lambda m, x: x @ m.a, a=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    split(m, [out], [torch.ones_like(out)], [x, x])
    torch.testing.assert_close(x.grad, torch.ones(3, 4, dtype=f64) @ m.a.detach().t())


def test_existing_gradient_of_an_input_is_added_to():
    m = Stage(lambda m, x: x @ m.a, a=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    x.grad = torch.full_like(x, 5.0)
    out = m(x)
    (dinput,) = split(m, [out], [torch.ones_like(out)], [x])
    expected = torch.ones(3, 4, dtype=f64) @ m.a.detach().t()
    torch.testing.assert_close(dinput, expected)
    torch.testing.assert_close(x.grad, expected + 5.0)


def test_receive_buffer_used_step_after_step_collects_no_hooks():
    m = Stage(lambda m, x: x @ m.a, a=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    for step in range(3):
        x.grad = None
        out = m(x)
        (dinput,) = split(m, [out], [torch.full_like(out, step + 1.0)], [x])
        torch.testing.assert_close(dinput, (step + 1.0) * torch.ones(3, 4, dtype=f64) @ m.a.detach().t())
        assert not x._backward_hooks


def older_graph():
    """A stage input that is no leaf, and the leaf behind it."""
    leaf = torch.randn(3, 4, dtype=f64, requires_grad=True)
    return leaf, leaf.exp()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_graph_behind_a_non_leaf_input_is_not_walked():
    m = Stage(lambda m, x: (x @ m.a).sin(), a=(4, 4))
    leaf, x = older_graph()
    out = m(x)
    (dinput,) = split(m, [out], [torch.ones_like(out)], [x])
    ref = x.detach().requires_grad_()
    expected, weight = torch.autograd.grad(m(ref).sum(), [ref, m.a])
    torch.testing.assert_close([dinput, x.grad, m.a.grad], [expected, expected, weight])
    assert leaf.grad is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_graph_behind_a_non_leaf_input_still_works_afterwards():
    m = Stage(lambda m, x: (x @ m.a).sin(), a=(4, 4))
    leaf, x = older_graph()
    out = m(x)
    (dinput,) = split(m, [out], [torch.ones_like(out)], [x])
    x.backward(dinput)
    torch.testing.assert_close(leaf.grad, dinput * leaf.detach().exp())


@wrong_on_torch("a weight behind an input gets its gradient from before the input too")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_weight_that_also_made_the_non_leaf_input():
    m = Stage(lambda m, x: (x @ m.a).sin(), a=(4, 4))
    x = torch.randn(3, 4, dtype=f64) @ m.a
    out = m(x)
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    zb.stage_backward_weight(m.parameters(), groups)
    ref = x.detach().requires_grad_()
    expected = torch.autograd.grad(m(ref).sum(), [ref, m.a])
    torch.testing.assert_close([x.grad, m.a.grad], list(expected))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_non_leaf_input_that_is_one_output_of_a_multi_output_node():
    m = Stage(lambda m, x, y: (x @ m.a) * y, a=(2, 2))
    leaf = torch.randn(3, 4, dtype=f64, requires_grad=True)
    x, y = leaf.chunk(2, dim=1)
    out = m(x, y)
    dinputs = split(m, [out], [torch.ones_like(out)], [x, y])
    rx, ry = x.detach().requires_grad_(), y.detach().requires_grad_()
    expected = torch.autograd.grad(m(rx, ry).sum(), [rx, ry, m.a])
    torch.testing.assert_close([*dinputs, m.a.grad], list(expected))
    assert leaf.grad is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_only_one_output_of_a_multi_output_node_is_an_input():
    """The stage reaches the other output by a way that is not an input: no gradient may be taken for the input's."""
    m = Stage(lambda m, x, other: (x @ m.a) * other, a=(2, 2))
    leaf = torch.randn(3, 4, dtype=f64, requires_grad=True)
    x, other = leaf.chunk(2, dim=1)
    out = m(x, other)
    (dinput,) = split(m, [out], [torch.ones_like(out)], [x])
    rx = x.detach().requires_grad_()
    expected = torch.autograd.grad(m(rx, other.detach()).sum(), [rx, m.a])
    torch.testing.assert_close([dinput, m.a.grad], list(expected))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_one_input_computed_from_another():
    m = Stage(lambda m, x, y: (x @ m.a) * (y @ m.b), a=(4, 4), b=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    y = x.sin()
    out = m(x, y)
    dinputs = split(m, [out], [torch.ones_like(out)], [x, y])
    rx, ry = x.detach().requires_grad_(), y.detach().requires_grad_()
    expected = torch.autograd.grad(m(rx, ry).sum(), [rx, ry, m.a, m.b])
    torch.testing.assert_close([dinputs[1], m.a.grad, m.b.grad], list(expected[1:]))


def test_weight_that_is_also_an_input_is_an_input():
    m = Stage(lambda m, x: (x @ m.a).sin(), a=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    dinputs, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x, m.a], [])
    expected = torch.autograd.grad(m(x).sum(), [x, m.a])
    torch.testing.assert_close(list(dinputs), list(expected))
    zb.stage_backward_weight([], groups)
    torch.testing.assert_close(m.a.grad, expected[1])


def test_input_passed_through_as_an_output():
    check(Stage(lambda m, x, y: (x @ m.a, y), a=(4, 4)), (3, 4), (3, 4))


def test_input_as_only_output():
    check(Stage(lambda m, x: x, a=(4, 4)), (3, 4))


@wrong_on_torch("a view made inside the stage cannot be detached in place")
def test_input_passed_through_as_a_view():
    check(Stage(lambda m, x, y: (x @ m.a, y.view(-1)), a=(4, 4)), (3, 4), (3, 4))


def test_dinputs_are_plain_gradients():
    m = Stage(lambda m, x: x @ m.a, a=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    dinputs, _ = zb.stage_backward_input((out,), (torch.ones_like(out),), (x,), m.parameters())
    assert type(dinputs) is tuple
    assert dinputs[0].grad_fn is None and not dinputs[0].requires_grad


def test_inputs_of_stage_backward_are_released():
    m = Stage(lambda m, x, n, y: x @ m.a + y, a=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    y = torch.ones(3, 4, dtype=f64)
    grads = zb.stage_backward(m(x, 7, y), torch.ones(3, 4, dtype=f64), (x, 7, y))
    assert type(grads) is tuple
    torch.testing.assert_close(grads[0], torch.ones(3, 4, dtype=f64) @ m.a.detach().t())
    assert grads[1:] == (None, None)
    assert x.grad is None


@needs_zbpipe
def test_inference_tensor_as_an_input_gets_none():
    with torch.inference_mode():
        x = torch.randn(3, 4, dtype=f64)
    m = Stage(lambda m, x, y: (y @ m.a) + x, a=(4, 4))
    y = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x, y)
    dinputs = split(m, [out], [torch.ones_like(out)], [x, y])
    assert dinputs[0] is None
    torch.testing.assert_close(dinputs[1], torch.ones(3, 4, dtype=f64) @ m.a.detach().t())


@needs_zbpipe
@pytest.mark.parametrize("what", ["outputs", "output gradients", "inputs", "weights"])
def test_hook_that_clears_the_callers_lists_during_the_input_pass(what):
    m = Stage(lambda m, x, y: (x @ m.a).sin() @ m.b * y, a=(4, 4), b=(4, 4))
    for _ in range(2):
        x, y = (torch.randn(3, 4, dtype=f64, requires_grad=True) for _ in range(2))
        expected = torch.autograd.grad(m(x, y).sum(), [x, y, *m.parameters()])
        out = m(x, y)
        lists = {
            "outputs": [out],
            "output gradients": [torch.ones_like(out)],
            "inputs": [x, y],
            "weights": list(m.parameters()),
        }
        out.register_hook(lambda _, lists=lists: lists[what].clear())
        dinputs, groups = zb.stage_backward_input(*lists.values())
        zb.stage_backward_weight(m.parameters(), groups)
        torch.testing.assert_close([*dinputs, *(w.grad for w in m.parameters())], list(expected))
        assert lists[what] == []
        m.zero_grad()


@wrong_on_torch("inputs' gradients share memory with the output gradients")
@pytest.mark.parametrize("change", ["nothing", "dinputs", "inputs' gradients"])
@pytest.mark.parametrize(
    "forward", [lambda m, x, y: y + x @ m.w, lambda m, x, y: y + x @ m.w + m.b], ids=["product", "product and bias"]
)
def test_inputs_of_all_microbatches_are_the_same_tensors(forward, change):
    """What I hands out is the caller's to change: it shares no memory with what W keeps, nor with another input's."""
    m = Stage(forward, w=(4, 4), b=(3, 4))
    x, y = (torch.randn(3, 4, dtype=f64, requires_grad=True) for _ in range(2))
    grads = [torch.randn(3, 4, dtype=f64) for _ in range(2)]
    given = [grad.clone() for grad in grads]
    wanted = [x, y, *m.parameters()]
    expected = torch.autograd.grad(m(x, y), wanted, sum(grads), allow_unused=True)
    groups = []
    for grad in grads:
        out = m(x, y)
        dinputs, each = zb.stage_backward_input([out], [grad], [x, y], m.parameters())
        groups += each
    torch.testing.assert_close([x.grad, y.grad], list(expected[:2]))
    torch.testing.assert_close(grads, given)
    handed_out = {"nothing": [], "dinputs": dinputs, "inputs' gradients": [x.grad, y.grad]}
    for tensor in handed_out[change]:
        tensor.mul_(2.0).zero_()
    zb.stage_backward_weight(m.parameters(), groups)
    for w, grad in zip(m.parameters(), expected[2:], strict=True):
        assert (w.grad is None) == (grad is None)
        if grad is not None:
            torch.testing.assert_close(w.grad, grad)


@wrong_on_torch("inputs' gradients share memory")
@pytest.mark.parametrize("forward", [lambda x, y: (x + y) * 2.0, lambda x, y: x + y], ids=["scaled sum", "sum"])
def test_inputs_that_receive_one_gradient_add_up_by_themselves(forward):
    x, y = (torch.randn(3, 4, dtype=f64, requires_grad=True) for _ in range(2))
    given = [torch.randn(3, 4, dtype=f64) for _ in range(2)]
    grads = [grad.clone() for grad in given]
    for grad in grads:
        zb.stage_backward_input([forward(x, y)], [grad], [x, y], [])
    torch.testing.assert_close(grads, given)
    expected = torch.autograd.grad(forward(x, y), [x, y], sum(given))
    torch.testing.assert_close([x.grad, y.grad], list(expected))


@wrong_on_torch("they do")
def test_dinputs_require_no_gradient_though_the_output_gradient_does():
    m = Stage(lambda m, x, y: y + x @ m.w, w=(4, 4))
    for _ in range(2):
        x, y = (torch.randn(3, 4, dtype=f64, requires_grad=True) for _ in range(2))
        grad = torch.randn(3, 4, dtype=f64, requires_grad=True) * 2.0
        dinputs, groups = zb.stage_backward_input([m(x, y)], [grad], [x, y], m.parameters())
        zb.stage_backward_weight(m.parameters(), groups)
        assert not any(t.requires_grad for t in (*dinputs, x.grad, y.grad, m.w.grad))
        assert grad.requires_grad


@wrong_on_torch("reads the .grad of an input that is no leaf, which warns")
@pytest.mark.parametrize("view", [False, True])
def test_non_leaf_input_returned_as_an_output_keeps_its_own_history(view):
    m = Stage(lambda m, x: x @ m.w, w=(4, 4))
    for _ in range(2):
        older = torch.randn(3, 4, dtype=f64, requires_grad=True)
        x = older.exp().sin()
        x = x.view(3, 4) if view else x
        node = x.grad_fn
        grads = [torch.randn(3, 4, dtype=f64) for _ in range(2)]
        (dinput,), groups = zb.stage_backward_input([x, m(x)], grads, [x], m.parameters())
        zb.stage_backward_weight(m.parameters(), groups)
        assert x.grad_fn is node
        torch.testing.assert_close(dinput, grads[0] + grads[1] @ m.w.detach().t())
        x.backward(dinput)
        torch.testing.assert_close(older.grad, dinput * older.detach().exp().cos() * older.detach().exp())


@pytest.mark.parametrize(
    ("forward", "parts", "shape"),
    [
        (lambda m, x: m.net(x), {"net": nn.Linear(4, 5, dtype=f64)}, (3, 4)),
        (lambda m, x: x.t() @ m.a, {"a": (3, 5)}, (3, 4)),
        (lambda m, x: m.net(x), {"net": nn.Conv1d(2, 3, 2, dtype=f64)}, (2, 2, 5)),
        (lambda m, x: x[:, 1:3] @ m.a, {"a": (2, 4)}, (3, 4)),
        (lambda m, x: m.net(x), {"net": nn.LayerNorm(4, dtype=f64)}, (3, 4)),
    ],
    ids=["linear", "transposed", "convolution", "slice", "layer norm"],
)
def test_strides_of_dinputs_are_those_of_autograd(forward, parts, shape):
    m = Stage(forward, **parts)
    for transposed in (False, True):
        x = torch.randn(shape, dtype=f64, requires_grad=True)
        out = m(x)
        grad = (
            torch.randn_like(out).transpose(0, -1).contiguous().transpose(0, -1)
            if transposed
            else torch.randn_like(out)
        )
        (expected,) = torch.autograd.grad(m(x), x, grad)
        (dinput,), groups = zb.stage_backward_input([out], [grad], [x], m.parameters())
        zb.stage_backward_weight(m.parameters(), groups)
        assert dinput.stride() == expected.stride()
        torch.testing.assert_close(dinput, expected)


class Overlapping(torch.autograd.Function):
    """Its gradient is a tensor whose elements share their places, though no stride is 0."""

    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(6).contiguous().as_strided((3, 4), (1, 1))


@wrong_on_torch("an input's gradient is an expanded tensor")
@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x.sum() * 3.0,
        lambda x: x.sum(0) * 3.0,
        lambda x: x.sum(1, keepdim=True) * 2.0,
        lambda x: Overlapping.apply(x),
    ],
    ids=["sum", "sum over rows", "sum over columns", "Function"],
)
def test_an_inputs_gradient_can_be_added_to_in_place(forward):
    """Also where autograd gives one that lies in less memory than it has elements: that is copied."""
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    (expected,) = torch.autograd.grad(forward(x).sum(), [x])
    for _ in range(2):
        (dinput,), _ = zb.stage_backward_input([forward(x).sum()], None, [x], [])
    torch.testing.assert_close(x.grad, 2 * expected)
    x.grad.add_(torch.arange(12, dtype=f64).view(3, 4))
    torch.testing.assert_close(x.grad, 2 * expected + torch.arange(12, dtype=f64).view(3, 4))


@needs_zbpipe
def test_a_part_of_another_gradient_is_not_copied():
    """It has places of its own, with gaps between."""
    x, y = (torch.randn(3, 4, dtype=f64, requires_grad=True) for _ in range(2))
    (dx, dy), _ = zb.stage_backward_input([torch.cat([x, y], 1).sin()], [torch.ones(3, 8, dtype=f64)], [x, y], [])
    assert dx.stride() == (8, 1)
    assert dx.untyped_storage().nbytes() == 3 * 8 * 8


SIBLINGS = {
    "unbind": lambda v: v[:2].unbind(0),
    "split": lambda v: v.split(2),
}


def through_sibling(m, split, given=None):
    """Outputs of a stage that uses two outputs of one node, the first of which is its input: `given`, if not None."""
    first, second = split((m.w * m.scale).sin())
    first = first if given is None else given
    return first, second, (first * m.a).sin() * 2.0 + second * second * 3.0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@wrong_on_torch("KeyError: 'grads'")
@pytest.mark.parametrize("named", [True, False], ids=["weights listed", "all weights"])
@pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("kind", ["unbind", "split"])
def test_another_output_of_an_inputs_node_leads_to_its_weights(kind, hooks, named):
    """As an ordinary backward does it when the input is cut off: what flows into the other output goes on."""
    torch.manual_seed(3)
    m = Stage(None, w=(4, 4), scale=(4, 4), a=(1, 4))
    split = SIBLINGS[kind]
    if kind == "unbind":
        m.a = nn.Parameter(torch.randn(4, dtype=f64))
    expected = [torch.zeros_like(w) for w in m.parameters()]
    calls = []
    for _ in range(2):
        leaf = split((m.w * m.scale).sin().detach())[0].requires_grad_()
        _, _, out = through_sibling(m, split, leaf)
        grad = torch.randn_like(out)
        dleaf, *each = torch.autograd.grad(out, [leaf, *m.parameters()], grad)
        expected = [sum(pair) for pair in zip(expected, each, strict=True)]
        first, second, out = through_sibling(m, split)
        if hooks:
            first.register_hook(lambda g: calls.append("first") or g * 1.0)
            second.register_hook(lambda g: calls.append("second") or g * 1.0)
        (dinput,), groups = zb.stage_backward_input([out], [grad], [first], m.parameters() if named else None)
        torch.testing.assert_close(dinput, dleaf)
        zb.stage_backward_weight(m.parameters() if named else None, groups)
    torch.testing.assert_close([w.grad for w in m.parameters()], expected)
    assert sorted(calls) == (["first", "first", "second", "second"] if hooks else [])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@needs_zbpipe
def test_another_output_of_an_inputs_node_is_a_stage_output():
    m = Stage(None, w=(2, 4), a=(4,))
    for k in (1, 2):
        leaf, second = (m.w.detach().sin()[0].requires_grad_(), m.w.sin()[1])
        expected = torch.autograd.grad([(leaf * m.a).sum(), second.sum()], [leaf, m.w, m.a])
        first, second = m.w.sin().unbind(0)
        out = (first * m.a).sum()
        (dinput,), groups = zb.stage_backward_input(
            [out, second], [torch.ones_like(out), torch.ones_like(second)], [first], m.parameters()
        )
        zb.stage_backward_weight(m.parameters(), groups)
        torch.testing.assert_close([dinput, m.w.grad, m.a.grad], [expected[0], k * expected[1], k * expected[2]])
        assert second.grad_fn is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@needs_zbpipe
def test_another_output_of_an_inputs_node_leads_to_another_input():
    """The node is in the closure then: I runs it, without a gradient for the output that is an input."""
    m = Stage(None, w=(2, 4), a=(4,))
    for k in (1, 2):
        x = torch.randn(2, 4, dtype=f64, requires_grad=True)
        leaf = (x * m.w).sin()[0].detach().requires_grad_()
        second = (x * m.w).sin()[1]
        expected = torch.autograd.grad((leaf * m.a + second * second).sum(), [x, leaf, m.w, m.a])
        first, second = (x * m.w).sin().unbind(0)
        out = (first * m.a + second * second).sum()
        dinputs, groups = zb.stage_backward_input([out], None, [x, first], m.parameters())
        zb.stage_backward_weight(m.parameters(), groups)
        torch.testing.assert_close(list(dinputs), list(expected[:2]))
        if k == 1:
            before = [w.grad.clone() for w in m.parameters()]
            torch.testing.assert_close(before, list(expected[2:]))
        else:
            added = [w.grad - b for w, b in zip(m.parameters(), before, strict=True)]
            torch.testing.assert_close(added, list(expected[2:]))
