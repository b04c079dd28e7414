"""Stage outputs: several, nested, without gradient, on weights alone, views, multi-output nodes."""

import pytest
import torch
import torch.nn.functional as F
from support import oracle
from support.oracle import Stage, case, check, close, fresh, needs_zbpipe, no_grads, random_grads, small, zb
from torch import nn
from torch.utils._pytree import tree_map_only

pytestmark = pytest.mark.drops_groups

f64 = torch.float64
ALONE = "an output on weights alone gets no gradient"
VIEW = "can't detach views in place"


def ones(*shape):
    return torch.ones(shape, dtype=f64)


def first_only(outputs):
    return [g if i == 0 else None for i, g in enumerate(random_grads(outputs))]


def last_only(outputs):
    return [g if i == len(outputs) - 1 else None for i, g in enumerate(random_grads(outputs))]


def feeding_others(m, x):
    h = (x @ m.a).sin()
    return h, h @ m.b, h @ m.c


def gives_all(m, *inputs):
    """The outputs of a module that gives several."""
    return [out * 2.0 for out in m.net(*inputs)]


def unused_chunk(m, x):
    first, _, third = (x @ m.a).chunk(3, dim=1)
    return (first * third).sin() @ m.b


def split_node_with_several_outputs(m, x):
    u, v = torch.stack([x, m.a]).unbind(0)
    return u.sin() * v + v.exp()


def layer_norm_with_its_statistics(m, x):
    out, mean, rstd = torch.native_layer_norm(x, [4], m.s, m.t, 1e-5)
    return out * mean + rstd


def attention(is_causal):
    def forward(m, x):
        q, k, v = (x @ m.qkv).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).reshape(2, 6, 8) @ m.out

    return Stage(forward, qkv=(8, 24), out=(8, 8))


def language_model():
    def forward(m, ids, x):
        h = m.table(ids) + x
        h = h + m.block(h)
        return F.cross_entropy(m.head(h).flatten(0, 1), ids.flatten())

    layers = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
    return Stage(forward, table=nn.Embedding(11, 8), block=nn.Sequential(*layers), head=nn.Linear(8, 11)).double()


TARGET = torch.randn(4, 8, dtype=f64)


