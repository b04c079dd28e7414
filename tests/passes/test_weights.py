"""Weights: shared, combined, bridged, frozen, unused, viewed, expanded."""

import pytest
import torch
import torch.nn.functional as F
from support.oracle import (
    ORDERS,
    Stage,
    check,
    needs_zbpipe,
    no_grads,
    one_weight_pass,
    random_input,
    sharing,
    weight,
    wrong_on_torch,
    zb,
)
from torch import nn

f64 = torch.float64


def test_linear_layers_bit_for_bit():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    check(Stage(lambda m, x: m.net(x), net=net), random_input(5, 4), exact=True)


def test_linear_layers_on_top_of_existing_gradients():
    net = nn.Sequential(nn.Linear(4, 8, dtype=f64), nn.ReLU(), nn.Linear(8, 2, dtype=f64))
    check(Stage(lambda m, x: m.net(x), net=net), (5, 4), existing=True)


def test_linear_with_three_dimensions_and_no_bias():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.GELU(), nn.Linear(4, 3, bias=False))
    check(Stage(lambda m, x: m.net(x), net=net), random_input(2, 5, 4), exact=True)


def test_convolutions_and_norms_bit_for_bit():
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.GroupNorm(2, 4)
    )
    check(Stage(lambda m, x: m.net(x), net=net), random_input(2, 2, 8, 8), exact=True)


def test_layer_norm_and_scales():
    check(
        Stage(lambda m, x: F.layer_norm(x * m.scale, (4,), m.g, m.b) + m.shift, scale=(4,), g=(4,), b=(4,), shift=(4,)),
        (3, 4),
    )


def test_transformer_block():
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    check(Stage(lambda m, x: m.block(x), block=block), random_input(2, 5, 8))


def test_dropout_takes_the_same_mask():
    net = nn.Sequential(nn.Linear(8, 8, dtype=f64), nn.Dropout(0.5), nn.Linear(8, 8, dtype=f64))
    check(Stage(lambda m, x: m.net(x), net=net), (4, 8))


def test_weight_used_twice_on_one_path():
    check(Stage(lambda m, x: (x @ m.a).tanh() @ m.a, a=(4, 4)), (3, 4))


@wrong_on_torch("one backward per group over a graph that they share: backward twice")
def test_weight_used_many_times_on_one_path():
    def forward(m, x):
        for _ in range(5):
            x = (x @ m.a + m.b).tanh()
        return x

    check(Stage(forward, a=(4, 4), b=(4,)), (3, 4))


def test_weight_used_on_parallel_paths():
    check(Stage(lambda m, x: (x @ m.a).sin() * (x.cos() @ m.a), a=(4, 4)), (3, 4))


def test_weight_used_in_a_product_and_elementwise():
    check(Stage(lambda m, x: (x @ m.a) * m.a.sum(0), a=(4, 4)), (3, 4))


def test_tied_embedding_and_head():
    def forward(m, ids, x):
        return (F.embedding(ids, m.table) + x).tanh() @ m.table.t()

    check(Stage(forward, table=(7, 4)), torch.tensor([1, 2, 2, 6]), (4, 4))


@wrong_on_torch("the two .grad are one tensor")
def test_sum_of_two_weights():
    check(Stage(lambda m, x: x @ (m.a + m.b), a=(4, 4), b=(4, 4)), (3, 4))


@wrong_on_torch("the two .grad are one tensor")
def test_two_weights_added_to_one_activation():
    check(Stage(lambda m, x: (x + m.a + m.b).sin(), a=(3, 4), b=(3, 4)), (3, 4))


def test_product_of_two_weights():
    check(Stage(lambda m, x: x @ (m.a @ m.b), a=(4, 4), b=(4, 4)), (3, 4))


@wrong_on_torch("the gradients' layout contract is not kept")
def test_long_computation_on_weights_alone():
    check(Stage(lambda m, x: x @ (m.a @ (m.b * m.s).tanh() + m.a.t()).softmax(-1), a=(4, 4), b=(4, 4), s=(4,)), (3, 4))


def test_weights_own_computation_shared_by_two_products():
    def forward(m, x):
        common = (m.a @ m.b).tanh()
        return (x @ common).sin() @ common + x @ m.a

    check(Stage(forward, a=(4, 4), b=(4, 4)), (3, 4))


