"""Dtypes, layouts, shapes and surroundings: complex, half, sparse, empty, autocast, no_grad, inference and anomaly mode."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from support import oracle
from support.oracle import Stage, case, check, fresh, needs_zbpipe, net, no_grads, random_input, table, weight, zb
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

f64 = torch.float64


def linear(dtype=f64):
    return net(nn.Linear(4, 8, dtype=dtype), nn.ReLU(), nn.Linear(8, 4, dtype=dtype))


def network():
    return Stage(
        lambda m, x: m.net(x).sin() @ (m.a @ m.b) * m.s, net=nn.Linear(4, 4, dtype=f64), a=(4, 4), b=(4, 4), s=(4,)
    )


def embedding(forward, **parts):
    return Stage(forward, table=nn.Embedding(10, 4, sparse=True, dtype=f64), **parts)


def bag(m, x):
    return F.embedding_bag(torch.tensor([[0, 1], [1, 2], [0, 0]]), m.a, per_sample_weights=x[:, :2], mode="sum")


def float32s(forward, *shape):
    return Stage(forward, a=weight(*shape, dtype=torch.float32), b=weight(*shape, dtype=torch.float32))


def transposed():
    return torch.randn(4, 3, dtype=f64).t().requires_grad_()


LOW = {"rtol": 2e-2, "atol": 2e-2}
AUTOCAST = {"forward_context": oracle.bfloat16_autocast, "rtol": 1e-2, "atol": 1e-2}
IDS = torch.tensor([1, 1, 7])
OUTPUT_GRADS = {
    "transposed": lambda out: torch.randn(out.shape[::-1], dtype=f64).t(),
    "expanded": lambda out: torch.randn((), dtype=f64).expand(out.shape),
    "sliced": lambda out: torch.randn((out.shape[0], 9), dtype=f64)[:, 1 : 1 + 2 * out.shape[1] : 2],
}


@table(
    case(
        "complex",
        Stage(
            lambda m, x: (x @ m.a).sin() * m.b @ m.a.conj().t(),
            a=weight(4, 4, dtype=torch.complex128),
            b=weight(4, dtype=torch.complex128),
        ),
        random_input(3, 4, dtype=torch.complex128),
        wrong="one backward per group over a graph that they share: backward twice",
    ),
    case(
        "complex linear layers",
        net(nn.Linear(4, 5, dtype=torch.complex64), nn.Linear(5, 3, dtype=torch.complex64)),
        random_input(6, 4, dtype=torch.complex64),
    ),
    case("real weight on a complex activation", lambda m, x: (torch.fft.fft(x @ m.a) * m.s).abs()),
    *(
        case(f"linear layers of {dtype}", linear(dtype), random_input(3, 4, dtype=dtype), **LOW)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    ),
    case(
        "weights cast within the stage",
        float32s(lambda m, x: (x.bfloat16() @ m.a.bfloat16()).float() @ m.b, 4, 4),
        random_input(3, 4),
    ),
    case(
        "autocast", net(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4)), random_input(5, 8), **AUTOCAST
    ),
    # autocast keeps the cast weight, so that two uses share one node.
    case(
        "autocast of a weight used twice",
        float32s(lambda m, x: ((x @ m.a).relu() @ m.a).float(), 8, 8),
        random_input(5, 8),
        **AUTOCAST,
    ),
    case(
        "outputs and inputs of two dtypes",
        lambda m, x, y: ((x @ m.a).float(), (y.double() @ m.a).sum()),
        (3, 4),
        random_input(3, 4),
    ),
    case("sparse gradient", embedding(lambda m, ids, x: m.table(ids) * x), IDS, (3, 4)),
    case(
        "sparse gradient beside a dense one",
        embedding(lambda m, ids, x: m.table(ids) * (x @ m.a), a=(4, 4)),
        IDS,
        (3, 4),
    ),
    case("embedding as split node", bag),
    case("no rows", linear(), (0, 4)),
    case("one row", linear(), (1, 4)),
    case("weight without elements", Stage(lambda m, x: torch.cat([x @ m.a, x @ m.b], 1), a=(4, 0), b=(4, 3))),
    case("products over no elements", Stage(lambda m, x: (x @ m.a) @ m.b, a=(4, 0), b=(0, 3))),
    case(
        "no dimension",
        Stage(lambda m, x: (x * m.s).sin() + m.t, s=weight(), t=weight()),
        (),
        wrong="weight and output gradient share memory",
    ),
    case("scalar product", Stage(lambda m, x: x.dot(m.v) * m.s, v=(4,), s=weight()), (4,)),
    case(
        "expanded gradient of a mean",
        Stage(lambda m, x: m.net(x).mean(), net=nn.Linear(4, 4, dtype=f64)),
        output_grads=no_grads,
    ),
    *(
        case(f"{how} output gradient", linear(), output_grads=lambda outs, make=make: [make(outs[0])])
        for how, make in OUTPUT_GRADS.items()
    ),
    case("transposed input", lambda m, x: (x @ m.a).sin() @ m.b, transposed),
)
def test_dtypes_and_layouts(stage, inputs, options):
    check(stage, *inputs, **options)


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


class PassOn(TorchDispatchMode):
    """As profilers and memory counters use."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


# What comes out of inference mode is usable outside of it.
OURS = [pytest.param(context, marks=needs_zbpipe) for context in (torch.no_grad, torch.inference_mode)]


@pytest.mark.parametrize("context", [*OURS, torch.enable_grad, PassOn])
def test_passes_within(context):
    check(network(), (3, 4), impl=Surroundings(context))


@needs_zbpipe
def test_gradients_made_within_inference_mode_are_as_a_backwards():
    m = network()
    x = fresh()
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


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
@needs_zbpipe
@pytest.mark.parametrize(
    ("forward", "value", "node", "number"),
    [(lambda m, x: (x * 0.0).sqrt() @ m.a * 0.0, 0.0, "Sqrt", 0), (lambda m, x: x @ m.a * 0.0, torch.inf, "Mm", 1)],
    ids=["input pass", "weight pass"],
)
def test_anomaly_mode_finds_a_nan(forward, value, node, number):
    with torch.autograd.detect_anomaly():
        m = Stage(forward, a=(4, 4))
        with pytest.raises(RuntimeError) as failure:
            oracle.both_passes(m, torch.full((3, 4), value, dtype=f64, requires_grad=True))
    assert f"{node}Backward0' returned nan values in its {number}th output" in str(
        failure.value.__cause__ or failure.value
    )
    assert m.a.grad is None


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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_network_on_a_gpu():
    stage = network().cuda()
    check(stage, lambda: torch.randn(3, 4, dtype=f64, device="cuda", requires_grad=True))
