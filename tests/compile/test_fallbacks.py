"""Compiled code that is not split: it runs whole, in I, and one line says why."""

import logging

import pytest
import torch
from support.compiled import Watch, bytes_held, check_compiled, mlp, not_split, run_input
from support.functions import Product
from support.oracle import Stage, random_input, weight
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import zbpipe
from zbpipe._compile import backend as compile_backend  # to make it fail where no user's code does

pytestmark = pytest.mark.falls_back


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, logger="zbpipe")


def the_reason(caplog):
    """Of the one line that was logged."""
    (line,) = not_split(caplog)
    assert caplog.records[0].levelno == logging.WARNING
    start, reason, end = line.split(": ")[0], line.split(": ", 1)[1].rsplit("; ", 1)[0], line.rsplit("; ", 1)[1]
    assert start.startswith("the compiled graph [")
    assert end == "its weights' gradients are computed in I"
    return reason


def scale():
    return Stage(lambda m, x: x * m.matrix, matrix=weight(4, 8, dtype=torch.float32))


def test_no_product(caplog):
    check_compiled(scale(), random_input(2, 4, 8))
    assert the_reason(caplog) == "no gradient of a weight is a product of its own"


def test_vectors_alone_are_nothing_to_split(caplog):
    check_compiled(nn.LayerNorm(8), random_input(2, 8))
    assert not_split(caplog) == []


class Counting(Product):
    """Its backward changes a tensor that the forward was given."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        ctx.given.add_(1)
        return grad @ w.t(), x.t() @ grad, None


def test_side_effect_in_the_backward(caplog):
    w, calls = weight(8, 8, dtype=torch.float32), torch.zeros(())
    net = Stage(lambda m, x: Counting.apply(x, m.w, m.calls), w=w, calls=calls)
    compiled = zbpipe.compile(net, backend="aot_eager")
    for k in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        groups = run_input(net, x, compiled)
        assert net.calls == k + 1
        zbpipe.stage_backward_weight(net.parameters(), groups)
    assert the_reason(caplog) == "its backward changes a tensor in place (aten.copy_.default)"


def test_tensor_subclass(caplog):
    net, reference = nn.Linear(8, 8), nn.Linear(8, 8)
    reference.load_state_dict(net.state_dict())
    net.weight = nn.Parameter(TwoTensor(net.weight.detach(), net.weight.detach().clone()))
    compiled = zbpipe.compile(net, backend="aot_eager")
    x = torch.randn(4, 8, requires_grad=True)
    ref = x.detach().clone().requires_grad_()
    out = compiled(x)
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], net.parameters())
    zbpipe.stage_backward_weight(net.parameters(), groups)
    reference(ref).sum().backward()
    for half in (net.weight.grad.a, net.weight.grad.b):
        torch.testing.assert_close(half, reference.weight.grad)
    assert the_reason(caplog) == "it takes tensors of the subclass TwoTensor"


def test_halves_that_do_not_compile(caplog, monkeypatch):
    def fail(*args):
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(compile_backend, "_kept_values", fail)
    check_compiled(mlp(), random_input(4, 8))
    assert the_reason(caplog) == "its halves do not compile (NotImplementedError: no such kernel)"


def test_ctrl_c_while_halves_compile_leaves_the_next_input_pass_to_compile_them(monkeypatch):
    def interrupt(*args):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_backend, "_kept_values", interrupt)
    net, x = mlp(), torch.randn(4, 8, requires_grad=True)
    compiled = zbpipe.compile(net, backend="aot_eager")
    with Watch() as seen:
        with pytest.raises(KeyboardInterrupt):
            run_input(net, x, compiled)
        zbpipe.stage_backward_weight(net.parameters(), run_input(net, x, compiled))
    assert (seen.calls, seen.not_split) == (1, [])


@pytest.mark.drops_groups
def test_halves_that_hold_for_fewer_sizes_than_the_whole(caplog, monkeypatch):
    def learn(halves, strides):
        size = halves.input_half.graph.find_nodes(op="placeholder")[0].meta["val"]
        assert int(size) == 4  # which makes a guard
        return original(halves, strides)

    original = compile_backend._kept_values
    monkeypatch.setattr(compile_backend, "_kept_values", learn)
    check_compiled(mlp(), random_input(4, 8), options={"dynamic": True})
    assert the_reason(caplog) == "its halves would fit these sizes alone, and the forward fits others, too"
    net = mlp()
    compiled = zbpipe.compile(net, backend="aot_eager", dynamic=True)
    gradients = sum(w.nbytes for w in net.parameters())
    assert bytes_held(run_input(net, torch.randn(4, 8, requires_grad=True), compiled)) == gradients
    monkeypatch.undo()
    with zbpipe.policy(defer="all"):  # what was learnt is known to these halves
        assert bytes_held(run_input(net, torch.randn(4, 8, requires_grad=True), compiled)) == gradients


def test_one_line_per_graph(caplog):
    net = nn.Sequential(scale(), scale())

    def forward(x):
        x = net[0](x)
        torch._dynamo.graph_break()
        return net[1](x).sin()

    compiled = zbpipe.compile(forward, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(2, 4, 8, requires_grad=True)
        zbpipe.stage_backward_weight(net.parameters(), run_input(net, x, compiled))
    lines = not_split(caplog)
    assert len(lines) == 2
    assert len({line.split("]")[0] for line in lines}) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backend": "eager"}, ValueError, "backend is 'eager'; expected one of 'inductor', 'aot_eager'"),
        ({"recompute": 1}, TypeError, "recompute is 1; expected True or False"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        zbpipe.compile(mlp(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "aot_eager", "mode": "max-autotune"}, "aot_eager takes neither"),
        ({"options": 3}, "options is 3; expected a dictionary"),
    ],
)
def test_options_that_the_inner_compiler_does_not_take(arguments, message):
    compiled = zbpipe.compile(mlp(), **arguments)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        compiled(torch.randn(4, 8))
