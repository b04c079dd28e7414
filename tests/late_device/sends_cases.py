"""torch's schedules, patched, on two ranks whose messages have streams of their own, as NCCL's: to the bit what the CPU gives.

A message that is read too early, or whose memory is given away too early, is a race whatever the order was.
"""

import gc
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support import late, late_ranks
from support.blocks import MICROBATCHES, SCHEDULES, STEPS, loss_function
from support.pipelines import Model, Pipeline, joined, train

import zbpipe
from zbpipe._stage.before_2_15 import sends  # faults are planted there

WORLD = 2


MODEL = Model(optimizer=partial(torch.optim.SGD, lr=0.1), steps=STEPS)


def unpipelined(name):
    whole, parts = MODEL.build(WORLD * SCHEDULES[name][0])

    def step(x, target):
        chunks = zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
        losses = [loss_function(whole(part), wanted) for part, wanted in chunks]
        for loss in reversed(losses) if name == "ScheduleLoopedBFS" else losses:
            loss.backward()
        return losses

    return train(MODEL, dict(enumerate(parts)), step)


def pipelined(name, coalesces):
    """As `unpipelined`; read when everything is posted, so that nothing has been waited for before."""
    _, parts = MODEL.build(WORLD * SCHEDULES[name][0])
    batches = [MODEL.batch(step) for step in range(STEPS)]  # of the process's random numbers
    model = replace(MODEL, batch=batches.__getitem__)

    def run(rank):
        device = torch.device("late", rank)
        line = Pipeline(name, parts, lambda part: part.to(device), device=device).start()

        def step(x, target):
            return line.step(x.to(device), target.to(device))

        seen = train(model, line.parts, step, copied=lambda value: value.detach().clone())
        return {what: value.cpu() for what, value in seen.items()}

    return joined(late_ranks.run(run, WORLD, coalesces))


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
