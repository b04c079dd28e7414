"""torch's schedules, patched, with all stages of the pipeline on one rank: to the bit what the CPU gives."""

import copy

import pytest
import torch
import torch.distributed as dist
from support import late
from support.late_stages import ROWS, WIDTH, Batched, Checkpointed, Tied, mlp, normed
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import zbpipe

MICROBATCHES = 8


@pytest.fixture(autouse=True, scope="module")
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(schedule, parts, device, steps=2):
    """Losses, gradients and weights of a few steps; without a schedule on the CPU, microbatch by microbatch."""
    torch.manual_seed(1)
    parts = [copy.deepcopy(part).to(device) for part in parts]
    weights = [weight for part in parts for weight in part.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        x, target = (torch.randn(MICROBATCHES * ROWS, WIDTH) for _ in range(2))
        losses = []
        if schedule is None:
            for inputs, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
                losses.append(nn.functional.mse_loss(parts[1](parts[0](inputs)), wanted))
                losses[-1].backward()
        else:
            stages = [PipelineStage(part, i, 2, torch.device(device)) for i, part in enumerate(parts)]
            made = schedule(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss, scale_grads=False)
            made.step(x.to(device), target=target.to(device), losses=losses)
        seen += [loss.detach().cpu() for loss in losses] + [weight.grad.cpu() for weight in weights]
        optimizer.step()
    return seen + [weight.detach().cpu() for weight in weights]


@pytest.mark.parametrize("release", [False, True], ids=["", "outputs released"])
@pytest.mark.parametrize(
    "schedule", [ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV], ids=lambda s: s.__name__
)
@pytest.mark.parametrize(
    "makes", [(mlp, normed), (Tied, Batched), (Checkpointed, mlp)], ids=["plain", "tied", "checkpointed"]
)
def test_schedule(makes, schedule, release):
    torch.manual_seed(0)
    parts = [make() for make in makes]
    expected = train(None, parts, "cpu")
    for order in late.ORDERS:
        late.begin(order)
        with zbpipe.patch(release_outputs=release):
            got = train(schedule, parts, "late")
        wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not torch.equal(a, b)]
        assert not wrong, order
        assert not late.races(), order