def test_weight_norm():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, dtype=f64))
    check(Stage(lambda m, x: m.layer(x).sin(), layer=layer), (3, 4))


@wrong_on_torch("groups that a later parameter bridges: backward twice", always=False)
def test_groups_bridged_by_a_later_weight():
    def forward(m, x):
        return x * m.a + x.sin() * m.b + x.cos() * (m.a * m.c) + x.exp() * (m.b * m.c)

    check(Stage(forward, a=(3, 4), b=(3, 4), c=(3, 4)), (3, 4))


@wrong_on_torch("groups that a later parameter bridges: backward twice", always=False)
def test_groups_bridged_by_a_later_weight_through_products():
    def forward(m, x):
        return x @ m.a + x.sin() @ m.b + x.cos() @ (m.a @ m.c) + x.exp() @ (m.b @ m.c)

    check(Stage(forward, a=(4, 4), b=(4, 4), c=(4, 4)), (3, 4))


@wrong_on_torch("groups that a later parameter bridges", always=False)
def test_groups_bridged_in_a_chain():
    def forward(m, x):
        pieces = [m.p0, m.p1, m.p2, m.p3]
        y = x
        for p in pieces:
            y = (y @ p).tanh()
        for p, q in zip(pieces, reversed(pieces), strict=True):
            y = y @ (p @ q)
        return y

    check(Stage(forward, p0=(4, 4), p1=(4, 4), p2=(4, 4), p3=(4, 4)), (3, 4))


def test_regulariser_on_weights_in_the_loss():
    def forward(m, x):
        return (x @ m.a).sum() + 0.1 * m.a.pow(2).sum() + 0.2 * m.b.abs().sum()

    check(Stage(forward, a=(4, 4), b=(4, 4)), (3, 4), output_grads=no_grads)


def test_regulariser_on_a_weight_not_used_otherwise():
    check(Stage(lambda m, x: (x @ m.a).sum() * m.b.norm(), a=(4, 4), b=(5,)), (3, 4), output_grads=no_grads)


def test_frozen_weights_get_nothing():
    net = nn.Sequential(
        nn.Linear(4, 4, dtype=f64), nn.ReLU(), nn.Linear(4, 4, dtype=f64), nn.ReLU(), nn.Linear(4, 4, dtype=f64)
    )
    net[2].requires_grad_(False)
    net[4].bias.requires_grad_(False)
    check(Stage(lambda m, x: m.net(x), net=net), (3, 4))


def test_all_weights_frozen():
    check(Stage(lambda m, x: m.net(x), net=nn.Linear(4, 4, dtype=f64).requires_grad_(False)), (3, 4))


def test_weight_unused_in_this_microbatch():
    def forward(m, x):
        return x @ (m.a if m.microbatch == 0 else m.b) + m.c

    check(Stage(forward, a=(4, 4), b=(4, 4), c=(4,), never=(4, 4)), (3, 4))


def test_unused_weight_keeps_its_old_gradient():
    check(Stage(lambda m, x: x @ m.a, a=(4, 4), never=(4, 4)), (3, 4), existing=True)


def test_leaves_that_are_not_weights_are_left_alone():
    check(Stage(lambda m, x: (x @ m.a).sin() @ m.b + m.c, a=(4, 4), b=(4, 4), c=(4,)), (3, 4), weights=lambda m: [m.a])


def test_leaf_that_is_not_a_weight_beside_one_that_is():
    check(Stage(lambda m, x: x @ (m.a + m.b) * m.c, a=(4, 4), b=(4, 4), c=(4,)), (3, 4), weights=lambda m: [m.a])


def test_leaf_outside_weights_and_inputs_that_no_module_owns():
    loose = torch.randn(3, 4, dtype=f64, requires_grad=True)
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    m = Stage(lambda m, x: (x * loose) @ m.a, a=(4, 4))
    out = m(x)
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    zb.stage_backward_weight(m.parameters(), groups)
    assert loose.grad is None
    torch.testing.assert_close(m.a.grad, (x * loose).detach().t() @ torch.ones(3, 4, dtype=f64))


