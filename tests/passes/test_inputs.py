"""Stage inputs: what they may be, what they get, and that nothing behind them is touched."""

import pytest
import torch
from support import oracle
from support.functions import handing_through
from support.oracle import Stage, both_passes, case, check, close, fresh, needs_zbpipe, small, wrong_on_torch, zb
from torch import nn

pytestmark = pytest.mark.drops_groups

f64 = torch.float64
NO_GROUPS = "without an input that needs a gradient there are no groups"
is_no_leaf = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def ones(*shape):
    return torch.ones(shape or (3, 4), dtype=f64)


def gradients(m, *inputs):
    """Of the inputs and of all weights, by an ordinary backward on copies of the inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(m(*inputs).sum(), [*inputs, *m.parameters()]))


@oracle.table(
    case("several", lambda m, x, y, z: (x @ m.a) * y + z @ m.b, (3, 4), (3, 4), (3, 4)),
    case("no tensors", lambda m, n, x, s, o: x @ m.a * n, 3, (3, 4), "text", None),
    case("one that needs no gradient", lambda m, x, y: (x @ m.a) * (y @ m.b), (3, 4), ones()),
    case("integers", lambda m, x, i: x[i] @ m.a, (3, 4), torch.tensor([0, 2, 2])),
    case("unused", lambda m, x, y: x @ m.a, (3, 4), (3, 4)),
    case("none needs a gradient", lambda m, x: (x @ m.a).sin() @ m.b + m.s, ones(), wrong=NO_GROUPS),
    case("none used needs a gradient", lambda m, x, y: (x @ m.a).sin(), ones(), (3, 4), wrong=NO_GROUPS),
    case("of an embedding, and floats", lambda m, ids, x: m.a[ids] + x, torch.tensor([1, 1, 3]), (3, 4)),
    case("used twice", lambda m, x: (x @ m.a) * (x @ m.b) + x),
    case("both sides of a product", lambda m, x: (x @ x) @ m.a, (4, 4)),
    case("passed through", lambda m, x, y: (x @ m.a, y), (3, 4), (3, 4)),
    case("the only output", lambda m, x: x),
    case(
        "passed through as a view",
        lambda m, x, y: (x @ m.a, y.view(-1)),
        (3, 4),
        (3, 4),
        wrong="a view made inside the stage cannot be detached in place",
    ),
)
def test_inputs(stage, inputs, options):
    check(stage, *inputs, **options)


@wrong_on_torch(NO_GROUPS)
def test_stage_without_inputs():
    check(small(lambda m: (m.a @ m.b).sin() * m.s))


@wrong_on_torch("adds the gradient to itself")
def test_one_input_listed_twice_gets_the_same_gradient_once():
    m, x = small(lambda m, x: x @ m.a), fresh()
    out = m(x)
    (first, second), groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x, x], m.parameters())
    expected = ones() @ m.a.detach().t()
    torch.testing.assert_close([first, second, x.grad], [expected] * 3)


def test_existing_gradient_of_an_input_is_added_to():
    m, x = small(lambda m, x: x @ m.a), fresh()
    x.grad = torch.full_like(x, 5.0)
    (dinput,) = both_passes(m, x)
    expected = ones() @ m.a.detach().t()
    torch.testing.assert_close([dinput, x.grad], [expected, expected + 5.0])


def test_receive_buffer_used_step_after_step_collects_no_hooks():
    m, x = small(lambda m, x: x @ m.a), fresh()
    for _ in range(3):
        x.grad = None
        (dinput,) = both_passes(m, x)
        torch.testing.assert_close(dinput, ones() @ m.a.detach().t())
        assert not x._backward_hooks


@is_no_leaf
def test_graph_behind_a_non_leaf_input_is_not_walked_and_still_works_afterwards():
    m, leaf = Stage(lambda m, x: (x @ m.a).sin(), a=(4, 4)), fresh()
    x = leaf.exp()
    expected = gradients(m, x)
    (dinput,) = both_passes(m, x)
    torch.testing.assert_close([dinput, m.a.grad], expected)
    torch.testing.assert_close(x.grad, dinput)
    assert leaf.grad is None
    x.backward(dinput)
    torch.testing.assert_close(leaf.grad, dinput * leaf.detach().exp())


@wrong_on_torch("a weight behind an input gets its gradient from before the input too")
@is_no_leaf
def test_weight_that_also_made_the_non_leaf_input():
    m = Stage(lambda m, x: (x @ m.a).sin(), a=(4, 4))
    x = torch.randn(3, 4, dtype=f64) @ m.a
    expected = gradients(m, x)
    both_passes(m, x)
    torch.testing.assert_close([x.grad, m.a.grad], expected)


@is_no_leaf
def test_non_leaf_input_that_is_one_output_of_a_multi_output_node():
    m, leaf = Stage(lambda m, x, y: (x @ m.a) * y, a=(2, 2)), fresh()
    x, y = leaf.chunk(2, dim=1)
    expected = gradients(m, x, y)
    torch.testing.assert_close([*both_passes(m, x, y), m.a.grad], expected)
    assert leaf.grad is None


@is_no_leaf
def test_only_one_output_of_a_multi_output_node_is_an_input():
    """The stage reaches the other output by a way that is not an input: no gradient may be taken for the input's."""
    x, other = fresh().chunk(2, dim=1)
    expected = gradients(Stage(lambda m, x: (x @ m.a) * other.detach(), a=(a := oracle.weight(2, 2))), x)
    m = Stage(lambda m, x: (x @ m.a) * other, a=a)
    torch.testing.assert_close([*both_passes(m, x), m.a.grad], expected)


