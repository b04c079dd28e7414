"""torch's schedules, patched, on two ranks whose messages have streams of their own, as NCCL's: to the bit what the CPU gives.

A message that is read too early, or whose memory is given away too early, is a race whatever the order was.
"""

import gc
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support import late, late_ranks
from support.blocks import MICROBATCHES, SCHEDULES, STEPS, batch, blocks, loss_function, stages_of
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import zbpipe
from zbpipe._stage.before_2_15 import sends  # faults are planted there

WORLD = 2


def unpipelined(name):
    """Per step the losses, and per block the weights' gradients."""
    model = nn.Sequential(*blocks(WORLD * SCHEDULES[name][0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for number in range(STEPS):
        x, target = batch(number)
        losses = []
        for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            losses.append(loss_function(model(part), wanted))
        for loss in reversed(losses) if name == "ScheduleLoopedBFS" else losses:
            loss.backward()
        seen.append((torch.stack(losses).detach(), [[w.grad.clone() for w in block.parameters()] for block in model]))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def pipelined(name, coalesces):
    """As `unpipelined`; read when everything is posted, so that nothing has been waited for before."""
    per_rank, shape = SCHEDULES[name]
    count = WORLD * per_rank
    parts, batches = blocks(count), [batch(number) for number in range(STEPS)]  # of the process's random numbers

    def train(rank):
        device = torch.device("late", rank)
        mine = stages_of(rank, WORLD, per_rank, shape)
        modules = {i: parts[i].to(device) for i in mine}
        stages = [PipelineStage(module, i, count, device) for i, module in modules.items()]
        schedule = getattr(schedules, name)(
            stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=loss_function, scale_grads=False
        )
        optimizer = torch.optim.SGD([w for module in modules.values() for w in module.parameters()], lr=0.1)
        seen = []
        for x, target in batches:
            x, target, losses = x.to(device), target.to(device), []
            given = {"target": target, "losses": losses} if count - 1 in mine else {}
            schedule.step(*([x] if 0 in mine else []), **given)
            grads = {i: [w.grad.clone() for w in module.parameters()] for i, module in modules.items()}
            seen.append((torch.stack([loss.detach() for loss in losses]) if losses else None, grads))
            optimizer.step()
            optimizer.zero_grad()
        return [
            (None if losses is None else losses.cpu(), {i: [g.cpu() for g in of] for i, of in grads.items()})
            for losses, grads in seen
        ]

    ranks = late_ranks.run(train, WORLD, coalesces)
    return [
        (
            next(losses for losses, _ in step if losses is not None),
            [of for _, of in sorted({i: of for _, grads in step for i, of in grads.items()}.items())],
        )
        for step in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize("release", [False, True], ids=["", "outputs released"])
@pytest.mark.parametrize("coalesces", [False, True], ids=["a work each", "one work together"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(name, coalesces, release):
    expected = unpipelined(name)
    for order in late.ORDERS:
        late.begin(order)
        with zbpipe.patch(release_outputs=release):
            got = pipelined(name, coalesces)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, msg=partial("{}: {}".format, order))
        assert not late.races(), order
        gc.collect()
        assert late.bytes_in_use() == 0, order


class Forgotten(sends.Send):
    """What is sent is given up without waiting."""

    def is_completed(self):
        return True

    def finish(self, timeout=None):
        self.done.set()


class Hasty(sends.Receive):
    """What comes is read without waiting."""

    def wait(self, timeout=None):
        self.kept, self.work = self.work, SimpleNamespace(wait=lambda *args: True)
        return super().wait(timeout)


@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="torch sends by itself there")
@pytest.mark.usefixtures("plants")
@pytest.mark.parametrize("coalesces", [False, True], ids=["a work each", "one work together"])
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
@pytest.mark.parametrize("fault", [Forgotten, Hasty], ids=lambda fault: fault.__name__)
def test_a_message_that_is_not_waited_for_shows(fault, name, coalesces, monkeypatch):
    monkeypatch.setattr(sends, fault.__base__.__name__, fault)
    late.begin()
    with zbpipe.patch(release_outputs=True):
        pipelined(name, coalesces)
    assert any("a message" in race for race in late.races())