def test_empty_list_of_weights():
    check(Stage(lambda m, x: x @ m.a, a=(4, 4)), (3, 4), weights=lambda m: [])


@wrong_on_torch("weights=None is not iterable")
def test_weights_none_means_every_accumulating_leaf():
    check(
        Stage(lambda m, x: (x @ m.a).sin() @ (m.b + m.c) * m.d, a=(4, 4), b=(4, 4), c=(4, 4), d=(4,)),
        (3, 4),
        weights=None,
    )


@wrong_on_torch("weights=None is not iterable")
def test_weights_none_reaches_leaves_that_no_module_owns():
    loose = torch.randn(4, 4, dtype=f64, requires_grad=True)
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = (x @ loose).sin()
    dinputs, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], None)
    assert loose.grad is None
    zb.stage_backward_weight(None, groups)
    expected = torch.autograd.grad((x @ loose).sin().sum(), [x, loose])
    torch.testing.assert_close([dinputs[0], loose.grad], list(expected))


def test_weight_listed_twice():
    check(Stage(lambda m, x: x @ m.a, a=(4, 4)), (3, 4), weights=lambda m: [m.a, m.a])


@wrong_on_torch("one backward per group over a graph that they share: backward twice")
def test_in_place_operations_on_activations():
    def forward(m, x):
        y = x @ m.a
        y.relu_()
        z = y * 2.0
        z += m.b
        z[:, 0] *= m.s[0]
        z[1].add_(m.s)
        return z.neg_().sigmoid_() @ m.a

    check(Stage(forward, a=(4, 4), b=(4,), s=(4,)), (3, 4))


def test_in_place_write_of_a_weight_into_an_activation():
    def forward(m, x):
        y = x.clone()
        y[:, :2] = m.a
        y[:, 3:] = x[:, 3:] @ m.b
        return y * x

    check(Stage(forward, a=(3, 2), b=(1, 1)), (3, 4))


@wrong_on_torch("two uses of one weight through views bridge groups", always=False)
def test_views_and_slices_of_one_fused_weight():
    def forward(m, x):
        q, k, v = m.qkv.chunk(3)
        return ((x @ q) @ (x @ k).t()).softmax(-1) @ (x @ v) + x @ m.qkv[2:6] + x @ m.qkv.t()[:, :4]

    check(Stage(forward, qkv=(12, 4)), (4, 4))


def test_expanded_weight():
    check(Stage(lambda m, x: torch.bmm(x, m.a.expand(3, 4, 4)) + m.b.expand(3, 2, 4), a=(4, 4), b=(4,)), (3, 2, 4))


def test_broadcast_weight():
    check(Stage(lambda m, x: x * m.s + m.t[:, None], s=(1,), t=(3,)), (3, 4))


def test_weight_that_is_not_contiguous_keeps_the_layout_of_its_gradient():
    w = nn.Parameter(torch.randn(4, 6, dtype=f64).t())
    check(Stage(lambda m, x: (x @ m.w).sin() + F.linear(x[:, :4], m.v), w=w, v=(4, 4)), (3, 6))


def test_weight_in_channels_last_keeps_the_layout_of_its_gradient():
    net = nn.Conv2d(2, 4, 3, dtype=f64).to(memory_format=torch.channels_last)
    check(Stage(lambda m, x: m.net(x), net=net), (2, 2, 5, 5))


@wrong_on_torch(".grad is an expanded tensor")
def test_gradient_that_is_an_expanded_tensor():
    check(Stage(lambda m, x: (x * m.s + m.t).sum(), s=(3, 4), t=(3, 4)), (3, 4), output_grads=no_grads)


def test_weight_as_bias_and_as_matrix_of_addmm():
    check(Stage(lambda m, x: torch.addmm(m.a[0], x, m.a), a=(4, 4)), (3, 4))


def test_addmm_with_alpha_and_beta():
    check(Stage(lambda m, x: torch.addmm(m.b, x, m.a, alpha=0.5, beta=2.0), a=(4, 4), b=(4,)), (3, 4))


def test_baddbmm_with_alpha_and_beta():
    check(Stage(lambda m, x: torch.baddbmm(m.b, x, m.a, alpha=0.5, beta=2.0), a=(2, 4, 4), b=(2, 3, 4)), (2, 3, 4))


