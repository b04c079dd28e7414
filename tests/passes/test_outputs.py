"""Stage outputs: several, nested, without gradient, on weights alone, views, multi-output nodes."""

import pytest
import torch
import torch.nn.functional as F
from support.oracle import Stage, check, needs_zbpipe, no_grads, random_grads, wrong_on_torch, zb
from torch import nn

f64 = torch.float64


def ones(*shape):
    return torch.ones(shape, dtype=f64)


def test_scalar_loss_without_output_gradient():
    check(Stage(lambda m, x: (x @ m.a).pow(2).mean(), a=(4, 4)), (3, 4), output_grads=no_grads)


def test_scalar_loss_whose_gradient_is_none():
    check(Stage(lambda m, x: (x @ m.a).pow(2).mean(), a=(4, 4)), (3, 4), output_grads=lambda outs: [None])


def test_two_losses_without_output_gradients():
    check(
        Stage(lambda m, x: ((x @ m.a).sum(), (x @ m.b).pow(2).sum()), a=(4, 4), b=(4, 4)), (3, 4), output_grads=no_grads
    )


def test_output_that_is_no_scalar_gets_ones_without_output_gradients():
    m = Stage(lambda m, x: x @ m.a, a=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    (dinput,), _ = zb.stage_backward_input([m(x)], None, [x], m.parameters())
    torch.testing.assert_close(dinput, ones(3, 4) @ m.a.detach().t())


def test_several_outputs():
    check(Stage(lambda m, x: (x @ m.a, x.sin() @ m.b, x * m.s), a=(4, 4), b=(4, 4), s=(4,)), (3, 4))


def test_output_that_feeds_another_output():
    def forward(m, x):
        h = x @ m.a
        return h, h.sin() @ m.b

    check(Stage(forward, a=(4, 4), b=(4, 4)), (3, 4))


def test_same_output_twice():
    def forward(m, x):
        h = x @ m.a
        return h, h

    check(Stage(forward, a=(4, 4)), (3, 4))


def first_only(outputs):
    return [g if i == 0 else None for i, g in enumerate(random_grads(outputs))]


def last_only(outputs):
    return [g if i == len(outputs) - 1 else None for i, g in enumerate(random_grads(outputs))]


@wrong_on_torch("grad can be implicitly created only for scalar outputs")
@pytest.mark.parametrize("chosen", [first_only, last_only])
def test_outputs_without_gradient(chosen):
    def forward(m, x):
        h = (x @ m.a).sin()
        return h, h @ m.b, h @ m.c

    check(Stage(forward, a=(4, 4), b=(4, 4), c=(4, 4)), (3, 4), output_grads=chosen)


def test_no_gradient_for_any_output_is_refused():
    """A gradient that was lost on the way, at the latest here: W would add nothing, in silence."""
    m = Stage(lambda m, x: (x @ m.a, x * m.s), a=(4, 4), s=(4,))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    with pytest.raises((ValueError, RuntimeError), match="grad"):
        zb.stage_backward_input(list(m(x)), [None, None], [x], m.parameters())
    assert x.grad is None


def test_no_output_needs_a_gradient():
    check(Stage(lambda m, x: (x.detach() + 1, torch.arange(3)), a=(4, 4)), (3, 4))


def test_integer_output_beside_a_float_one():
    check(Stage(lambda m, x: (x.argmax(-1), x @ m.a, x > 0), a=(4, 4)), (3, 4))


def test_output_that_was_detached():
    check(Stage(lambda m, x: ((x @ m.a).detach(), x @ m.b), a=(4, 4), b=(4, 4)), (3, 4))


@wrong_on_torch("an output on weights alone gets no gradient")
def test_one_output_depends_on_weights_alone():
    check(Stage(lambda m, x: (x @ m.a, (m.b @ m.c).sin()), a=(4, 4), b=(4, 4), c=(4, 4)), (3, 4))


@wrong_on_torch("an output on weights alone gets no gradient")
def test_output_on_weights_alone_shares_them_with_the_rest():
    def forward(m, x):
        product = m.a @ m.b
        return x @ product, product.sin(), m.a * 2.0

    check(Stage(forward, a=(4, 4), b=(4, 4)), (3, 4))


@wrong_on_torch("an output on weights alone gets no gradient")
def test_output_on_weights_alone_is_a_penalty_with_ones():
    check(Stage(lambda m, x: ((x @ m.a).sum(), m.b.pow(2).sum()), a=(4, 4), b=(4, 4)), (3, 4), output_grads=no_grads)


@wrong_on_torch("an output on weights alone gets no gradient; detach_ freezes the weight")
def test_weight_itself_is_an_output():
    m = Stage(lambda m, x: (x @ m.a, m.b), a=(4, 4), b=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    outs = list(m(x))
    grads = random_grads(outs)
    _, groups = zb.stage_backward_input(outs, grads, [x], m.parameters())
    zb.stage_backward_weight(m.parameters(), groups)
    torch.testing.assert_close(m.b.grad, grads[1])
    assert m.b.requires_grad


@wrong_on_torch("an output on weights alone gets no gradient")
def test_output_on_weights_alone_that_a_later_node_saved():
    """Detaching an output in place must not spoil it for W, which still reads it."""

    def forward(m, x):
        w = m.a.sin()
        return x @ w.cos(), w

    check(Stage(forward, a=(4, 4)), (3, 4))


@wrong_on_torch("no input needs a gradient, so there are no groups")
def test_outputs_of_a_first_stage_of_which_one_is_saved_for_another():
    def forward(m, x):
        h = x @ m.a
        return h, h.cos()

    check(Stage(forward, a=(4, 4)), torch.ones(3, 4, dtype=f64))


def test_outputs_are_detached():
    m = Stage(lambda m, x: ((x @ m.a).sin(), (x * m.s).sum()), a=(4, 4), s=(4,))
    outs = list(m(torch.randn(3, 4, dtype=f64, requires_grad=True)))
    zb.stage_backward_input(outs, random_grads(outs), [], m.parameters())
    assert [out.requires_grad for out in outs] == [False, False]
    assert [out.grad_fn for out in outs] == [None, None]


@wrong_on_torch("can't detach views in place")
@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: (x @ m.a).view(-1),
        lambda m, x: (x @ m.a)[1:],
        lambda m, x: (x @ m.a).t(),
        lambda m, x: (x @ m.a).chunk(2, dim=1),
        lambda m, x: torch.split(x @ m.a, [1, 2]),
        lambda m, x: (x @ m.a).unbind(0),
        lambda m, x: F.linear(x, m.a).unflatten(1, (2, 2)),
        lambda m, x: (x @ m.a).expand(2, 3, 4),
    ],
    ids=["view", "slice", "transpose", "chunk", "split", "unbind", "unflatten", "expand"],
)
def test_output_is_a_view(forward):
    check(Stage(forward, a=(4, 4)), (3, 4))


