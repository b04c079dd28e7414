"""Matrix products in every form that models write: what is held for W, and how W adds it."""

import contextlib

import pytest
import torch
from support.functions import FailsAt
from support.oracle import Stage, bfloat16_autocast, check, needs_zbpipe, random_input, weight, zb
from torch import nn
from torch.nn import functional as F

pytestmark = [pytest.mark.drops_groups, needs_zbpipe]

f32 = torch.float32
N, K, M = 1280, 260, 40


def parameter(*shape):
    return weight(*shape, dtype=f32)


# name: (function of stage and input, shape of the weight, shape of the input, W adds in place)
FORMS = {
    "mm": (lambda m, x: x @ m.w, (K, N), (M, K), True),
    "mm, weight on the left": (lambda m, x: m.w @ x, (N, K), (K, M), True),
    "mm, transposed weight": (lambda m, x: x @ m.w.t(), (N, K), (M, K), True),
    "mm, twice transposed": (lambda m, x: x @ m.w.t().mT.permute(1, 0), (N, K), (M, K), True),
    "addmm": (lambda m, x: torch.addmm(x[:, :1], x, m.w), (K, N), (M, K), True),
    "linear of 3 dimensions": (lambda m, x: F.linear(x, m.w), (N, K), (2, M, K), True),
    "linear of 4 dimensions": (lambda m, x: F.linear(x, m.w), (N, K), (2, 3, M, K), True),
    "linear of 1 dimension": (lambda m, x: F.linear(x, m.w), (N, K), (K,), True),
    "matmul of 4 and 2 dimensions": (lambda m, x: x @ m.w, (K, N), (2, 3, M, K), True),
    "bmm": (lambda m, x: torch.bmm(x, m.w), (9, K, 300), (9, 5, K), True),
    "bmm, weight on the left": (lambda m, x: torch.bmm(m.w, x), (9, 300, K), (9, K, 5), True),
    "bmm, transposed weight": (lambda m, x: torch.bmm(x, m.w.mT), (9, 300, K), (9, 5, K), True),
    "baddbmm": (lambda m, x: torch.baddbmm(x[:, :, :1], x, m.w), (9, K, 300), (9, 5, K), True),
    "bmm, expanded weight": (lambda m, x: torch.bmm(x, m.w.expand(4, K, 30)), (K, 30), (4, 5, K), False),
    "matmul, broadcast weight": (lambda m, x: x @ m.w, (3, K, 30), (2, 1, M, K), False),
    "viewed weight": (lambda m, x: x @ m.w.view(K, N), (K * N,), (M, K), False),
    "weight with heads": (lambda m, x: x @ m.w.flatten(1), (K, 20, N // 20), (M, K), False),
    "einsum bd,de->be": (lambda m, x: torch.einsum("bd,de->be", x, m.w), (K, N), (M, K), False),
    "einsum btd,ed->bte": (lambda m, x: torch.einsum("btd,ed->bte", x, m.w), (N, K), (2, M, K), False),
    "einsum btd,dhe->bthe": (lambda m, x: torch.einsum("btd,dhe->bthe", x, m.w), (K, 40, 30), (2, M, K), False),
    "einsum bthd,hde->bthe": (lambda m, x: torch.einsum("bthd,hde->bthe", x, m.w), (9, K, 300), (2, 5, 9, K), False),
    "einsum btd,hde->bhte": (lambda m, x: torch.einsum("btd,hde->bhte", x, m.w), (20, K, 30), (2, M, K), False),
    "tensordot": (lambda m, x: torch.tensordot(x, m.w, 1), (K, N), (2, M, K), False),
}


def stage_of(form):
    forward, shape, input_shape, _ = FORMS[form]
    return Stage(lambda m, x: forward(m, x), w=parameter(*shape)), random_input(*input_shape)


WAYS = {
    "": {"exact": True, "rtol": 1e-5, "atol": 1e-5},
    "existing": {"existing": True, "microbatches": 3, "rtol": 1e-6, "atol": 1e-5},
    "fused": {"existing": True, "microbatches": 3, "rtol": 1e-4, "atol": 1e-4},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_gradients(form, way):
    with zb.policy(fused=way == "fused"):
        check(*stage_of(form), **WAYS[way])


def passes(m, x, context=contextlib.nullcontext):
    """I of one microbatch; what W needs."""
    with context():
        out = m(x)
    grad = torch.randn_like(out)
    dinputs, groups = zb.stage_backward_input([out], [grad], [x], m.parameters())
    del out, dinputs
    return groups, grad


def largest_allocation(function):
    """Bytes of the largest block that `function` asks the allocator for."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(sizes, default=0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("form", [form for form, spec in FORMS.items() if spec[3]])
def test_product_is_added_to_the_gradient_that_is_there(form, fused):
    """By one temporary of the product's size, as in an ordinary backward; when fused by none."""
    m, make_input = stage_of(form)
    m.w.grad = torch.ones_like(m.w)
    groups, _ = passes(m, make_input())
    address = m.w.grad.data_ptr()
    with zb.policy(fused=fused):
        largest = largest_allocation(lambda: zb.stage_backward_weight(m.parameters(), groups))
    assert largest < m.w.nbytes if fused else largest == m.w.nbytes
    assert m.w.grad.data_ptr() == address


HOLDS = [form for form in FORMS if form not in ("matmul, broadcast weight", "einsum btd,hde->bhte")]


@pytest.mark.parametrize("form", HOLDS)
def test_held_are_the_input_and_the_output_gradient(form):
    m, make_input = stage_of(form)
    x = make_input()
    groups, grad = passes(m, x)
    sizes = {x.nbytes, grad.nbytes}
    assert sum(group.bytes_held for group in groups) == sum(sizes)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "expanded weight", "double", "requires grad"])
def test_gradients_of_odd_layouts(layout):
    """What the user has put into .grad is added to, or replaced, as an ordinary backward would."""

    def grad_of(w):
        if layout == "transposed":
            return torch.ones(w.shape[1], w.shape[0]).t()
        if layout == "sliced":
            return torch.ones(w.shape[0], 2 * w.shape[1])[:, ::2]
        if layout == "strided":  # it has a view in the product's shape; an expanded one has none
            return torch.zeros(len(w), 2)[:, 0]
        if layout == "requires grad":
            return torch.ones(w.shape).requires_grad_()
        return torch.ones(w.shape)

    def setup(m):
        m.w.grad = grad_of(m.w)
        m.kept_grad = m.w.grad

    dtype = torch.float64 if layout == "double" else f32
    m = Stage(lambda m, x: x @ m.w.t(), w=weight(N, K, dtype=dtype))
    if layout == "expanded weight":
        m = Stage(lambda m, x: x @ m.w, w=nn.Parameter(torch.randn(K, 1).expand(K, 4)))
    elif layout == "strided":
        m = Stage(lambda m, x: x @ m.w.view(K, N), w=parameter(K * N))
    check(m, random_input(M, K, dtype=dtype), setup=setup if layout != "double" else lambda m: None, microbatches=3)


def test_autocast_needs_the_temporaries_of_an_ordinary_backward():
    """The product in its own dtype, and that in the weight's."""
    m = Stage(lambda m, x: m.net(x).float(), net=nn.Linear(K, N, bias=False))
    m.net.weight.grad = torch.ones(N, K)
    groups, _ = passes(m, torch.randn(M, K, requires_grad=True), bfloat16_autocast)
    assert sum(group.bytes_held for group in groups) == 2 * (M * K + M * N)  # in bfloat16
    assert largest_allocation(lambda: zb.stage_backward_weight(m.parameters(), groups)) == m.net.weight.nbytes


def test_weight_root_behind_a_view_does_not_take_the_callers_gradient():
    w = parameter(16)
    grad = torch.ones(4, 4)
    _, groups = zb.stage_backward_input([w.view(4, 4)], [grad], [], [w])
    zb.stage_backward_weight([w], groups)
    w.grad.add_(1)
    assert grad.eq(1).all()


needs_grouped_mm = pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")


def routed(m, x):
    """A mixture of experts: rows sorted by expert, one grouped product."""
    offsets = torch.tensor([8, 8, 24, 32], dtype=torch.int32)
    hidden = torch._grouped_mm(x, m.up, offs=offsets)
    return torch._grouped_mm(F.silu(hidden), m.down.mT, offs=offsets)


@needs_grouped_mm
def test_what_is_held_of_grouped_products():
    m = Stage(routed, up=weight(4, 16, 64, dtype=torch.bfloat16), down=weight(4, 16, 64, dtype=torch.bfloat16))
    make_input = random_input(32, 16, dtype=torch.bfloat16)
    check(m, make_input, rtol=0, atol=0)
    groups, _ = passes(m, make_input())
    names = sorted(name for group in groups for name, *_ in group._described[2])
    assert names == ["GroupedMmBackward0"] * 2
    offsets = 4 * 4
    assert sum(group.bytes_held for group in groups) == 2 * (32 * 16 * 2 + 32 * 64 * 2) + 2 * offsets


def convolutions(m, x):
    return F.conv_transpose2d(F.conv2d(x, m.a, padding=1).relu(), m.b, stride=2)


def computed_convolution(m, x, memory_format=torch.contiguous_format):
    """The node insists on a weight though its weight gradient does not read it."""
    return F.conv2d(x.contiguous(memory_format=memory_format), m.a * 2, m.b)


def computed_in_channels_last(m, x):
    return computed_convolution(m, x, torch.channels_last)


FILTERS = {"a": (32, 8, 3, 3), "b": (32,)}
MATRICES = {"a": (3, 8, 64), "b": (3, 8, 64)}
# Stage, weights, input, and what is held beside the input and the output's gradient: elements.
HELD = {
    "convolutions": (convolutions, {"a": (6, 3, 3, 3), "b": (6, 4, 2, 2)}, (2, 3, 8, 8), 2 * 2 * 6 * 8 * 8),
    "a computed filter": (computed_convolution, FILTERS, (2, 8, 8, 8), 0),
    "a computed filter, channels last": (computed_in_channels_last, FILTERS, (2, 8, 8, 8), 0),
    "neither factor is a weight": (lambda m, x: torch.bmm(x.exp(), m.a + m.b), MATRICES, (3, 2, 8), 0),
    "scaled, of a computed weight": (
        lambda m, x: torch.addmm(x[:, :1], x, m.a * 2, alpha=3.0),
        {"a": (K, N)},
        (M, K),
        0,
    ),
}


@pytest.mark.parametrize("what", HELD)
def test_what_is_held_of_products_that_are_not_plain(what):
    forward, weights, shape, more = HELD[what]
    m = Stage(forward, **{name: parameter(*of) for name, of in weights.items()})
    check(m, random_input(*shape), rtol=1e-5, atol=1e-5)
    x = torch.randn(shape, requires_grad=True)
    groups, grad = passes(m, x)
    assert sum(group.bytes_held for group in groups) == x.nbytes + grad.nbytes + 4 * more


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("view", [False, True])
def test_weight_that_is_cast_down_and_up_again(low, existing, view):
    """Fake quantisation: the lower dtype rounds, or overflows, on the way back too."""
    shape = (16, 4) if view else (8, 8)
    m = Stage(lambda m, x: x @ m.w.to(low).to(f32).view(8, 8), w=parameter(*shape))
    check(m, random_input(16, 8), output_grads=lambda outs: [1e4 * torch.ones_like(outs[0])], existing=existing)


@pytest.mark.parametrize("outputs", [lambda m, x, c: (x @ c, c), lambda m, x, c: (c, x.sum(), c)])
def test_gradients_that_meet_at_a_cast_are_added_before_it(outputs):
    """One of them comes from a stage output."""
    m = Stage(lambda m, x: outputs(m, x, m.w.to(torch.bfloat16)), w=parameter(8, 8))
    check(m, random_input(16, 8, dtype=torch.bfloat16), rtol=0, atol=0)


PRODUCTS = tuple(getattr(torch.ops.aten, name) for name in ("mm", "bmm", "addmm_", "baddbmm_"))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("form", ["mm", "linear of 3 dimensions", "bmm", "einsum bthd,hde->bthe"])
@pytest.mark.parametrize("main_grad", [False, True])
def test_product_that_could_not_be_computed_is_added_once_by_the_next_call(form, main_grad, fused):
    m, make_input = stage_of(form)
    x = make_input()
    expected = torch.ones(m.w.shape)
    out = m(x)
    grad = torch.randn_like(out)
    expected += torch.autograd.grad(out, m.w, grad)[0]
    place = torch.ones(m.w.shape)
    setattr(m.w, "main_grad" if main_grad else "grad", place)
    with zb.policy(main_grad=main_grad, fused=fused):
        _, groups = zb.stage_backward_input([m(x)], [grad], [x], [m.w])
        for _ in range(2):
            with FailsAt(0, *PRODUCTS), pytest.raises(torch.OutOfMemoryError):
                zb.stage_backward_weight([m.w], groups)
            assert place.eq(1).all()
        zb.stage_backward_weight([m.w], groups)
    torch.testing.assert_close(place, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("hooked", [False, True], ids=["as it was", "with a hook on the way since"])
def test_microbatch_that_was_added_is_not_added_again(hooked):
    """W of two microbatches fails at the second one's product."""
    w = parameter(8, 6)
    xs = [make() for make in (random_input(3, 6), random_input(5, 6))]
    grads = [torch.randn(x.shape[0], 8) for x in xs]
    w.grad = torch.zeros_like(w)
    groups, ways = [], []
    for x, grad in zip(xs, grads, strict=True):
        ways.append(w.t())
        groups += zb.stage_backward_input([x @ ways[-1]], [grad], [x], [w])[1]
    with FailsAt(1, *PRODUCTS), pytest.raises(torch.OutOfMemoryError):
        zb.stage_backward_weight([w], groups)
    assert w.grad.ne(0).any()
    for way in ways if hooked else ():
        way.grad_fn.register_prehook(lambda grads: None)
    zb.stage_backward_weight([w], groups)
    torch.testing.assert_close(w.grad, sum(grad.t() @ x.detach() for x, grad in zip(xs, grads, strict=True)))


@pytest.mark.parametrize("form", ["mm", "bmm"])
def test_gradient_whose_elements_share_memory_is_refused_as_by_torch(form):
    m, make_input = stage_of(form)
    m.w.grad = torch.zeros([1] * m.w.dim()).expand(m.w.shape)
    groups, _ = passes(m, make_input())
    with pytest.raises(RuntimeError, match="single memory location"):
        zb.stage_backward_weight([m.w], groups)
    assert m.w.grad.eq(0).all()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16, f32])