def test_weight_on_the_left_of_a_product():
    check(Stage(lambda m, x: m.b @ (m.a @ x).sin(), a=(5, 4), b=(2, 5)), (4, 3))


def test_batched_products_with_weights():
    check(Stage(lambda m, x: torch.einsum("bij,bjk->bik", x, m.a).sin() @ m.b, a=(2, 4, 5), b=(5, 3)), (2, 3, 4))


def test_matrix_vector_products():
    check(Stage(lambda m, x: torch.outer(m.a @ x, m.v) + (x @ m.a.t()).dot(m.v), a=(4, 4), v=(4,)), (4,))


@wrong_on_torch("an output that is a view")
def test_bilinear_layer_and_einsum_of_two_weights():
    layer = nn.Bilinear(4, 3, 5, dtype=f64)
    check(
        Stage(lambda m, x, y: torch.einsum("bo,oi,ij->bj", m.layer(x, y), m.a, m.b), layer=layer, a=(5, 2), b=(2, 3)),
        (6, 4),
        (6, 3),
    )


def test_weight_is_a_view_that_is_a_leaf():
    flat = torch.randn(16, dtype=f64)
    a = nn.Parameter(flat.view(4, 4))
    check(Stage(lambda m, x: x @ m.a, a=a), (3, 4))


@wrong_on_torch("weight and input share one .grad")
def test_weight_gradient_of_the_first_microbatch_may_be_stolen_but_never_shared_with_inputs():
    check(Stage(lambda m, x: (x + m.a) * 2.0, a=(3, 4)), (3, 4))


def test_weights_return_value_is_the_current_gradients():
    m = Stage(lambda m, x: x @ m.a + m.b, a=(4, 4), b=(4,), never=(2,))
    for _ in range(2):
        x = torch.randn(3, 4, dtype=f64, requires_grad=True)
        out = m(x)
        _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
        returned = zb.stage_backward_weight(m.parameters(), groups)
    assert type(returned) is tuple
    assert returned[2] is None
    torch.testing.assert_close(list(returned[:2]), [m.a.grad, m.b.grad])


@wrong_on_torch("returns what was there before")
def test_weights_return_value_after_the_first_microbatch():
    m = Stage(lambda m, x: x @ m.a, a=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    (returned,) = zb.stage_backward_weight(m.parameters(), groups)
    assert returned is m.a.grad is not None


def test_ten_microbatches():
    net = nn.Sequential(nn.Linear(4, 8, dtype=f64), nn.ReLU(), nn.Linear(8, 4, dtype=f64))
    check(Stage(lambda m, x: m.net(x), net=net), (3, 4), microbatches=10)


def test_weight_of_one_element():
    check(Stage(lambda m, x: (x * m.s).sin() + m.t, s=weight(), t=weight(1)), (3, 4))


@needs_zbpipe
@pytest.mark.parametrize("watched", [False, True])
def test_weight_frozen_between_the_passes_gets_nothing(watched):
    """As from an accumulator in an ordinary backward; on both ways of adding, over an existing gradient."""
    m = Stage(lambda m, x: x @ m.a + m.b, a=(4, 4), b=(4,))
    if watched:
        m.a.register_hook(lambda grad: None)
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    m.a.grad = torch.ones(4, 4, dtype=f64)
    _, groups = zb.stage_backward_input([m(x)], [torch.ones(3, 4, dtype=f64)], [x], m.parameters())
    m.a.requires_grad_(False)
    zb.stage_backward_weight([m.a, m.b], groups)
    assert m.a.grad.eq(1).all()
    torch.testing.assert_close(m.b.grad, torch.full((4,), 3.0, dtype=f64))


@wrong_on_torch("two weights that receive one tensor share their gradients' memory", always=False)
@pytest.mark.parametrize(
    "compute",
    [lambda m: m.a + 1.0, lambda m: m.a + m.b, lambda m: (m.a + m.b) - m.a.t() + m.a],
    ids=["one weight", "two weights", "three uses"],
)
def test_weights_own_computation_shared_by_microbatches(compute):
    m = Stage(sharing(compute), a=(4, 4), b=(4, 4))
    check(m, (3, 4), microbatches=3, orders=(*ORDERS, one_weight_pass))


@pytest.mark.parametrize("order", [*ORDERS, one_weight_pass], ids=lambda order: order.__name__)
def test_hook_on_a_weight_below_a_shared_computation_gets_each_microbatch_by_itself(order):
    """A clamp of the sum is not the sum of the clamps."""

    def setup(m):
        m.a.register_hook(lambda grad: m.records.setdefault("calls", []).append(1))
        m.a.register_hook(lambda grad: grad.clamp(-0.5, 0.5))

    check(Stage(sharing(lambda m: m.a + 1.0), a=(4, 4)), (3, 4), setup=setup, orders=(order,))


def under_one_autocast(run):
    """The cast of each weight is cached until the outermost block ends."""
    with torch.autocast("cpu", torch.bfloat16):
        for k in run.microbatches:
            run.forward(k)
    for k in run.microbatches:
        run.input(k)
    run.order = list(run.microbatches)
    run.weight(0, [group for groups in run.groups for group in groups])


@wrong_on_torch("accumulators do not run")
def test_casts_cached_by_one_autocast_block_around_all_forwards():
    def setup(m):
        for name, w in m.named_parameters():
            w.register_post_accumulate_grad_hook(lambda w, name=name: m.records.setdefault(name, []).append(1))

    m = Stage(lambda m, x: m.net(x), net=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    check(
        m,
        random_input(4, 8),
        setup=setup,
        orders=(under_one_autocast,),
        forward_context=lambda: torch.autocast("cpu", torch.bfloat16),
        rtol=2e-2,
        atol=2e-2,
    )


@wrong_on_torch("the gradient has other strides than the weight", always=False)
@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (3, 5), (1, 5), (3, 1)])
def test_transposed_weight_as_bias_of_addmm(rows, columns):
    """Of the product's shape, or broadcast."""
    size = max(rows, 3)
    m = Stage(lambda m, x: torch.addmm(m.b.t(), x, m.w), b=(columns, rows), w=(4, max(columns, 4)))
    check(m, (size, 4))


