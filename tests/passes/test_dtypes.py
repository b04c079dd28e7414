"""Dtypes, layouts, shapes and surroundings: complex, half, sparse, empty, autocast, no_grad, inference and anomaly mode."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from support.oracle import Stage, at_once, check, late, needs_zbpipe, no_grads, random_input, weight, wrong_on_torch, zb
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

f64 = torch.float64


@wrong_on_torch("one backward per group over a graph that they share: backward twice")
def test_complex_weights_and_inputs():
    def forward(m, x):
        return (x @ m.a).sin() * m.b @ m.a.conj().t()

    inp = random_input(3, 4, dtype=torch.complex128)
    check(Stage(forward, a=weight(4, 4, dtype=torch.complex128), b=weight(4, dtype=torch.complex128)), inp)


def test_complex_product_of_linear_layers():
    net = nn.Sequential(nn.Linear(4, 5, dtype=torch.complex64), nn.Linear(5, 3, dtype=torch.complex64))
    check(Stage(lambda m, x: m.net(x), net=net), random_input(6, 4, dtype=torch.complex64))


def test_real_weight_on_a_complex_activation():
    check(Stage(lambda m, x: (torch.fft.fft(x @ m.a) * m.s).abs(), a=(4, 4), s=(4,)), (3, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_linear_layers_of_each_dtype(dtype):
    net = nn.Sequential(nn.Linear(4, 8, dtype=dtype), nn.ReLU(), nn.Linear(8, 4, dtype=dtype))
    check(
        Stage(lambda m, x: m.net(x), net=net),
        random_input(3, 4, dtype=dtype),
        rtol=2e-2,
        atol=2e-2,
    )


def test_weight_cast_within_the_stage():
    """Mixed precision by hand: float32 weights, bfloat16 products."""

    def forward(m, x):
        return (x.bfloat16() @ m.a.bfloat16()).float() @ m.b

    stage = Stage(forward, a=weight(4, 4, dtype=torch.float32), b=weight(4, 4, dtype=torch.float32))
    check(stage, random_input(3, 4))


def test_sparse_gradient_of_an_embedding():
    table = nn.Embedding(10, 4, sparse=True, dtype=f64)
    check(Stage(lambda m, ids, x: m.table(ids) * x, table=table), torch.tensor([1, 1, 7]), (3, 4))


def test_sparse_gradient_beside_a_dense_one():
    table = nn.Embedding(10, 4, sparse=True, dtype=f64)
    check(Stage(lambda m, ids, x: m.table(ids) * (x @ m.a), table=table, a=(4, 4)), torch.tensor([1, 1, 7]), (3, 4))


def test_embedding_as_split_node():
    def forward(m, x):
        return F.embedding_bag(torch.tensor([[0, 1], [1, 2], [0, 0]]), m.table, per_sample_weights=x[:, :2], mode="sum")

    check(Stage(forward, table=(3, 4)), (3, 4))


@pytest.mark.parametrize("rows", [0, 1])
def test_few_or_no_rows(rows):
    net = nn.Sequential(nn.Linear(4, 8, dtype=f64), nn.ReLU(), nn.Linear(8, 4, dtype=f64))
    check(Stage(lambda m, x: m.net(x), net=net), (rows, 4))


def test_weight_without_elements():
    check(Stage(lambda m, x: torch.cat([x @ m.a, x @ m.b], 1), a=(4, 0), b=(4, 3)), (3, 4))


def test_products_over_a_dimension_of_size_zero():
    check(Stage(lambda m, x: (x @ m.a) @ m.b, a=(4, 0), b=(0, 3)), (3, 4))


@wrong_on_torch("weight and output gradient share memory")
def test_tensors_of_no_dimension():
    check(Stage(lambda m, x: (x * m.s).sin() + m.t, s=weight(), t=weight()), ())


def test_scalar_product_of_vectors():
    check(Stage(lambda m, x: x.dot(m.v) * m.s, v=(4,), s=weight()), (4,))


def bfloat16_autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_autocast():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))
    inp = random_input(5, 8)
    check(Stage(lambda m, x: m.net(x).float(), net=net), inp, forward_context=bfloat16_autocast, rtol=1e-2, atol=1e-2)


def test_autocast_of_a_weight_used_twice():
    """autocast keeps the cast weight, so that two uses share one node."""
    stage = Stage(lambda m, x: ((x @ m.a).relu() @ m.a).float(), a=weight(8, 8, dtype=torch.float32))
    check(stage, random_input(5, 8), forward_context=bfloat16_autocast, rtol=1e-2, atol=1e-2)


def test_outputs_and_inputs_of_two_dtypes():
    def forward(m, x, y):
        return (x @ m.a).float(), (y.double() @ m.a).sum()

    check(Stage(forward, a=(4, 4)), (3, 4), random_input(3, 4))


class Surroundings:
    """Runs I and W of the module under test inside a context."""

    def __init__(self, context):
        self.context = context

    def stage_backward_input(self, *args):
        with self.context():
            return zb.stage_backward_input(*args)

    def stage_backward_weight(self, *args):
        with self.context():
            return zb.stage_backward_weight(*args)


def network():
    return Stage(
        lambda m, x: m.net(x).sin() @ (m.a @ m.b) * m.s, net=nn.Linear(4, 4, dtype=f64), a=(4, 4), b=(4, 4), s=(4,)
    )


@needs_zbpipe
def test_within_no_grad():
    check(network(), (3, 4), impl=Surroundings(torch.no_grad))


def test_within_enabled_grad_results_have_no_history():
    check(network(), (3, 4), impl=Surroundings(torch.enable_grad))


@needs_zbpipe
def test_within_inference_mode():
    """What comes out must be usable outside of it, as an ordinary backward's is."""
    check(network(), (3, 4), impl=Surroundings(torch.inference_mode), orders=(at_once, late))