def test_gradient_of_another_dtype_than_the_weight(grad_dtype):
    def setup(m):
        m.w.grad_dtype = grad_dtype
        m.w.grad = torch.ones(K, N, dtype=torch.bfloat16 if grad_dtype is not f32 else f32)

    check(Stage(lambda m, x: x @ m.w, w=parameter(K, N)), random_input(M, K), setup=setup, microbatches=3)


class Recording(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_a_mode_sees_every_operator_of_a_product():
    m = Stage(lambda m, x: x @ m.w, w=parameter(6, 4))
    m.w.grad = torch.ones_like(m.w)
    groups, _ = passes(m, random_input(8, 6)())
    with Recording() as record:
        zb.stage_backward_weight(m.parameters(), groups)
    assert record.operators == ["transpose", "mm", "add_"]


@pytest.mark.parametrize("form", ["negated", "strided", "expanded"])
def test_a_factor_that_is_transposed_by_a_stride_or_a_flag(form):
    def factor(x):
        if form == "negated":
            return torch.complex(x, x.tanh()).conj().imag
        return torch.cat([x, x.sin()], 1)[:, ::2] if form == "strided" else x[:1].expand_as(x)

    check(Stage(lambda m, x: (factor(x) @ m.w).tanh(), w=parameter(6, 4)), random_input(8, 6), existing=True)