@wrong_on_torch("can't detach views in place")
def test_output_is_a_view_of_the_input():
    check(Stage(lambda m, x: (x.view(-1), x @ m.a), a=(4, 4)), (3, 4))


@wrong_on_torch("can't detach views in place")
def test_output_is_a_view_of_another_output():
    def forward(m, x):
        h = (x @ m.a).sin()
        return h, h.view(-1), h[0]

    check(Stage(forward, a=(4, 4)), (3, 4))


def test_some_chunks_are_unused():
    def forward(m, x):
        first, _, third = (x @ m.a).chunk(3, dim=1)
        return (first * third).sin() @ m.b

    check(Stage(forward, a=(4, 6), b=(2, 4)), (3, 4))


@wrong_on_torch("weight and input share one .grad")
def test_split_node_with_several_outputs():
    """unbind of (input, weight) stacked: the split node itself has several outputs."""

    def forward(m, x):
        u, v = torch.stack([x, m.a]).unbind(0)
        return u.sin() * v + v.exp()

    check(Stage(forward, a=(3, 4)), (3, 4))


def test_split_node_one_of_whose_outputs_is_unused():
    def forward(m, x):
        values, _ = torch.sort(x * m.a, dim=-1)
        q, r = torch.linalg.qr(values)
        return r.sin() @ m.b

    check(Stage(forward, a=(4, 4), b=(4, 4)), (4, 4))


def test_multi_output_node_that_owns_a_weight():
    """batch_norm and layer_norm give several outputs, of which the stage sees one."""

    def forward(m, x):
        out, mean, rstd = torch.native_layer_norm(x, [4], m.g, m.b, 1e-5)
        return out * mean + rstd

    check(Stage(forward, g=(4,), b=(4,)), (3, 4))


def test_lstm():
    check(Stage(lambda m, x: m.net(x)[0], net=nn.LSTM(4, 3, num_layers=2, dtype=f64)), (5, 2, 4))


def test_gru_with_hidden_state_as_input_and_output():
    def forward(m, x, h):
        out, hidden = m.net(x, h)
        return out * 2.0, hidden * 3.0

    check(Stage(forward, net=nn.GRU(4, 3, batch_first=True, dtype=f64)), (2, 5, 4), (1, 2, 3))


def test_multihead_attention():
    def forward(m, x, y):
        out, probabilities = m.net(x, y, y)
        return out * 2.0, probabilities * 3.0

    check(Stage(forward, net=nn.MultiheadAttention(8, 2, batch_first=True, dtype=f64)), (2, 5, 8), (2, 3, 8))


