"""Compiled stages under the zero-bubble schedules that are also data parallel, sharded, or tensor parallel."""

import functools

import pytest
import torch
from stacks import test_ddp, test_fsdp, test_tensor
from support.compiled import Watch
from support.pipelines import by_lane, ranks_of
from support.stacks import model
from support.stacks.events import Events
from support.stacks.training import Training, cases_of

from zbpipe._compile import Backend

# Under any other dispatch mode dynamo leaves code as it is.
Events.ignore_compile_internals = classmethod(lambda cls: True)
# Dynamo takes a compiled module in DDP apart at DDP's buckets, the first of which is larger than these whole modules.
torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1


def compiled(module):
    """In place, so that its parameters keep their names, and before anything is wrapped around it."""
    module.compile(backend=Backend("aot_eager"), dynamic=False)
    return module


def ddp(schedule):
    with Watch() as watch:
        test_ddp.train(schedule, lambda part: test_ddp.in_ddp()(compiled(part)))
    assert watch.calls > 0
    assert watch.not_split == []


def fsdp(schedule):
    def wrap(part):
        compiled(part.mixer)
        return test_fsdp.sharded()(part)

    with Watch() as watch:
        Training(schedule, test_fsdp.on(), wrap).run()
    assert watch.calls > 0
    assert watch.not_split == []


def tensor_parallel(schedule):
    """DTensor weights: the compiled code runs whole, and says so."""
    make = functools.partial(model.make_parts, test_tensor.Block)

    def wrap(part):
        return compiled(test_tensor.tensor_parallel(part))

    with Watch() as watch:
        Training(schedule, test_tensor.on(), wrap, make, sequence=test_tensor.SEQUENCE).run()
    assert watch.calls == 0
    assert watch.not_split
    assert all("it takes tensors of the subclass DTensor" in line for line in watch.not_split)


CASES = cases_of(ddp, fsdp, tensor_parallel)
ranks = ranks_of(__file__, CASES, world=4)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("case", by_lane(CASES))
def test_gradients(case, ranks):
    ranks(case)
