"""To the bit: with the default policy W gives the weights what an ordinary backward gives them, in the last bit too.

In float32, over microbatches whose gradients add up: sums that are formed in another order, and products that are
multiplied the other way round, differ there.
"""

import random

import pytest
import torch
from support.functions import FailsAt
from support.oracle import Stage, check, needs_zbpipe, random_input, weight, zb
from torch import nn
from torch.nn import functional as F

pytestmark = needs_zbpipe

f32 = torch.float32
N = 48  # wide enough that BLAS blocks, narrow enough for many cases


def parameter(*shape):
    return weight(*shape, dtype=f32)


def column_major(rows, columns):
    return nn.Parameter(torch.randn(columns, rows).t())


def equal(stage, *inputs, **kwargs):
    check(stage, *inputs, existing=True, microbatches=3, exact=True, rtol=0, atol=0, **kwargs)


def is_equal(m, x, place="grad"):
    """Whether W gives m.w the bits that an ordinary backward gives it, over what is in its `grad` or `main_grad`."""
    out = m(x)
    grad = torch.randn_like(out)
    start = torch.randn(m.w.shape, dtype=m.w.dtype if place == "grad" else f32)
    expected = start + torch.autograd.grad(out, m.w, grad)[0]
    setattr(m.w, place, start.clone())
    _, groups = zb.stage_backward_input([m(x)], [grad], [x], [m.w])
    with zb.policy(main_grad=place == "main_grad"):
        zb.stage_backward_weight([m.w], groups)
    return torch.equal(getattr(m.w, place), expected)


def recurrent(m, x):
    h = x
    for _ in range(5):
        h = torch.tanh(F.linear(h, m.w, m.b))
    return h


def transposed_once(m, x):
    """The gradients of two uses meet at the transposition, and with the third's at the weight."""
    transposed = m.w.t()
    return torch.tanh((torch.tanh(x @ transposed) @ m.w).tanh() @ transposed)


def expanded_once(m, x):
    """The gradients of two uses meet before the sum over what was expanded."""
    expanded = m.w.expand(6, N, N)
    return torch.bmm(torch.tanh(torch.bmm(x.view(6, -1, N), expanded)), expanded)


def experts(m, x):
    return torch.bmm(torch.tanh(torch.bmm(x.view(6, -1, N), m.w)), m.w).tanh() @ m.w


# Other uses, and the order of their sums: test_dense.py.
SHARED = {
    "three times": lambda m, x: torch.tanh(torch.tanh(x @ m.w) @ m.w) @ m.w,
    "three times, on either side": lambda m, x: m.w @ (torch.tanh(torch.tanh(x @ m.w) @ m.w.t())[:N]),
    "recurrent, with a bias": recurrent,
    "transposed once": transposed_once,
    "expanded once": expanded_once,
}


def embedding_that_is_the_head_too(m, x):
    tokens = F.embedding(torch.arange(64) % 40, m.w)
    return F.linear(torch.tanh(F.linear(x + tokens, m.v)), m.w)


def convolution_and_scale(m, x):
    for _ in range(3):
        x = F.conv1d(F.layer_norm(x, (N,), m.s), m.w, padding=1).tanh()
    return x


# Stages of other weights, and their inputs.
OTHERS = {
    "experts": (lambda m, x: experts(m, x).sum((1, 2)), {"w": (6, N, N)}, (96, N)),
    "large": (lambda m, x: torch.tanh(torch.tanh(x @ m.w) @ m.w.t()) @ m.w, {"w": (1100, 260)}, (40, 1100)),
    "embedding": (embedding_that_is_the_head_too, {"w": (100, N), "v": (N, N)}, (64, N)),
    "convolution": (convolution_and_scale, {"w": (8, 8, 3), "s": (N,)}, (4, 8, N)),
}


@pytest.mark.parametrize("form", [*SHARED, *OTHERS])
def test_weight_of_several_uses(form):
    forward, weights, shape = OTHERS.get(form) or (SHARED[form], {"w": (N, N), "b": (N,)}, (96, N))
    equal(Stage(forward, **{name: parameter(*of) for name, of in weights.items()}), random_input(*shape))


@pytest.mark.parametrize("cache", [False, True])
def test_casts_of_a_weight_of_several_uses(cache):
    m = Stage(lambda m, x: F.linear(torch.tanh(F.linear(x, m.w)).tanh() @ m.w, m.w), w=parameter(N, N))
    equal(
        m, random_input(96, N), forward_context=lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache)
    )


@pytest.mark.parametrize(
    ("forward", "dtype"), [(SHARED["three times"], f32), (lambda m, x: F.linear(x, m.w), torch.bfloat16)]
)
def test_main_grad_gets_the_sum_which_is_rounded_to_the_weights_dtype(forward, dtype):
    m = Stage(forward, w=weight(N, N, dtype=dtype))
    assert is_equal(m, random_input(96, N, dtype=dtype)(), "main_grad")


@pytest.mark.parametrize("hooked", [False, True])
def test_hook_on_a_weight_of_several_uses_sees_the_sum(hooked):
    def setup(m):
        m.w.register_hook(m.log("w"))
        if hooked:
            m.w.register_post_accumulate_grad_hook(m.log("after", lambda w: w.grad))

    equal(Stage(SHARED["three times"], w=parameter(N, N)), random_input(96, N), setup=setup)


