"""Weights: shared, combined, bridged, frozen, unused, viewed, expanded; in plain products: test_dense.py."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from support import oracle
from support.oracle import Stage, case, check, fresh, needs_zbpipe, net, random_input, small, wrong_on_torch, zb
from torch import nn

pytestmark = pytest.mark.drops_groups

f64 = torch.float64
TWICE = "one backward per group over a graph that they share: backward twice"
BRIDGED = "groups that a later parameter bridges: backward twice"
ONE_TENSOR = "the two .grad are one tensor"


def linear(inputs=4, outputs=4):
    return nn.Linear(inputs, outputs, dtype=f64)


def partly_frozen():
    layers = linear(), nn.ReLU(), linear().requires_grad_(False), nn.ReLU(), linear()
    layers[4].bias.requires_grad_(False)
    return net(*layers)


def many_times(m, x):
    for _ in range(5):
        x = (x @ m.a + m.s).tanh()
    return x


def shared_computation(m, x):
    common = (m.a @ m.b).tanh()
    return (x @ common).sin() @ common + x @ m.a


def bridged_in_a_chain(m, x):
    for w in m.parameters():
        x = (x @ w).tanh()
    for w, other in zip(m.parameters(), reversed(list(m.parameters())), strict=True):
        x = x @ (w @ other)
    return x


def in_place(m, x):
    y = x @ m.a
    y.relu_()
    z = y * 2.0
    z += m.s
    z[:, 0] *= m.t[0]
    z[1].add_(m.t)
    return z.neg_().sigmoid_() @ m.a


def written_into_an_activation(m, x):
    y = x.clone()
    y[:, :2] = m.a
    y[:, 3:] = x[:, 3:] @ m.b
    return y * x


def parts_of_one_weight(m, x):
    q, k, v = m.qkv.chunk(3)
    return ((x @ q) @ (x @ k).t()).softmax(-1) @ (x @ v) + x @ m.qkv[2:6] + x @ m.qkv.t()[:, :4]


@oracle.table(
    # Layers.
    case("linear", net(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), random_input(5, 4), exact=True),
    case("linear, existing gradients", net(linear(4, 8), nn.ReLU(), linear(8, 2)), (5, 4), existing=True),
    case("linear, ten microbatches", net(linear(4, 8), nn.ReLU(), linear(8, 4)), microbatches=10),
    case(
        "linear of three dimensions without bias",
        net(nn.Linear(4, 4, bias=False), nn.GELU(), nn.Linear(4, 3, bias=False)),
        random_input(2, 5, 4),
        exact=True,
    ),
    case(
        "convolutions and norms",
        net(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.GroupNorm(2, 4)),
        random_input(2, 2, 8, 8),
        exact=True,
    ),
    case("layer norm and scales", lambda m, x: F.layer_norm(x * m.s, (4,), m.t, m.a[0]) + m.b[0]),
    case(
        "transformer block",
        net(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)),
        random_input(2, 5, 8),
    ),
    case("dropout takes the same mask", net(linear(8, 8), nn.Dropout(0.5), linear(8, 8)), (4, 8)),
    case("weight norm", net(nn.utils.parametrizations.weight_norm(linear()), nn.Tanh())),
    # Of several uses, or computed.
    case("many times on one path", many_times, wrong=TWICE),
    case(
        "tied embedding and head",
        Stage(lambda m, ids, x: (F.embedding(ids, m.table) + x).tanh() @ m.table.t(), table=(7, 4)),
        torch.tensor([1, 2, 2, 6]),
        (4, 4),
    ),
    case("sum of two", lambda m, x: x @ (m.a + m.b), wrong=ONE_TENSOR),
    case("two added to one activation", lambda m, x: (x + m.a + m.b).sin(), (4, 4), wrong=ONE_TENSOR),
    case(
        "long computation on weights alone",
        lambda m, x: x @ (m.a @ (m.b * m.s).tanh() + m.a.t()).softmax(-1),
        wrong="the gradients' layout contract is not kept",
    ),
    case("own computation shared by two products", shared_computation),
    case(
        "parts of one",
        Stage(parts_of_one_weight, qkv=(12, 4)),
        (4, 4),
        wrong="two uses of one weight through views bridge groups",
        always=False,
    ),
    case(
        "groups bridged by a later one",
        lambda m, x: x * m.a + x.sin() * m.b + x.cos() * (m.a * m.c) + x.exp() * (m.b * m.c),
        (4, 4),
        wrong=BRIDGED,
        always=False,
    ),
    case(
        "groups bridged by a later one through products",
        lambda m, x: x @ m.a + x.sin() @ m.b + x.cos() @ (m.a @ m.c) + x.exp() @ (m.b @ m.c),
        wrong=BRIDGED,
        always=False,
    ),
    case(
        "groups bridged in a chain",
        Stage(bridged_in_a_chain, p=(4, 4), q=(4, 4), r=(4, 4), s=(4, 4)),
        wrong=BRIDGED,
        always=False,
    ),
    case(
        "regulariser",
        lambda m, x: (x @ m.a).sum() + 0.1 * m.a.pow(2).sum() + 0.2 * m.b.abs().sum(),
        output_grads=oracle.no_grads,
    ),
    case("norm of one not used otherwise", lambda m, x: (x @ m.a).sum() * m.s.norm(), output_grads=oracle.no_grads),
    # Frozen, unused, not listed.
    case("frozen", partly_frozen()),
    case("all frozen", net(linear().requires_grad_(False))),
    case("one of four listed", lambda m, x: (x @ m.a).sin() @ m.b + m.s, weights=lambda m: [m.a]),
    case("not listed beside one that is", lambda m, x: x @ (m.a + m.b) * m.s, weights=lambda m: [m.a]),
    case("none listed", lambda m, x: x @ m.a, weights=lambda m: []),
    case("listed twice", lambda m, x: x @ m.a, weights=lambda m: [m.a, m.a]),
    case(
        "None for every accumulating leaf",
        lambda m, x: (x @ m.a).sin() @ (m.b + m.c) * m.s,
        weights=None,
        wrong="weights=None is not iterable",
    ),
    # In place, views, layouts.
    case("in place", in_place, wrong=TWICE),
    case("written into an activation", Stage(written_into_an_activation, a=(3, 2), b=(1, 1))),
    case("expanded", lambda m, x: torch.bmm(x, m.a.expand(3, 4, 4)) + m.s.expand(3, 2, 4), (3, 2, 4)),
    case("broadcast", Stage(lambda m, x: x * m.s + m.t[:, None], s=(1,), t=(3,))),
    case(
        "not contiguous",
        Stage(
            lambda m, x: (x @ m.w).sin() + F.linear(x[:, :4], m.v),
            w=nn.Parameter(torch.randn(4, 6, dtype=f64).t()),
            v=(4, 4),
        ),
        (3, 6),
    ),
    case("channels last", net(nn.Conv2d(2, 4, 3, dtype=f64).to(memory_format=torch.channels_last)), (2, 2, 5, 5)),
    case(
        "expanded gradient",
        lambda m, x: (x * m.a + m.b).sum(),
        (4, 4),
        output_grads=oracle.no_grads,
        wrong=".grad is an expanded tensor",
    ),
    case("a view that is a leaf", Stage(lambda m, x: x @ m.a, a=nn.Parameter(torch.randn(16, dtype=f64).view(4, 4)))),
    case("one element", Stage(lambda m, x: (x * m.s).sin() + m.t, s=oracle.weight(), t=oracle.weight(1))),
    case("shares no gradient with an input", lambda m, x: (x + m.a) * 2.0, (4, 4), wrong="they share one .grad"),
    # Products.
    case(
        "baddbmm, alpha and beta",
        Stage(lambda m, x: torch.baddbmm(m.b, x, m.a, alpha=0.5, beta=2.0), a=(2, 4, 4), b=(2, 3, 4)),
        (2, 3, 4),
    ),
    case("on the left", Stage(lambda m, x: m.b @ (m.a @ x).sin(), a=(5, 4), b=(2, 5)), (4, 3)),
    case(
        "batched",
        Stage(lambda m, x: torch.einsum("bij,bjk->bik", x, m.a).sin() @ m.b, a=(2, 4, 5), b=(5, 3)),
        (2, 3, 4),
    ),
    case("with vectors", lambda m, x: torch.outer(m.a @ x, m.s) + (x @ m.a.t()).dot(m.s), (4,)),
    case(
        "bilinear layer and einsum of two",
        Stage(
            lambda m, x, y: torch.einsum("bo,oi,ij->bj", m.layer(x, y), m.a, m.b),
            layer=nn.Bilinear(4, 3, 5, dtype=f64),
            a=(5, 2),
            b=(2, 3),
        ),
        (6, 4),
        (6, 3),
        wrong="an output that is a view",
    ),
    *(
        case(
            f"transposed bias of addmm, {rows} x {columns}",
            Stage(lambda m, x: torch.addmm(m.b.t(), x, m.w), b=(columns, rows), w=(4, max(columns, 4))),
            (max(rows, 3), 4),
            wrong="the gradient has other strides than the weight",
            always=False,
        )
        for rows, columns in ((4, 4), (3, 5), (1, 5), (3, 1))
    ),
    case("one transposed as bias and matrix of addmm", lambda m, x: torch.addmm(m.a.t(), x, m.a.t()), (4, 4)),
    # The product's input needs no gradient; the node is a split node by its bias alone.
    *(
        case(f"{name} of data, added to an activation", Stage(forward, w=w), bias, torch.randn(data, dtype=f64))
        for name, forward, bias, data, w in (
            ("baddbmm", lambda m, x, d: torch.baddbmm(x, d, m.w), (2, 3, 5), (2, 3, 4), (2, 4, 5)),
            ("baddbmm, on the left,", lambda m, x, d: torch.baddbmm(x, m.w, d), (2, 3, 5), (2, 4, 5), (2, 3, 4)),
            ("baddbmm_", lambda m, x, d: x.clone().baddbmm_(d, m.w), (2, 3, 5), (2, 3, 4), (2, 4, 5)),
            ("addmm", lambda m, x, d: torch.addmm(x, d, m.w, beta=2), (3, 5), (3, 4), (4, 5)),
        )
    ),
)
def test_weights(stage, inputs, options):
    check(stage, *inputs, **options)


def test_leaf_outside_weights_and_inputs_that_no_module_owns():
    loose, x = fresh(), fresh()
    m = small(lambda m, x: (x * loose) @ m.a)
    oracle.both_passes(m, x)
    assert loose.grad is None
    torch.testing.assert_close(m.a.grad, (x * loose).detach().t() @ torch.ones(3, 4, dtype=f64))


def used_up(m):
    iterator = m.parameters()
    list(iterator)
    return iterator


ELSEWHERE = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)  # of another stage


@needs_zbpipe
@pytest.mark.parametrize(
    ("given", "warns"),
    [
        (lambda m: ELSEWHERE[0].parameters(), True),
        (used_up, True),
        (lambda m: [*ELSEWHERE[0].parameters(), *ELSEWHERE[1].parameters()], False),
        (lambda m: [*ELSEWHERE[0].parameters(), m.a], False),
        (lambda m: [], False),
        (lambda m: None, False),
    ],
    ids=["another stage's", "an iterator that is used up", "some frozen", "one in the graph", "none", "all"],
)
def test_weights_of_which_none_is_in_the_graph_are_warned_of(given, warns):
    m = Stage(lambda m, x: (x @ m.a).sin() @ m.b, a=(4, 4), b=(4, 4))
    x = fresh()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = m(x)
        (dx,), _ = zb.stage_backward_input([out], [torch.ones_like(out)], [x], given(m))
    words = ["none of the 2 leaves that it reaches beside the inputs"] if warns else []
    assert [word in str(warning.message) for word, warning in zip(words, said, strict=True)] == [True] * warns
    assert x.grad is dx is not None


@needs_zbpipe
def test_nothing_is_said_of_weights_elsewhere_if_the_graph_has_none_either():
    """A layer without weights: the graph reaches the input alone."""
    x = fresh()
    out = x.sin()
    zb.stage_backward_input([out], [torch.ones_like(out)], [x], ELSEWHERE[0].parameters())


@needs_zbpipe
def test_a_warning_of_weights_elsewhere_that_is_an_error_changes_nothing():
    m = Stage(lambda m, x: x @ m.a, a=(4, 4))
    x = fresh()
    out = m(x)
    with pytest.raises(RuntimeError) as caught:
        zb.stage_backward_input([out], [torch.ones_like(out)], [x], ELSEWHERE[0].parameters())
    assert isinstance(caught.value.__cause__, UserWarning) and x.grad is None
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], None)  # as it says
    zb.stage_backward_weight(None, groups)
    assert m.a.grad is not None


@wrong_on_torch("weights=None is not iterable")
def test_weights_none_reaches_leaves_that_no_module_owns():
    loose, x = fresh(4, 4), fresh()
    out = (x @ loose).sin()
    dinputs, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], None)
    assert loose.grad is None
    zb.stage_backward_weight(None, groups)
    expected = torch.autograd.grad((x @ loose).sin().sum(), [x, loose])
    torch.testing.assert_close([dinputs[0], loose.grad], list(expected))


@pytest.mark.parametrize(
    "microbatches", [pytest.param(1, marks=wrong_on_torch("returns what was there before")), 2], ids=["first", "second"]
)
def test_weights_return_value_is_the_current_gradients(microbatches):
    m = Stage(lambda m, x: x @ m.a + m.b, a=(4, 4), b=(4,), never=(2,))
    for _ in range(microbatches):
        _, groups = oracle.input_pass(m, fresh())
        returned = zb.stage_backward_weight(m.parameters(), groups)
    assert type(returned) is tuple
    assert returned[2] is None
    assert returned[0] is m.a.grad is not None
    torch.testing.assert_close(list(returned[:2]), [m.a.grad, m.b.grad])


@needs_zbpipe
@pytest.mark.parametrize("watched", [False, True])
def test_weight_frozen_between_the_passes_gets_nothing(watched):
    """As from an accumulator in an ordinary backward; on both ways of adding, over an existing gradient."""
    m = Stage(lambda m, x: x @ m.a + m.b, a=(4, 4), b=(4,))
    if watched:
        m.a.register_hook(lambda grad: None)
    m.a.grad = torch.ones(4, 4, dtype=f64)
    _, groups = oracle.input_pass(m, fresh())
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
    check(small(oracle.sharing(compute)), (3, 4), microbatches=3, orders=(*oracle.ORDERS, oracle.one_weight_pass))


@pytest.mark.parametrize("order", [*oracle.ORDERS, oracle.one_weight_pass], ids=lambda order: order.__name__)
def test_hook_on_a_weight_below_a_shared_computation_gets_each_microbatch_by_itself(order):
    """A clamp of the sum is not the sum of the clamps."""

    def setup(m):
        m.a.register_hook(lambda grad: m.records.setdefault("calls", []).append(1))
        m.a.register_hook(lambda grad: grad.clamp(-0.5, 0.5))

    check(small(oracle.sharing(lambda m: m.a + 1.0)), (3, 4), setup=setup, orders=(order,))


def under_one_autocast(run):
    """The cast of each weight is cached until the outermost block ends."""
    with oracle.bfloat16_autocast():
        for k in run.microbatches:
            run.forward(k)
    for k in run.microbatches:
        run.input(k)
    run.weights_of_all()


@wrong_on_torch("accumulators do not run")
def test_casts_cached_by_one_autocast_block_around_all_forwards():
    def setup(m):
        for name, w in m.named_parameters():
            w.register_post_accumulate_grad_hook(lambda w, name=name: m.records.setdefault(name, []).append(1))

    check(
        net(nn.Linear(8, 8), nn.Linear(8, 8)),
        random_input(4, 8),
        setup=setup,
        orders=(under_one_autocast,),
        forward_context=oracle.bfloat16_autocast,
        rtol=2e-2,
        atol=2e-2,
    )


@wrong_on_torch("the whole graph lives until W, with the old weights")
@pytest.mark.parametrize(
    ("stage", "shape"),
    [
        (net(linear(4, 3)), (3, 4)),
        (net(nn.Conv1d(2, 3, 2, dtype=f64)), (2, 2, 5)),
        (Stage(lambda m, x: torch.bmm(x, m.w), w=(2, 4, 3)), (2, 3, 4)),
    ],
    ids=["linear", "convolution", "bmm"],
)
def test_weights_stepped_in_place_between_two_weight_passes(stage, shape):
    def stepping(run):
        run.inputs_of_all()
        for k in run.microbatches:
            run.weight(k)
            with torch.no_grad():
                for w in run.stage.parameters():
                    w.add_(1.0)

    check(stage, shape, orders=(stepping,))


# weights that somebody takes away between the two passes, as ZeRO-3 and streamed layers do


def emptied(p):
    p.data = torch.empty(0, dtype=p.dtype)


def freed(p):
    p.untyped_storage().resize_(0)


TAKEN = {
    "a matrix, its data emptied": (lambda m, x: x @ m.a, emptied, "to a weight that has become float64\\[0\\]"),
    "a matrix, its memory freed": (lambda m, x: x @ m.a, freed, None),
    "a transposed matrix and a bias": (lambda m, x: F.linear(x, m.a, m.s), freed, None),
    "a convolution": (lambda m, x: F.conv1d(x[None], m.a[:, :3, None], m.s), freed, None),
    "a convolution's own weight": (lambda m, x: F.conv1d(x[None, :, :3].mT, m.a[..., None][:, :3], m.s), freed, None),
    "one that computes another": (lambda m, x: x @ m.a.sin(), freed, "reads the values of float64.* in SinBackward0"),
    "two factors": (lambda m, x: x * 1 + (m.a @ m.b)[:3], freed, "reads the values of float64.* in MmBackward0"),
}


@needs_zbpipe
@pytest.mark.parametrize("name", TAKEN)
def test_weights_that_are_taken_away_between_the_passes(name):
    forward, take, refusal = TAKEN[name]
    m = small(forward)
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    expected = torch.autograd.grad(forward(m, x).sum(), [m.a, m.s], allow_unused=True)
    out = forward(m, x)
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    data = [p.data for p in m.parameters()]
    values = [p.detach().clone() for p in m.parameters()]
    for p in m.parameters():
        take(p)
    if refusal is not None:
        with pytest.raises(RuntimeError, match=refusal):
            zb.stage_backward_weight(m.parameters(), groups)
        assert all(p.grad is None for p in m.parameters())
        for p, whole, value in zip(m.parameters(), data, values, strict=True):  # the advice
            p.data = whole
            p.untyped_storage().resize_(value.nbytes)
            with torch.autograd._unsafe_preserve_version_counter(p), torch.no_grad():
                p.copy_(value)
    zb.stage_backward_weight(m.parameters(), groups)
    for p, grad in zip([m.a, m.s], expected, strict=True):
        torch.testing.assert_close(p.grad, grad)


READING = {
    "an elementwise product": (lambda m, x: x * m.s, "MulBackward0"),
    "a norm": (lambda m, x: F.layer_norm(x, (4,), m.s, m.t), "NativeLayerNormBackward0"),
    "a product": (lambda m, x: x @ m.a, "MmBackward0"),
}


@needs_zbpipe
@pytest.mark.parametrize("name", READING)
def test_an_activation_that_was_freed_between_the_passes_is_refused(name):
    forward, node = READING[name]
    m = small(forward)
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    with zb.policy(defer="all"):
        _, groups = zb.stage_backward_input([out := m(x)], [torch.ones_like(out)], [x], m.parameters())
    freed(x)
    with pytest.raises(RuntimeError, match=rf"reads the values of float64\[3, 4\] .* in {node}, and their memory"):
        zb.stage_backward_weight(m.parameters(), groups)
    assert all(p.grad is None for p in m.parameters())


# what lies between a product, or a node that I ran whole, and its weight


def of_dtype(dtype, grad_dtype):
    """A weight and a bias that are cast; ``grad_dtype`` is what torch lets their gradients be, None for anything."""

    def make():
        w, b = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((8, 8), (8,)))
        w.grad_dtype = b.grad_dtype = grad_dtype
        other = torch.bfloat16 if dtype == torch.float32 else torch.float32
        return [w, b], lambda x: torch.addmm(b.to(other), x.to(other), w.to(other)).float()

    return make


def as_complex():
    w, b = (torch.randn(8, requires_grad=True) for _ in range(2))
    return [w, b], lambda x: (torch.fft.fft(x) * w.to(torch.complex64) + b.to(torch.complex64)).abs()


def compressed(product):
    def make():
        w = torch.randn(8, 8).relu().to_sparse_csr().requires_grad_()
        return [w], lambda x: product(x, w)

    return make


LEADING = {
    f"a cast of {dtype} whose gradient is {grad_dtype}": of_dtype(dtype, grad_dtype)
    for dtype in (torch.bfloat16, torch.float32)
    for grad_dtype in (None, torch.float32, torch.bfloat16)
}
LEADING |= {
    "a cast to complex": as_complex,
    "a matrix in CSR": compressed(lambda x, w: (w @ x.mT).mT),
    "a matrix in CSR and a vector": compressed(lambda x, w: (w @ x[0]) + x),
}


@needs_zbpipe
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("choices", [{}, {"defer": "all"}, {"defer": "nothing"}], ids=["", "all", "nothing"])
@pytest.mark.parametrize("name", LEADING)
def test_what_leads_to_a_weight(name, choices):
    sides = []
    for is_split in (False, True):
        torch.manual_seed(0)
        weights, forward = LEADING[name]()
        for _ in range(3):
            x = torch.randn(6, 8, requires_grad=True)
            out = forward(x)
            if is_split:
                with zb.policy(**choices):
                    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], weights)
                zb.stage_backward_weight(weights, groups)
            else:
                out.backward(torch.ones_like(out))
        sides.append([w.grad for w in weights])
    for one, other in zip(*sides, strict=True):
        assert one.dtype == other.dtype and one.layout == other.layout
        assert torch.equal(one.to_dense(), other.to_dense())
        assert one.layout != torch.strided or one.stride() == other.stride()


@needs_zbpipe
@pytest.mark.skipif(not hasattr(torch.autograd, "enforce_grad_layout_policy"), reason="this torch enforces it always")
def test_a_grad_keeps_its_strides_where_torch_enforces_no_layout():
    u, strides = torch.randn(3, 4), []
    for is_split in (False, True):
        w, x = u.clone().requires_grad_(), torch.ones(3, 4, requires_grad=True)
        out = x * w
        with torch.autograd.enforce_grad_layout_policy(False):
            if is_split:
                zb.stage_backward_weight([w], zb.stage_backward_input([out], [torch.ones(4, 3).mT], [x], [w])[1])
            else:
                out.backward(torch.ones(4, 3).mT)
        strides.append(w.grad.stride())
    assert strides[0] == strides[1]