@is_no_leaf
def test_one_input_computed_from_another():
    m, x = Stage(lambda m, x, y: (x @ m.a) * (y @ m.b), a=(4, 4), b=(4, 4)), fresh()
    y = x.sin()
    expected = gradients(m, x, y)
    dinputs = both_passes(m, x, y)
    torch.testing.assert_close([dinputs[1], m.a.grad, m.b.grad], expected[1:])


def test_weight_that_is_also_an_input_is_an_input():
    m = Stage(lambda m, x: (x @ m.a).sin(), a=(4, 4))
    x = fresh()
    out = m(x)
    dinputs, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x, m.a], [])
    expected = torch.autograd.grad(m(x).sum(), [x, m.a])
    torch.testing.assert_close(list(dinputs), list(expected))
    zb.stage_backward_weight([], groups)
    torch.testing.assert_close(m.a.grad, expected[1])


def test_inputs_of_stage_backward_are_released():
    m = Stage(lambda m, x, n, y: x @ m.a + y, a=(4, 4))
    x = fresh()
    y = ones()
    grads = zb.stage_backward(m(x, 7, y), ones(), (x, 7, y))
    assert type(grads) is tuple
    torch.testing.assert_close(grads[0], ones() @ m.a.detach().t())
    assert grads[1:] == (None, None)
    assert x.grad is None


@needs_zbpipe
def test_inference_tensor_as_an_input_gets_none():
    with torch.inference_mode():
        x = torch.randn(3, 4, dtype=f64)
    m = Stage(lambda m, x, y: (y @ m.a) + x, a=(4, 4))
    y = fresh()
    dinputs = both_passes(m, x, y)
    assert dinputs[0] is None
    torch.testing.assert_close(dinputs[1], ones() @ m.a.detach().t())


@needs_zbpipe
@pytest.mark.parametrize("what", ["outputs", "output gradients", "inputs", "weights"])
def test_hook_that_clears_the_callers_lists_during_the_input_pass(what):
    m = Stage(lambda m, x, y: (x @ m.a).sin() @ m.b * y, a=(4, 4), b=(4, 4))
    for _ in range(2):
        x, y = fresh(), fresh()
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
    x, y = fresh(), fresh()
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
    close([w.grad for w in m.parameters()], expected[2:], "gradients")


@wrong_on_torch("inputs' gradients share memory")
@pytest.mark.parametrize("forward", [lambda x, y: (x + y) * 2.0, lambda x, y: x + y], ids=["scaled sum", "sum"])
def test_inputs_that_receive_one_gradient_add_up_by_themselves(forward):
    x, y = fresh(), fresh()
    given = [torch.randn(3, 4, dtype=f64) for _ in range(2)]
    grads = [grad.clone() for grad in given]
    for grad in grads:
        zb.stage_backward_input([forward(x, y)], [grad], [x, y], [])
    torch.testing.assert_close(grads, given)
    expected = torch.autograd.grad(forward(x, y), [x, y], sum(given))
    torch.testing.assert_close([x.grad, y.grad], list(expected))


@is_no_leaf
@wrong_on_torch("they share it")
@pytest.mark.parametrize(
    "parts",
    [lambda z: z.unbind(0), lambda z: z.split(1), lambda z: z.split_with_sizes([1, 1])],
    ids=["unbind", "split", "split_with_sizes"],
)
@pytest.mark.parametrize("forward", [lambda a, b: a + b, lambda a, b: (a + b).tanh()], ids=["sum", "computed"])
def test_inputs_of_one_node_with_one_gradient(forward, parts):
    """Outputs of one node are two inputs: each gradient has memory of its own, also when a second I adds to it."""
    m = Stage(lambda m, a, b: forward(a, b) @ m.w, w=(3, 3))
    a, b = parts(torch.randn(2, 3, dtype=f64, requires_grad=True))
    expected = torch.autograd.grad(m(a, b).sum(), [a, b])
    for _ in range(2):
        da, db = both_passes(m, a, b)
        assert da.untyped_storage().data_ptr() != db.untyped_storage().data_ptr()
    close([a.grad, b.grad], [2 * grad for grad in expected], "sums of two microbatches")


@wrong_on_torch("adds into the constant")
@pytest.mark.parametrize("part", [lambda slope: slope, lambda slope: slope.view(3, 4), lambda slope: slope.detach()])
def test_an_inputs_gradient_that_a_function_keeps_is_not_added_to(part):
    slope, x = ones() * 2.0, fresh()
    for _ in range(2):
        kept = part(slope)
        constant = handing_through(lambda x: (x * 2.0).sum(), lambda grad, kept=kept: kept)
        zb.stage_backward_input([constant(x)], None, [x], [])
    close([x.grad, slope], [ones() * 4.0, ones() * 2.0], "the sum, and the constant")