def test_weight_pass_that_fails_within_a_sum_is_called_again():
    """What was summed is computed again: nothing of it has reached the weight."""

    m = Stage(SHARED["three times"], w=parameter(N, N))
    x = torch.randn(96, N, requires_grad=True)
    grad = torch.randn(96, N)
    m.w.grad = torch.ones(N, N)
    expected = m.w.grad + torch.autograd.grad(m(x), m.w, grad)[0]
    _, groups = zb.stage_backward_input([m(x)], [grad], [x], [m.w])
    with FailsAt(2, torch.ops.aten.mm), pytest.raises(torch.OutOfMemoryError):
        zb.stage_backward_weight([m.w], groups)
    assert m.w.grad.eq(1).all()
    zb.stage_backward_weight([m.w], groups)
    assert torch.equal(m.w.grad, expected)


# Weights that are computed, or laid out otherwise: the layout in which a gradient is multiplied decides which call of
# BLAS the next product is.

LAYOUTS = {
    "linear, merged": lambda m, x: F.linear(x, m.w + (m.a @ m.b) * 0.5),
    "linear with a bias, merged": lambda m, x: F.linear(x, m.w + m.a @ m.b, m.c),
    "linear of 3 dimensions, merged": lambda m, x: F.linear(x.view(2, -1, N), m.w + m.a @ m.b),
    "matmul, merged": lambda m, x: x @ (m.w + m.a @ m.b),
    "weight on the left, merged": lambda m, x: (m.w + m.a @ m.b) @ x.t(),
    "transposed weight on the left, merged": lambda m, x: (m.w + m.a @ m.b).t() @ x.t(),
    "merged and used twice": lambda m, x: (lambda w: F.linear(torch.tanh(x @ w), w))(m.w + m.a @ m.b),
    "addmm, merged": lambda m, x: torch.addmm(m.c, x, (m.w + m.a @ m.b).t()),
    "scaled addmm, merged": lambda m, x: torch.addmm(m.c, x, (m.w + m.a @ m.b).t(), beta=0.5, alpha=2),
    "product of two, transposed": lambda m, x: F.linear(x, (m.a @ m.b).t()),
    "einsum, merged": lambda m, x: torch.einsum("td,ed->te", x, m.w + m.a @ m.b),
    "bmm, merged": lambda m, x: torch.bmm(x.view(2, -1, N), (m.w + m.a @ m.b).t().expand(2, N, N)),
    "baddbmm, merged": lambda m, x: torch.baddbmm(m.c, x.view(2, -1, N), (m.w + m.a @ m.b).mT.expand(2, N, N)),
}


@pytest.mark.parametrize("layout", [parameter, column_major])
@pytest.mark.parametrize("form", LAYOUTS)
def test_computed_weight(form, layout):
    m = Stage(LAYOUTS[form], w=layout(N, N), a=layout(N, 4), b=layout(4, N), c=parameter(N))
    equal(m, random_input(96, N))


PLAIN = {
    "linear": lambda m, x: F.linear(x, m.w),
    "matmul": lambda m, x: x @ m.w.t(),
    "weight on the left": lambda m, x: m.w @ x.t(),
    "column-major input": lambda m, x: F.linear(x.t().contiguous().t(), m.w),
    "einsum": lambda m, x: torch.einsum("td,ed->te", x, m.w),
    "bmm": lambda m, x: torch.bmm(x.view(2, -1, x.size(1)), m.w.t().expand(2, x.size(1), -1)),
}


def random_sizes(count, seed):
    """Each form in each layout with a row or a column; then large weights, most with few tokens, which is quick."""
    dice = random.Random(seed)
    for form in PLAIN:
        for layout in (parameter, column_major):
            yield from ((1, 600, 40, form, layout), (600, 1, 40, form, layout))
    for _ in range(count):
        large = dice.choice([dice.randint(529, 1200), 528 * dice.randint(2, 12) + dice.randint(1, 60)])
        small = int(2 ** dice.uniform(0, 10))
        tokens = int(2 ** dice.uniform(0, dice.choice([5, 9])))
        sizes = (large, small) if dice.random() < 0.5 else (small, large)
        yield (*sizes, 2 * tokens, dice.choice(list(PLAIN)), dice.choice([parameter, column_major]))


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draws(few, many):
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.long)])


@draws(25, 200)
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", [f32, torch.float64, torch.bfloat16, torch.float16])
def test_random_sizes(dtype, threads, count):
    wrong = []
    torch.manual_seed(0)
    for rows, columns, tokens, form, layout in random_sizes(count, seed=str(dtype)):
        m = Stage(PLAIN[form], w=nn.Parameter(layout(rows, columns).detach().to(dtype)))
        x = torch.randn(tokens, columns, dtype=dtype, requires_grad=True)
        if not is_equal(m, x):
            wrong.append((form, layout.__name__, rows, columns, tokens))
    assert not wrong


@pytest.mark.parametrize(("shape", "inner"), [((6, 685, 647), 33), ((5, 1055, 619), 52)])
def test_batches_that_round_otherwise_in_parts(shape, inner):
    """BLAS rounds some elements of these otherwise when it computes rows or columns of them apart."""
    m = Stage(lambda m, x: torch.bmm(x, m.w), w=nn.Parameter(torch.randn(shape, dtype=torch.float64)))
    assert is_equal(m, torch.randn(shape[0], inner, shape[1], dtype=torch.float64, requires_grad=True))


@draws(20, 100)
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_random_batches(threads, count):
    wrong = []
    dice = random.Random(threads)
    for _ in range(count):
        batch, inner, columns = dice.randint(1, 20), dice.randint(1, 700), dice.randint(1, 700)
        m = Stage(lambda m, x: torch.bmm(x, m.w), w=parameter(batch, inner, columns))
        x = torch.randn(batch, dice.randint(1, 20), inner, requires_grad=True)
        if not is_equal(m, x):
            wrong.append((batch, inner, columns, x.size(1)))
    assert not wrong
