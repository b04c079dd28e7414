"""What torch 2.15 has new around stages and schedules, while it is patched: each trains as one process without."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from support.blocks import MICROBATCHES, Block, batch, loss_function, reference
from support.processes import folder_of, results
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

import zbpipe
from zbpipe import memory

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 15), reason="new in torch 2.15")
ZERO_BUBBLE = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
WORLD = 2

folder = folder_of("schedules/news_ranks.py", WORLD)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_split_microbatches_and_actions_that_wait_for_sends(name, folder):
    """WAIT_SEND_F and WAIT_SEND_B are in the order of actions, and what they wait for is."""
    ranks = results(folder, name, WORLD)
    for rank in ranks:
        assert any("WAIT_SEND_F" in action for action in rank["actions"])
        assert any("WAIT_SEND_B" in action for action in rank["actions"])
        assert any("WAIT_REDUCE_GRAD" in action for action in rank["actions"])
    for step, (losses, wanted) in enumerate(reference(2 * WORLD)):
        got = {weight: grad for rank in ranks for weight, grad in rank["steps"][step][1].items()}
        torch.testing.assert_close(got, {weight: wanted[weight] for weight in got})
        assert got.keys() == wanted.keys()
        torch.testing.assert_close([loss for rank in ranks for loss in rank["steps"][step][0]], losses)


# One process that has both stages.


@pytest.fixture
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def schedule_of(name, modules, **arguments):
    stages = [PipelineStage(module, i, len(modules), torch.device("cpu")) for i, module in enumerate(modules)]
    arguments = {"loss_fn": loss_function, "scale_grads": False, **arguments}
    return stages, getattr(schedules, name)(stages, MICROBATCHES, **arguments)


def ordinary_backward(net, number):
    x, target = batch(number)
    for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        loss_function(net(part), goal).backward()


def assert_gradients(modules, net, whole=lambda grad: grad, **tolerances):
    for module, plain in zip(modules, net, strict=True):
        for got, wanted in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(got.grad), wanted.grad, **tolerances)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_a_context_around_a_stages_forward(name):
    """It is entered around each forward, and what it says holds in I and W."""
    modules = [Block(), Block()]
    net = nn.Sequential(*copy.deepcopy(modules))
    stages, schedule = schedule_of(name, modules)
    seen = []

    @contextlib.contextmanager
    def noting(info):
        seen.append((info.stage_index, info.microbatch_index, info.is_metadata_inference))
        yield

    handle = stages[1].register_forward_context(noting)
    x, target = batch(0)
    with zbpipe.patch():
        schedule.step(x, target=target)
    ordinary_backward(net, 0)
    assert_gradients(modules, net)
    assert sorted(entry[1] for entry in seen if not entry[2]) == list(range(MICROBATCHES))
    assert {entry[0] for entry in seen} == {1}
    handle.remove()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_a_recording_that_watches_passes_split_microbatches_on(name):
    modules = [Block(), Block()]
    net = nn.Sequential(*copy.deepcopy(modules))
    stages, schedule = schedule_of(name, modules)
    x, target = batch(0)
    with zbpipe.patch(), memory.record() as recording:
        recording.watch(schedule)
        schedule.step(
            arg_mbs=[(part,) for part in x.chunk(MICROBATCHES)],
            kwarg_mbs=[{} for _ in range(MICROBATCHES)],
            target_mbs=list(target.chunk(MICROBATCHES)),
        )
    ordinary_backward(net, 0)
    assert_gradients(modules, net)


def sharded(modules, **options):
    for module in modules:
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)), **options)
    return modules


def full(grad):
    return grad.full_tensor()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("wait_later", [False, True])
@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_gradients_summed_over_steps_that_do_not_finalize_them(name, wait_later, reshard):
    modules = [Block(), Block()]
    net = nn.Sequential(*copy.deepcopy(modules))
    sharded(modules, reshard_after_forward=reshard)
    _, schedule = schedule_of(name, modules, defer_reduce_grad_wait=wait_later)
    with zbpipe.patch():
        for number in range(3):
            x, target = batch(number)
            schedule.step(x, target=target, finalize_gradients=number == 2)
            ordinary_backward(net, number)
    assert_gradients(modules, net, full)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_the_weights_in_the_graph_sum_their_gradients_in_the_dtype_that_is_reduced(name, reshard):
    """As fully_shard sets it for them (grad_dtype): bfloat16 products, float32 sums."""
    torch.manual_seed(3)
    modules = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
    net = nn.Sequential(*copy.deepcopy(modules))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded(modules, mp_policy=policy, reshard_after_forward=reshard)
    _, schedule = schedule_of(name, modules)
    for number in range(2):
        x, target = (value.float() for value in batch(number))
        with zbpipe.patch():
            schedule.step(x, target=target)
        halves = [copy.deepcopy(part).bfloat16() for part in net]
        for part in (weight for half in halves for weight in half.parameters()):
            part.grad, part.grad_dtype = None, torch.float32
        for value, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            value = value.bfloat16()
            for half in halves:
                value = half(value)
            loss_function(value, goal).backward()
        for weight, half in zip(net.parameters(), (w for h in halves for w in h.parameters()), strict=True):
            weight.grad = half.grad if weight.grad is None else weight.grad + half.grad
        assert_gradients(modules, net, full, rtol=1e-5, atol=1e-5)
