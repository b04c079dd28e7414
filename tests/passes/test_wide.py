"""policy(wide=True): products of 16-bit factors are added to float32 gradients without being rounded before.

The oracle is the sum in float64.
"""

import copy
import random

import pytest
import torch
from support.oracle import Stage, needs_zbpipe, zb
from torch import nn
from torch.nn import functional as F

from zbpipe import memory

pytestmark = needs_zbpipe

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def into_main_grad():
    with zb.policy(wide=True, main_grad=True):
        yield


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def parameter(*shape, dtype=bf16):
    return nn.Parameter(torch.randn(shape).to(dtype))


FORMS = {
    "linear": lambda m, x: F.linear(x, m.w),
    "matmul": lambda m, x: x @ m.w.t(),
    "weight on the left": lambda m, x: m.w @ x.t(),
    "einsum": lambda m, x: torch.einsum("td,ed->te", x, m.w),
    "bmm": lambda m, x: torch.bmm(x.view(1, *x.shape), m.w.t()[None]),
}
STEP = 3e-6  # of float32, and a little


def check_close(sum_of_products, expected, tokens):
    error = (sum_of_products.double() - expected).abs().max().item()
    assert error < STEP * tokens**0.5 * 16, error


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize("form", FORMS)
def test_random_sizes_and_layouts(form, dtype, threads):
    dice = random.Random(form)
    for _ in range(12):
        rows, columns = (dice.choice([dice.randint(2, 90), dice.randint(2, 1300)]) for _ in range(2))
        tokens = dice.choice([1, 2, dice.randint(1, 80), dice.randint(1, 1500)])
        start = torch.randn(rows, columns) if dice.random() < 0.5 else torch.randn(columns, rows).t()
        m = Stage(FORMS[form], w=parameter(rows, columns, dtype=dtype))
        m.w.main_grad = start.clone()
        expected, groups = start.double(), []
        exact = copy.deepcopy(m).double()
        for _ in range(dice.choice([1, 3])):
            x = torch.randn(tokens, columns).to(dtype).requires_grad_()
            out = m(x)
            grad = torch.randn_like(out)
            expected += torch.autograd.grad(exact(x.detach().double()), exact.w, grad.double())[0]
            groups += zb.stage_backward_input([out], [grad], [x], [m.w])[1]
        version = m.w.main_grad._version
        zb.stage_backward_weight([m.w], groups)
        check_close(m.w.main_grad, expected, tokens)
        assert m.w.main_grad._version > version


@pytest.mark.parametrize("wide", [False, True])
def test_256_and_1_is_257(wide):
    """A product of 256 and one of 1: in bfloat16 their sum is 256."""
    m = Stage(lambda m, x: x @ m.w, w=parameter(3, 3))
    m.w.main_grad = torch.zeros(3, 3)
    x = torch.tensor([[16.0] * 3, [1.0] * 3], dtype=bf16, requires_grad=True)
    out = m(x)
    _, groups = zb.stage_backward_input([out], [x.detach().clone()], [x], [m.w])
    with zb.policy(wide=wide):
        zb.stage_backward_weight([m.w], groups)
    assert m.w.main_grad.eq(257 if wide else 256).all()


def test_several_uses_are_not_rounded_in_between():
    """Their sum would be 256 in bfloat16, too."""
    m = Stage(lambda m, x, y: (x @ m.w, y @ m.w), w=parameter(3, 3))
    m.w.main_grad = torch.zeros(3, 3)
    inputs = [torch.full((1, 3), value, dtype=bf16, requires_grad=True) for value in (256.0, 1.0)]
    outs = m(*inputs)
    _, groups = zb.stage_backward_input(outs, [torch.ones_like(out) for out in outs], inputs, [m.w])
    zb.stage_backward_weight([m.w], groups)
    assert m.w.main_grad.eq(257).all()


