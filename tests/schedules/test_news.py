"""What torch 2.15 has new around stages and schedules, while it is patched: one process trains as without a pipeline."""

import contextlib
import copy

import pytest
import torch
from support.blocks import MICROBATCHES, ZERO_BUBBLE, Block, batch
from support.pipelines import Model, Pipeline, assert_close, backwards, named
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import zbpipe
from zbpipe import memory

pytestmark = [
    pytest.mark.skipif(torch.__version__ < (2, 15), reason="new in torch 2.15"),
    pytest.mark.usefixtures("alone"),
    pytest.mark.parametrize("name", ZERO_BUBBLE),
]


def grads(parts):
    found = {name: weight.grad for name, weight in named(dict(enumerate(parts))).items()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def started(name, modules=None, shard=None, **options):
    """Two stages on this rank, and a copy of their modules."""
    modules = modules or [Block(), Block()]
    net = nn.Sequential(*copy.deepcopy(modules))
    for module in modules if shard else ():
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)), **shard)
    return Pipeline(name, modules).start(**options), net


def test_a_context_around_a_stages_forward(name):
    """It is entered around each forward, and what it says holds in I and W."""
    line, net = started(name)
    seen = []

    @contextlib.contextmanager
    def noting(info):
        seen.append((info.stage_index, info.microbatch_index, info.is_metadata_inference))
        yield

    handle = line.stages[1].register_forward_context(noting)
    with zbpipe.patch():
        line.step(*batch(0))
    backwards(net, Model(), *batch(0))
    assert_close(grads(line.parts.values()), grads(net))
    assert sorted(entry[1] for entry in seen if not entry[2]) == list(range(MICROBATCHES))
    assert {entry[0] for entry in seen} == {1}
    handle.remove()


def test_a_recording_that_watches_passes_split_microbatches_on(name):
    line, net = started(name)
    x, target = batch(0)
    with zbpipe.patch(), memory.record() as recording:
        recording.watch(line.schedule)
        line.schedule.step(
            arg_mbs=[(part,) for part in x.chunk(MICROBATCHES)],
            kwarg_mbs=[{} for _ in range(MICROBATCHES)],
            target_mbs=list(target.chunk(MICROBATCHES)),
        )
    backwards(net, Model(), x, target)
    assert_close(grads(line.parts.values()), grads(net))


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("wait_later", [False, True])
def test_gradients_summed_over_steps_that_do_not_finalize_them(name, wait_later, reshard):
    line, net = started(name, shard={"reshard_after_forward": reshard}, defer_reduce_grad_wait=wait_later)
    with zbpipe.patch():
        for number in range(3):
            line.step(*batch(number), finalize_gradients=number == 2)
            backwards(net, Model(), *batch(number))
    assert_close(grads(line.parts.values()), grads(net))


@pytest.mark.parametrize("reshard", [False, True])
def test_the_weights_in_the_graph_sum_their_gradients_in_the_dtype_that_is_reduced(name, reshard):
    """As fully_shard sets it for them (grad_dtype): bfloat16 products, float32 sums."""
    torch.manual_seed(3)
    modules = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    line, net = started(name, modules, {"mp_policy": policy, "reshard_after_forward": reshard})
    for number in range(2):
        x, target = (value.float() for value in batch(number))
        with zbpipe.patch():
            line.step(x, target)
        halves = copy.deepcopy(net).bfloat16()
        for half in halves.parameters():
            half.grad, half.grad_dtype = None, torch.float32
        backwards(halves, Model(), x.bfloat16(), target)
        for weight, half in zip(net.parameters(), halves.parameters(), strict=True):
            weight.grad = half.grad if weight.grad is None else weight.grad + half.grad
        torch.testing.assert_close(grads(line.parts.values()), grads(net), rtol=1e-5, atol=1e-5)