@oracle.table(
    case("loss without output gradient", lambda m, x: (x @ m.a).pow(2).mean(), output_grads=no_grads),
    case("loss whose gradient is None", lambda m, x: (x @ m.a).pow(2).mean(), output_grads=lambda outs: [None]),
    case("two losses", lambda m, x: ((x @ m.a).sum(), (x @ m.b).pow(2).sum()), output_grads=no_grads),
    case(
        "mean squared loss",
        Stage(lambda m, x: F.mse_loss(m.net(x), TARGET.to(x.device), reduction="sum"), net=nn.Linear(8, 8, dtype=f64)),
        (4, 8),
        output_grads=no_grads,
    ),
    case(
        "cross entropy of a language model",
        language_model(),
        torch.tensor([[1, 2, 10], [0, 2, 2]]),
        (2, 3, 8),
        output_grads=no_grads,
    ),
    case("several", lambda m, x: (x @ m.a, x.sin() @ m.b, x * m.s)),
    case("one that feeds another", lambda m, x: (h := x @ m.a, h.sin() @ m.b)),
    case("the same twice", lambda m, x: (x @ m.a,) * 2),
    *(
        case(
            f"gradient of the {name} alone",
            feeding_others,
            output_grads=chosen,
            wrong="grad can be implicitly created only for scalar outputs",
        )
        for name, chosen in (("first", first_only), ("last", last_only))
    ),
    case("none needs a gradient", lambda m, x: (x.detach() + 1, torch.arange(3))),
    case("integers beside floats", lambda m, x: (x.argmax(-1), x @ m.a, x > 0)),
    case("detached", lambda m, x: ((x @ m.a).detach(), x @ m.b)),
    # On weights alone.
    case("on weights alone", lambda m, x: (x @ m.a, (m.b @ m.c).sin()), wrong=ALONE),
    case("on weights alone, shared", lambda m, x: (x @ (product := m.a @ m.b), product.sin(), m.a * 2.0), wrong=ALONE),
    case(
        "penalty on weights alone", lambda m, x: ((x @ m.a).sum(), m.b.pow(2).sum()), output_grads=no_grads, wrong=ALONE
    ),
    # Detaching an output in place must not spoil it for W, which still reads it.
    case("on weights alone, saved by a later node", lambda m, x: (x @ (w := m.a.sin()).cos(), w), wrong=ALONE),
    case(
        "of a first stage, saved for another",
        lambda m, x: (h := x @ m.a, h.cos()),
        ones(3, 4),
        wrong="no input needs a gradient, so there are no groups",
    ),
    # Views.
    *(
        case(f"a view by {name}", forward, wrong=VIEW)
        for name, forward in {
            "view": lambda m, x: (x @ m.a).view(-1),
            "slice": lambda m, x: (x @ m.a)[1:],
            "transpose": lambda m, x: (x @ m.a).t(),
            "chunk": lambda m, x: (x @ m.a).chunk(2, dim=1),
            "split": lambda m, x: torch.split(x @ m.a, [1, 2]),
            "unbind": lambda m, x: (x @ m.a).unbind(0),
            "unflatten": lambda m, x: F.linear(x, m.a).unflatten(1, (2, 2)),
            "expand": lambda m, x: (x @ m.a).expand(2, 3, 4),
        }.items()
    ),
    case("a view of the input", lambda m, x: (x.view(-1), x @ m.a), wrong=VIEW),
    case("views of another", lambda m, x: (h := (x @ m.a).sin(), h.view(-1), h[0]), wrong=VIEW),
    # Of nodes with several outputs.
    case("unused chunk", Stage(unused_chunk, a=(4, 6), b=(2, 4))),
    case("split node with several", split_node_with_several_outputs, (4, 4), wrong="weight and input share one .grad"),
    case(
        "split node with an unused one",
        lambda m, x: torch.linalg.qr(torch.sort(x * m.a, dim=-1)[0])[1].sin() @ m.b,
        (4, 4),
    ),
    case("layer norm with its statistics", layer_norm_with_its_statistics),
    case("lstm", Stage(lambda m, x: m.net(x)[0], net=nn.LSTM(4, 3, num_layers=2, dtype=f64)), (5, 2, 4)),
    case("gru", Stage(gives_all, net=nn.GRU(4, 3, batch_first=True, dtype=f64)), (2, 5, 4), (1, 2, 3)),
    case(
        "multihead attention",
        Stage(lambda m, x, y: gives_all(m, x, y, y), net=nn.MultiheadAttention(8, 2, batch_first=True, dtype=f64)),
        (2, 5, 8),
        (2, 3, 8),
    ),
    case("attention", attention(is_causal=False), (2, 6, 8)),
    case("causal attention", attention(is_causal=True), (2, 6, 8)),
)
def test_outputs(stage, inputs, options):
    check(stage, *inputs, **options)


@needs_zbpipe
def test_output_of_none_is_passed_over():
    check(small(lambda m, x: (x @ m.a, None)), (3, 4))


def test_output_that_is_no_scalar_gets_ones_without_output_gradients():
    m, x = small(lambda m, x: x @ m.a), fresh()
    (dinput,), _ = zb.stage_backward_input([m(x)], None, [x], m.parameters())
    torch.testing.assert_close(dinput, ones(3, 4) @ m.a.detach().t())


def test_no_gradient_for_any_output_is_refused():
    """A gradient that was lost on the way, at the latest here: W would add nothing, in silence."""
    m, x = small(lambda m, x: (x @ m.a, x * m.s)), fresh()
    with pytest.raises((ValueError, RuntimeError), match="grad"):
        zb.stage_backward_input(list(m(x)), [None, None], [x], m.parameters())
    assert x.grad is None


def with_a_view_under_no_grad(m, x):
    h = x @ m.a
    with torch.no_grad():
        view = h[:, :2]
    return h.sin(), view


@needs_zbpipe
def test_view_made_under_no_grad_takes_no_gradient():
    """It says that it requires one, as its base does, and has no node."""
    m = Stage(with_a_view_under_no_grad, a=(4, 4))
    x, grad = fresh(), torch.randn(3, 4, dtype=f64)
    y = x.detach().requires_grad_()
    expected = torch.autograd.grad(m(y)[0], (y, m.a), grad)
    out, view = m(x)
    assert view.requires_grad
    assert zb.stage_backward_input([view], [ones(3, 2)], [x], m.parameters()) == ((None,), [])
    (dinput,), groups = zb.stage_backward_input([out, view], [grad, ones(3, 2)], [x], m.parameters())
    zb.stage_backward_weight(m.parameters(), groups)
    close((dinput, m.a.grad), expected, "gradients")


@oracle.wrong_on_torch("an output on weights alone gets no gradient; detach_ freezes the weight")
def test_weight_itself_is_an_output():
    m, x = small(lambda m, x: (x @ m.a, m.b)), fresh()
    outs = list(m(x))
    grads = random_grads(outs)
    _, groups = zb.stage_backward_input(outs, grads, [x], m.parameters())
    zb.stage_backward_weight(m.parameters(), groups)
    torch.testing.assert_close(m.b.grad, grads[1])
    assert m.b.requires_grad


