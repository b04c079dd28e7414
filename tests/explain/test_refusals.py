"""What zbpipe.explain refuses, in one sentence and before anything runs; and where it works all the same."""

import pytest
import torch
from support.oracle import Stage, needs_zbpipe, weight
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import zbpipe

pytestmark = needs_zbpipe


class Counted(nn.Linear):
    calls = 0

    def forward(self, x):
        Counted.calls += 1
        return super().forward(x)


def sharded(net):
    fully_shard(net[0], mesh=init_device_mesh("cpu", (1,)))
    return fully_shard(net, mesh=init_device_mesh("cpu", (1,)))


def sharded_part(net):
    fully_shard(net[0], mesh=init_device_mesh("cpu", (1,)))
    return net


def replicated_with_fsdp(net):
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp

    return replicate_by_fsdp(net)


WRAPPED = {
    "DDP": (DistributedDataParallel, "it is replicated"),
    "a part in DDP": (
        lambda net: nn.Sequential(nn.Linear(4, 4), DistributedDataParallel(net)),
        "its part '1', a DistributedDataParallel, is replicated",
    ),
    "composable replicate": (replicate, "it is replicated"),
    "replicate by fully_shard": (replicated_with_fsdp, "it is sharded"),
    "fully_shard": (sharded, "it is sharded"),
    "fully_shard of a part": (sharded_part, "its part '0', a FSDP"),
    "a part of what fully_shard has": (
        lambda net: sharded(net)[1],
        "it belongs to a module that fully_shard has wrapped",
    ),
    "compiled": (lambda net: torch.compile(DistributedDataParallel(net), backend="eager"), "its part '_orig_mod', a "),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_modules_that_are_replicated_or_sharded(name, alone):
    wrap, way = WRAPPED[name]
    Counted.calls = 0
    module = wrap(nn.Sequential(Counted(4, 4), Counted(4, 4)))
    with pytest.raises(RuntimeError) as caught:
        zbpipe.explain(module, torch.randn(2, 4))
    message = str(caught.value)
    assert way in message and "\n" not in message
    assert message.endswith("the module before it is wrapped, the .module of a DistributedDataParallel, or a copy")
    assert Counted.calls == 0


def test_what_is_in_ddp_can_be_explained(alone):
    wrapped = DistributedDataParallel(nn.Linear(4, 4))
    explained = zbpipe.explain(wrapped.module, torch.randn(2, 4))
    assert [plan.note for plan in explained.parameters] == ["hooks watch it"] * 2
    wrapped(torch.randn(2, 4)).sum().backward()
    assert wrapped.module.weight.grad is not None


def test_tensor_parallel_parameters(alone):
    mesh = init_device_mesh("cpu", (1,))
    module = distribute_module(nn.Linear(4, 6), mesh)
    x = distribute_tensor(torch.randn(2, 4), mesh, [Replicate()])
    before = module.weight.to_local().clone()
    explained = zbpipe.explain(module, x)
    assert {plan.runs_in for plan in explained.parameters} == {"W"}
    assert torch.equal(module.weight.to_local(), before) and module.weight.grad is None
    assert "shapes and FLOPs are those of whole DTensors, of all ranks together" in explained.notes


X = torch.ones(2, 4)
GRADS = {  # the error, and what is given as output_grads of one [2, 4] output
    "output_grads is a Tensor; expected a list with a tensor or None per output": (TypeError, X),
    r"output_grads\[0\] is a float; expected a tensor or None": (TypeError, [3.0]),
    "output_grads has 2 entries; expected one for each of the 1 tensors that Counted gave": (ValueError, [None, X]),
    r"output_grads\[0\] is a float32\[3, 4\] on cpu; output 0 of Counted": (ValueError, [torch.ones(3, 4)]),
    "no gradient for an output of Counted that requires one": (ValueError, [None]),
}
BAD = {  # the error, and what is explained
    "module is a function; expected a torch.nn.M": (TypeError, lambda: (lambda x: x, X)),
    "kwargs is 3; expected a dictionary": (TypeError, lambda: (Counted(4, 4), X, 3)),
    "with strings as keys": (TypeError, lambda: (Counted(4, 4), X, {1: 2})),
    r"weight was made under torch.inference_mode\(\)": (RuntimeError, lambda: (made_for_inference(), X)),
    "the inputs are on meta and the parameters of Linear on cpu.*move the inputs": (
        RuntimeError,
        lambda: (nn.Linear(4, 4), X.to("meta")),
    ),
    "gave a Tensor with 1 tensors, none of which requires a gradient": (TypeError, lambda: (nn.Identity(), X)),
    "gave a int with 0 tensors, none of which requires a gradient": (TypeError, lambda: (Stage(lambda m, x: 3), X)),
}


@torch.inference_mode()
def made_for_inference():
    return Counted(4, 4)


@pytest.mark.parametrize("message", [*BAD, *GRADS])
def test_bad_arguments_are_refused(message):
    """Those that can be seen without it before anything runs."""
    error, what = BAD[message] if message in BAD else GRADS[message]
    Counted.calls = 0
    with pytest.raises(error, match=message):
        zbpipe.explain(*what(), first_stage=True) if message in BAD else zbpipe.explain(
            Counted(4, 4), X, output_grads=what
        )
    assert Counted.calls == (error is ValueError)


def test_lazy_modules_stay_lazy():
    module = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(
        RuntimeError,
        match=r"0\.weight is a UninitializedParameter, to be made by the first.*run the Sequential once before",
    ):
        zbpipe.explain(module, torch.ones(2, 4))
    assert type(module[0]) is nn.LazyLinear
    module(torch.ones(2, 4))
    assert zbpipe.explain(module, torch.ones(2, 4)).parameters[0].shape == (3, 4)


def test_an_output_without_a_gradient():
    module = Stage(lambda m, x: (x @ m.a, x @ m.b), a=(4, 4), b=(4, 4))
    x = torch.ones(2, 4, dtype=torch.float64)
    explained = zbpipe.explain(module, x, output_grads=[None, torch.ones(2, 4, dtype=torch.float64)])
    assert {plan.name: (plan.runs_in, plan.note) for plan in explained.parameters} == {
        "a": ("", "no gradient reaches it"),
        "b": ("W", ""),
    }


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_within_modes_that_record_no_gradients(mode):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    expected = zbpipe.explain(module, torch.ones(2, 4)).as_dict()
    with mode():
        found = zbpipe.explain(module, torch.ones(2, 4))
        assert torch.is_inference_mode_enabled() is (mode is torch.inference_mode) and not torch.is_grad_enabled()
    assert found.as_dict() == expected
    assert torch.equal(module[1].running_mean, torch.zeros(4))


def test_on_the_meta_device():
    """A plan without memory: bytes and FLOPs are those of the real module."""
    build = lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))  # noqa: E731
    with torch.device("meta"):
        module, x = build(), torch.empty(3, 4)
    assert zbpipe.explain(module, x).as_dict() == zbpipe.explain(build(), torch.randn(3, 4)).as_dict()