class PassOn(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_within_a_dispatch_mode():
    """As profilers and memory counters use."""
    check(network(), (3, 4), impl=Surroundings(PassOn))


@needs_zbpipe
def test_gradients_made_within_inference_mode_are_as_a_backwards():
    m = network()
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    reference = network()
    out, ref = m(x), reference(x)
    with torch.inference_mode():
        _, groups = zb.stage_backward_input([out], [torch.ones(3, 4, dtype=f64)], [x], m.parameters())
        zb.stage_backward_weight(m.parameters(), groups)
        torch.autograd.backward([ref], [torch.ones(3, 4, dtype=f64)])
    assert [w.grad.is_inference() for w in m.parameters()] == [w.grad.is_inference() for w in reference.parameters()]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode():
    with torch.autograd.detect_anomaly():
        check(network(), (3, 4), existing=True)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in")
@needs_zbpipe
def test_anomaly_mode_finds_a_nan_in_the_input_pass():
    with torch.autograd.detect_anomaly():
        m = Stage(lambda m, x: (x * 0.0).sqrt() @ m.a, a=(4, 4))
        x = torch.zeros(3, 4, dtype=f64, requires_grad=True)
        out = m(x)
        with pytest.raises(RuntimeError) as failure:
            zb.stage_backward_input([out], [torch.zeros_like(out)], [x], m.parameters())
    assert "nan values" in str(failure.value.__cause__)


def test_deterministic_mode():
    torch.use_deterministic_algorithms(True)
    try:
        check(network(), (3, 4))
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_warning_is_given():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(network(), (3, 4), output_grads=lambda outs: [torch.ones_like(outs[0])])


def test_mean_over_a_batch_gives_an_expanded_gradient():
    net = nn.Linear(4, 4, dtype=f64)
    check(Stage(lambda m, x: m.net(x).mean(), net=net), (3, 4), output_grads=no_grads)


@pytest.mark.parametrize("how", ["transposed", "expanded", "sliced"])
def test_output_gradient_that_is_not_contiguous(how):
    def grads(outputs):
        shape = outputs[0].shape
        return {
            "transposed": lambda: [torch.randn(shape[::-1], dtype=f64).t()],
            "expanded": lambda: [torch.randn((), dtype=f64).expand(shape)],
            "sliced": lambda: [torch.randn((shape[0], 9), dtype=f64)[:, 1 : 1 + 2 * shape[1] : 2]],
        }[how]()

    net = nn.Sequential(nn.Linear(4, 8, dtype=f64), nn.Tanh(), nn.Linear(8, 4, dtype=f64))
    check(Stage(lambda m, x: m.net(x), net=net), (3, 4), output_grads=grads)


def test_input_that_is_not_contiguous():
    def transposed():
        return torch.randn(4, 3, dtype=f64).t().requires_grad_()

    check(Stage(lambda m, x: (x @ m.a).sin() @ m.b, a=(4, 4), b=(4, 4)), transposed)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_network_on_a_gpu():
    stage = network().cuda()
    check(stage, lambda: torch.randn(3, 4, dtype=f64, device="cuda", requires_grad=True))