def test_outputs_are_detached():
    m = small(lambda m, x: ((x @ m.a).sin(), (x * m.s).sum()))
    outs = list(m(fresh()))
    zb.stage_backward_input(outs, random_grads(outs), [], m.parameters())
    assert [(out.requires_grad, out.grad_fn) for out in outs] == [(False, None)] * 2


# stage_backward: the whole backward of one stage.


def nested(m, x):
    return {"a": (x @ m.a, 3, None), "b": [x * m.s, {"c": (x @ m.b).sum()}], "text": "ignored"}


NESTED_GRADS = {"a": (ones(3, 4), None, None), "b": [ones(3, 4) * 2, {"c": torch.tensor(3.0, dtype=f64)}], "text": None}


@pytest.mark.parametrize(
    ("forward", "grads", "total"),
    [
        (nested, NESTED_GRADS, lambda m, x: (x @ m.a).sum() + 2 * (x * m.s).sum() + 3 * (x @ m.b).sum()),
        (lambda m, x: (x @ m.a).sin().sum(), None, lambda m, x: (x @ m.a).sin().sum()),
        (
            lambda m, x: ((x @ m.a, x @ m.a), {"s": x * m.s}, x.sin()),
            (None, None, ones(3, 4)),
            lambda m, x: x.sin().sum(),
        ),
    ],
    ids=["nested outputs", "a loss", "branches whose gradient is None"],
)
def test_stage_backward(forward, grads, total):
    m, x = small(forward), fresh()
    grads = tree_map_only(torch.Tensor, lambda grad: grad.to(x.device), grads)
    (dinput,) = zb.stage_backward(m(x), grads, (x,))
    assert x.grad is None
    expected = torch.autograd.grad(total(m, x), [x, *m.parameters()], allow_unused=True)
    close([dinput, *(w.grad for w in m.parameters())], expected, "gradients")


def test_stage_backward_with_the_deprecated_indices():
    m, x = small(lambda m, x: (x @ m.a, x * m.s)), fresh()
    zb.stage_backward(m(x), (None, ones(3, 4)), (x,), outputs_with_grads_idxs=[1])
    assert m.a.grad is None
    torch.testing.assert_close(m.s.grad, x.detach().sum(0))


@pytest.mark.parametrize(
    "output_grads",
    [(ones(3, 4), {"wrong": None}), (ones(3, 4),), [ones(3, 4), ones(3, 4)], ("text", {"s": None})],
    ids=["keys", "length", "not a dict", "not a tensor"],
)
def test_stage_backward_refuses_gradients_of_another_structure(output_grads):
    m, x = small(lambda m, x: (x @ m.a, {"s": x * m.s})), fresh()
    with pytest.raises(RuntimeError, match="Failed to run stage backward") as failure:
        zb.stage_backward(m(x), output_grads, (x,))
    assert isinstance(failure.value.__cause__, AssertionError)
    assert m.a.grad is None and m.s.grad is None


@needs_zbpipe
@pytest.mark.parametrize("ends", ["by W", "dropped"])
def test_an_output_that_w_reads_lets_go_of_its_history_with_the_groups(ends):
    """What its node has saved goes, though the output stays."""
    m, x = Stage(lambda m, x: (x @ (w := m.a @ torch.ones(4, 4, dtype=f64)), w), a=(4, 4)), fresh()
    outputs = m(x)
    assert outputs[1].grad_fn is not None
    _, groups = zb.stage_backward_input(outputs, [torch.ones_like(out) for out in outputs], [x], m.parameters())
    if ends == "by W":
        zb.stage_backward_weight(m.parameters(), groups)
    del groups
    assert [out.grad_fn for out in outputs] == [None, None]


@needs_zbpipe
def test_a_weight_that_is_an_output_takes_a_gradient_of_its_grad_dtype():
    sides = []
    for is_split in (False, True):
        w = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
        w.grad_dtype = torch.float32
        x = torch.ones(4, requires_grad=True)
        outputs, grads = [x * 2.0, w], [torch.ones(4), torch.full((4,), 1.001)]
        if is_split:
            zb.stage_backward_weight([w], zb.stage_backward_input(outputs, grads, [x], [w])[1])
        else:
            torch.autograd.backward(outputs, grads)
        sides.append(w.grad)
    assert sides[1].dtype == sides[0].dtype == torch.float32 and torch.equal(*sides)