@pytest.mark.parametrize("compiler", ["torch", "zbpipe"])
def test_compiled_modules(compiler):
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    compiled = (torch.compile if compiler == "torch" else zbpipe.compile)(net, backend="aot_eager")
    explained = zbpipe.explain(compiled, torch.randn(2, 4))
    assert {plan.runs_in for plan in explained.parameters} == ({"I"} if compiler == "torch" else {"W"})
    assert explained.flops_are_known is (compiler == "torch")  # there is nothing in W to be known
    compiled(torch.randn(2, 4)).sum().backward()
    assert net[0].weight.grad is not None


class Scaling(nn.Linear):
    def forward(self, x, *, scale):
        return {"out": [super().forward(x) * scale], "name": "x"}


def of_one(forward, inputs=X, dtype=torch.float32):
    """A stage of one matrix, whose gradient W computes."""
    return (lambda: (Stage(forward, a=weight(4, 4, dtype=dtype)), inputs)), {"a": "W"}


ODD = {
    "no parameters": (lambda: (nn.Tanh(), X), {}),
    "outputs that are no tensors": of_one(lambda m, x: {"y": (x @ m.a, None), "n": 3}),
    "an output that needs no gradient": of_one(lambda m, x: (x @ m.a, x.argmax())),
    "complex": of_one(lambda m, x: x.to(m.a.dtype) @ m.a, dtype=torch.complex64),
    "an input that is the output": of_one(lambda m, x: (x, x @ m.a)),
    "a dictionary": of_one(lambda m, d: d["x"] @ m.a, {"x": X}),
    "arguments by name, and nested outputs": (
        lambda: (Scaling(4, 4), X, {"scale": torch.tensor(2.0)}),
        {"weight": "W", "bias": "W"},
    ),
    "an input twice": of_one(lambda m, x, y: x @ m.a @ y.T, [X] * 2),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_modules(name):
    build, where = ODD[name]
    explained = zbpipe.explain(*build())
    assert {plan.name: plan.runs_in for plan in explained.parameters} == where
    assert str(explained)