@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_attention(causal):
    def forward(m, x):
        q, k, v = (x @ m.qkv).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return out.transpose(1, 2).reshape(2, 6, 8) @ m.out

    check(Stage(forward, qkv=(8, 24), out=(8, 8)), (2, 6, 8))


def nested(m, x):
    return {"a": (x @ m.a, 3, None), "b": [x * m.s, {"c": (x @ m.b).sum()}], "text": "ignored"}


def nested_grads():
    return {"a": (ones(3, 4), None, None), "b": [ones(3, 4) * 2, {"c": torch.tensor(3.0, dtype=f64)}], "text": None}


def test_stage_backward_with_nested_outputs():
    m = Stage(nested, a=(4, 4), s=(4,), b=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    (dinput,) = zb.stage_backward(nested(m, x), nested_grads(), (x,))
    total = (x @ m.a).sum() + 2 * (x * m.s).sum() + 3 * (x @ m.b).sum()
    expected = torch.autograd.grad(total, [x, m.a, m.s, m.b])
    torch.testing.assert_close([dinput, m.a.grad, m.s.grad, m.b.grad], list(expected))


def test_stage_backward_of_a_loss():
    m = Stage(lambda m, x: (x @ m.a).sin().sum(), a=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    (dinput,) = zb.stage_backward(m(x), None, [x])
    expected = torch.autograd.grad(m(x), [x, m.a])
    torch.testing.assert_close([dinput, m.a.grad], list(expected))
    assert x.grad is None


def test_stage_backward_with_the_deprecated_indices():
    m = Stage(lambda m, x: (x @ m.a, x * m.s), a=(4, 4), s=(4,))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    zb.stage_backward(m(x), (None, ones(3, 4)), (x,), outputs_with_grads_idxs=[1])
    assert m.a.grad is None
    torch.testing.assert_close(m.s.grad, x.detach().sum(0))


def test_stage_backward_skips_a_branch_whose_gradient_is_none():
    m = Stage(lambda m, x: ((x @ m.a, x @ m.a), {"s": x * m.s}, x.sin()), a=(4, 4), s=(4,))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    (dinput,) = zb.stage_backward(m(x), (None, None, ones(3, 4)), (x,))
    torch.testing.assert_close(dinput, x.detach().cos())
    assert m.a.grad is None and m.s.grad is None


@pytest.mark.parametrize(
    "output_grads",
    [
        (torch.ones(3, 4, dtype=f64), {"wrong": None}),
        (torch.ones(3, 4, dtype=f64),),
        [torch.ones(3, 4, dtype=f64), torch.ones(3, 4, dtype=f64)],
        ("text", {"s": None}),
    ],
    ids=["keys", "length", "not a dict", "not a tensor"],
)
def test_stage_backward_refuses_gradients_of_another_structure(output_grads):
    m = Stage(lambda m, x: (x @ m.a, {"s": x * m.s}), a=(4, 4), s=(4,))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    with pytest.raises(RuntimeError, match="Failed to run stage backward") as failure:
        zb.stage_backward(m(x), output_grads, (x,))
    assert isinstance(failure.value.__cause__, AssertionError)
    assert m.a.grad is None and m.s.grad is None


def test_mean_squared_loss_of_a_multilayer_perceptron():
    net = nn.Sequential(nn.Linear(8, 16, dtype=f64), nn.ReLU(), nn.Linear(16, 8, dtype=f64))
    target = torch.randn(4, 8, dtype=f64)
    loss = nn.MSELoss(reduction="sum")
    check(Stage(lambda m, x: loss(m.net(x), target), net=net), (4, 8), output_grads=no_grads)


def test_cross_entropy_and_embedding_of_a_small_language_model():
    def forward(m, ids, x):
        h = m.table(ids) + x
        h = h + m.block(h)
        return F.cross_entropy(m.head(h).flatten(0, 1), ids.flatten())

    block = nn.Sequential(
        nn.LayerNorm(8, dtype=f64), nn.Linear(8, 16, dtype=f64), nn.GELU(), nn.Linear(16, 8, dtype=f64)
    )
    stage = Stage(forward, table=nn.Embedding(11, 8, dtype=f64), block=block, head=nn.Linear(8, 11, dtype=f64))
    check(stage, torch.tensor([[1, 2, 10], [0, 2, 2]]), (2, 3, 8), output_grads=no_grads)


@needs_zbpipe
def test_output_of_none_is_passed_over():
    check(Stage(lambda m, x: (x @ m.a, None), a=(4, 4)), (3, 4))