@wrong_on_torch("they do")
def test_dinputs_require_no_gradient_though_the_output_gradient_does():
    m = Stage(lambda m, x, y: y + x @ m.w, w=(4, 4))
    for _ in range(2):
        x, y = fresh(), fresh()
        grad = fresh() * 2.0
        dinputs, groups = zb.stage_backward_input([m(x, y)], [grad], [x, y], m.parameters())
        zb.stage_backward_weight(m.parameters(), groups)
        assert not any(t.requires_grad for t in (*dinputs, x.grad, y.grad, m.w.grad))
        assert grad.requires_grad


@wrong_on_torch("reads the .grad of an input that is no leaf, which warns")
@pytest.mark.parametrize("view", [False, True])
def test_non_leaf_input_returned_as_an_output_keeps_its_own_history(view):
    m = Stage(lambda m, x: x @ m.w, w=(4, 4))
    for _ in range(2):
        older = fresh()
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
        grad = torch.randn_like(out)
        grad = grad.transpose(0, -1).contiguous().transpose(0, -1) if transposed else grad
        (expected,) = torch.autograd.grad(m(x), x, grad)
        (dinput,), groups = zb.stage_backward_input([out], [grad], [x], m.parameters())
        zb.stage_backward_weight(m.parameters(), groups)
        assert dinput.stride() == expected.stride()
        torch.testing.assert_close(dinput, expected)


# Its gradient is a tensor whose elements share their places, though no stride is 0.
overlapping = handing_through(torch.sum, lambda grad: grad.expand(6).contiguous().as_strided((3, 4), (1, 1)))


@wrong_on_torch("an input's gradient is an expanded tensor")
@pytest.mark.parametrize(
    "forward",
    [lambda x: x.sum() * 3.0, lambda x: x.sum(0) * 3.0, lambda x: x.sum(1, keepdim=True) * 2.0, overlapping],
    ids=["sum", "sum over rows", "sum over columns", "Function"],
)
def test_an_inputs_gradient_can_be_added_to_in_place(forward):
    """Also where autograd gives one that lies in less memory than it has elements: that is copied."""
    x = fresh()
    (expected,) = torch.autograd.grad(forward(x).sum(), [x])
    for _ in range(2):
        (dinput,), _ = zb.stage_backward_input([forward(x).sum()], None, [x], [])
    torch.testing.assert_close(x.grad, 2 * expected)
    x.grad.add_(torch.arange(12, dtype=f64).view(3, 4))
    torch.testing.assert_close(x.grad, 2 * expected + torch.arange(12, dtype=f64).view(3, 4))


@needs_zbpipe
def test_a_part_of_another_gradient_is_not_copied():
    """It has places of its own, with gaps between."""
    x, y = fresh(), fresh()
    (dx, dy), _ = zb.stage_backward_input([torch.cat([x, y], 1).sin()], [torch.ones(3, 8, dtype=f64)], [x, y], [])
    assert dx.stride() == (8, 1)
    assert dx.untyped_storage().nbytes() == 3 * 8 * 8


SIBLINGS = {"unbind": lambda v: v[:2].unbind(0), "split": lambda v: v.split(2)}


def through_sibling(m, split, given=None):
    """Outputs of a stage that uses two outputs of one node, the first of which is its input: `given`, if not None."""
    first, second = split((m.w * m.scale).sin())
    first = first if given is None else given
    return first, second, (first * m.a).sin() * 2.0 + second * second * 3.0


@is_no_leaf
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


@is_no_leaf
@needs_zbpipe
@pytest.mark.parametrize("to", ["an output", "another input"])
def test_another_output_of_an_inputs_node_leads(to):
    """To another input: the node is in the closure then; I runs it, without a gradient for the output that is an input."""
    m = Stage(None, w=(2, 4), a=(4,))

    def outputs(first, second):
        return [(first * m.a).sum(), second] if to == "an output" else [(first * m.a + second * second).sum()]

    total = [torch.zeros_like(w) for w in m.parameters()]
    for _ in range(2):
        x = fresh(2, 4).requires_grad_(to == "another input")
        leaf = (x * m.w).sin()[0].detach().requires_grad_()
        inputs = [x] * x.requires_grad
        ordinary = [out.sum() for out in outputs(leaf, (x * m.w).sin()[1])]
        expected = torch.autograd.grad(ordinary, [*inputs, leaf, *m.parameters()])
        total = [sum(pair) for pair in zip(total, expected[-2:], strict=True)]
        first, second = (x * m.w).sin().unbind(0)
        outs = outputs(first, second)
        dinputs, groups = zb.stage_backward_input(
            outs, [torch.ones_like(out) for out in outs], [*inputs, first], m.parameters()
        )
        zb.stage_backward_weight(m.parameters(), groups)
        torch.testing.assert_close([*dinputs, m.w.grad, m.a.grad], [*expected[:-2], *total])
        assert all(out.grad_fn is None for out in outs)