def test_one_weight_transposed_as_bias_and_as_matrix_of_addmm():
    check(Stage(lambda m, x: torch.addmm(m.w.t(), x, m.w.t()), w=(4, 4)), (4, 4))


@pytest.mark.parametrize(
    ("forward", "bias", "data", "w"),
    [
        (lambda m, x, d: torch.baddbmm(x, d, m.w), (2, 3, 5), (2, 3, 4), (2, 4, 5)),
        (lambda m, x, d: torch.baddbmm(x, m.w, d), (2, 3, 5), (2, 4, 5), (2, 3, 4)),
        (lambda m, x, d: x.clone().baddbmm_(d, m.w), (2, 3, 5), (2, 3, 4), (2, 4, 5)),
        (lambda m, x, d: torch.addmm(x, d, m.w, beta=2), (3, 5), (3, 4), (4, 5)),
    ],
    ids=["baddbmm", "baddbmm left", "baddbmm_", "addmm"],
)
def test_product_of_data_and_a_weight_added_to_an_activation(forward, bias, data, w):
    """The product's input needs no gradient; the node is a split node by its bias alone."""
    check(Stage(forward, w=w), bias, torch.randn(data, dtype=f64))


@wrong_on_torch("the whole graph lives until W, with the old weights")
@pytest.mark.parametrize(
    ("forward", "parts", "shape"),
    [
        (lambda m, x: m.net(x), {"net": nn.Linear(4, 3, dtype=f64)}, (3, 4)),
        (lambda m, x: m.net(x), {"net": nn.Conv1d(2, 3, 2, dtype=f64)}, (2, 2, 5)),
        (lambda m, x: torch.bmm(x, m.w), {"w": (2, 4, 3)}, (2, 3, 4)),
    ],
    ids=["linear", "convolution", "bmm"],
)
def test_weights_stepped_in_place_between_two_weight_passes(forward, parts, shape):
    def stepping(run):
        for step in (run.forward, run.input):
            for k in run.microbatches:
                step(k)
        for k in run.microbatches:
            run.weight(k)
            with torch.no_grad():
                for w in run.stage.parameters():
                    w.add_(1.0)

    check(Stage(forward, **parts), shape, orders=(stepping,))
