"""Compiled stages that are data parallel, sharded, or tensor parallel: two pipeline ranks by two of the other kind."""

import logging

import torch
from stacks import ddp_cases, fsdp_cases, tensor_cases
from support.stacks.events import Events
from support.stacks.training import Training, cases_of

from zbpipe._compile import Backend, backend

# Under any other dispatch mode dynamo leaves code as it is.
Events.ignore_compile_internals = classmethod(lambda cls: True)
# Dynamo takes a compiled module in DDP apart at DDP's buckets, the first of which is larger than these whole modules.
torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1


class Watch(logging.Handler):
    """Counts what W computes of compiled backwards, and keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.calls, self.lines = 0, []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        torch._dynamo.reset()  # what another case compiled would be used again, and not log again
        self.original = backend._WeightWork.__call__

        def counted(work, *values):
            self.calls += 1
            return self.original(work, *values)

        backend._WeightWork.__call__ = counted
        logging.getLogger("zbpipe").addHandler(self)
        return self

    def __exit__(self, *error):
        backend._WeightWork.__call__ = self.original
        logging.getLogger("zbpipe").removeHandler(self)

    @property
    def not_split(self):
        return [line for line in self.lines if "is not split" in line]


def compiled(module):
    """In place, so that its parameters keep their names, and before anything is wrapped around it."""
    module.compile(backend=Backend("aot_eager"), dynamic=False)
    return module


def ddp(schedule):
    with Watch() as watch:
        ddp_cases.train(schedule, lambda part: ddp_cases.in_ddp()(compiled(part)))
    assert watch.calls > 0
    assert watch.not_split == []


def fsdp(schedule):
    def wrap(part):
        compiled(part.mixer)
        return fsdp_cases.sharded()(part)

    with Watch() as watch:
        training = Training(schedule, fsdp_cases.mesh(), wrap)
        training.run(fsdp_cases.mesh()["dp"].get_local_rank())
    assert watch.calls > 0
    assert watch.not_split == []


def tensor_parallel(schedule):
    """DTensor weights: the compiled code runs whole, and says so."""

    def make():
        return tensor_cases.model.make_parts(tensor_cases.Block)

    with Watch() as watch:
        training = Training(
            schedule,
            tensor_cases.mesh(),
            lambda part: compiled(tensor_cases.tensor_parallel(part)),
            parts=make(),
            reference=make(),
            sequence=tensor_cases.SEQUENCE,
        )
        training.run(replica=0, replicas=1)
    assert watch.calls == 0
    assert watch.not_split
    assert all("it takes tensors of the subclass DTensor" in line for line in watch.not_split)


CASES = cases_of([ddp, fsdp, tensor_parallel])