def test_default_rounds_as_an_ordinary_backward():
    m = Stage(lambda m, x: F.linear(x, m.w), w=parameter(300, 70))
    m.w.main_grad = torch.randn(300, 70)
    x = torch.randn(20, 70).to(bf16).requires_grad_()
    grad = torch.randn(20, 300).to(bf16)
    expected = m.w.main_grad + torch.autograd.grad(m(x), m.w, grad)[0]
    _, groups = zb.stage_backward_input([m(x)], [grad], [x], [m.w])
    with zb.policy(wide=False):
        zb.stage_backward_weight([m.w], groups)
    assert torch.equal(m.w.main_grad, expected)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_grad_of_a_wider_dtype():
    m = Stage(lambda m, x: F.linear(x, m.w), w=parameter(300, 70))
    m.w.grad_dtype = f32
    m.w.grad = start = torch.randn(300, 70)
    expected, groups = start.double(), []
    for _ in range(2):
        x = torch.randn(20, 70).to(bf16).requires_grad_()
        out = m(x)
        grad = torch.randn_like(out)
        expected += grad.double().t() @ x.detach().double()
        groups += zb.stage_backward_input([out], [grad], [x], [m.w])[1]
    zb.stage_backward_weight([m.w], groups)
    assert m.w.grad is start
    check_close(m.w.grad, expected, 20)


def test_float32_weight_under_autocast():
    m = Stage(lambda m, x: F.linear(x, m.w), w=parameter(300, 70, dtype=f32))
    m.w.grad = torch.zeros(300, 70)
    x = torch.randn(20, 70, requires_grad=True)
    with torch.autocast("cpu", dtype=bf16):
        out = m(x)
    grad = torch.randn_like(out)
    _, groups = zb.stage_backward_input([out], [grad], [x], [m.w])
    zb.stage_backward_weight([m.w], groups)
    check_close(m.w.grad, grad.double().t() @ x.detach().to(bf16).double(), 20)


def test_bits_of_float32_products_are_those_without_it():
    m = Stage(lambda m, x: F.linear(x, m.w), w=parameter(600, 300, dtype=f32))
    grads = []
    x = torch.randn(20, 300, requires_grad=True)
    for wide in (False, True):
        m.w.grad = torch.ones(600, 300)
        out = m(x)
        _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], [m.w])
        with zb.policy(wide=wide):
            zb.stage_backward_weight([m.w], groups)
        grads.append(m.w.grad)
    assert torch.equal(*grads)


def test_no_temporary_of_the_weights_size():
    """Two MiB for the factors, and a strip of them per thread: here they are small; in float32 where the processor has no
    instructions of bfloat16's."""
    m = Stage(lambda m, x: F.linear(x, m.w), w=parameter(2048, 1024))
    m.w.main_grad = torch.zeros(2048, 1024)
    x = torch.randn(64, 1024).to(bf16).requires_grad_()
    out = m(x)
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], [m.w])
    with memory.record() as rec:
        zb.stage_backward_weight([m.w], groups)
    (phase,) = rec.phases
    numbers = 1024 * 64 + torch.get_num_threads() * 64 * 64
    assert phase.peak - phase.live_begin in (numbers * bf16.itemsize, numbers * f32.itemsize)


def test_failed_sweep_of_wide_products_goes_on():
    """The bias fails behind the products, which are not added again."""
    m = Stage(lambda m, x: F.linear(x, m.w, m.b), w=parameter(300, 70), b=parameter(300))
    m.w.main_grad, m.b.main_grad = torch.zeros(300, 70), torch.zeros(300)
    expected, groups = torch.zeros(300, 70, dtype=torch.float64), []
    for _ in range(3):
        x = torch.randn(20, 70).to(bf16).requires_grad_()
        out = m(x)
        grad = torch.randn_like(out)
        expected += grad.double().t() @ x.detach().double()
        groups += zb.stage_backward_input([out], [grad], [x], [m.w, m.b])[1]

    class Fails(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.add_.Tensor:
                raise torch.OutOfMemoryError("out of memory")
            return function(*args, **(kwargs or {}))

    with Fails(), pytest.raises(torch.OutOfMemoryError):
        zb.stage_backward_weight([m.w, m.b], groups)
    assert m.w.main_grad.ne(0).any()
    zb.stage_backward_weight([m.w, m.b], groups)
    check_close(m.w.main_grad, expected, 60)
