"""Ranks that are threads of this process, each with a late device and a host of its own, and a process group between them."""

import itertools
import threading
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from support import late

_numbers = itertools.count()


class World(ThreadLocalWorld):
    if not hasattr(ThreadLocalWorld, "comms"):
        comms: list = []  # torch 2.11 asks for them, and its own worlds of threads have none


class Reductions:
    """In the place of torch.distributed.all_reduce, which the late group does not have: from 2.15 on torch's schedules
    begin with reductions of one number. Hosts compare them."""

    def __init__(self, world):
        self.meeting, self.numbers, self.result = threading.Barrier(world, self.reduce), [], None

    def reduce(self):
        self.result = self.how(self.numbers)
        self.numbers = []

    def __call__(self, tensor, op=dist.ReduceOp.SUM, group=None):
        self.how = {dist.ReduceOp.MIN: min, dist.ReduceOp.SUM: sum}[op]
        self.numbers.append(tensor.item())
        self.meeting.wait(60)
        tensor.fill_(self.result)


def run(function, world=2, coalesces=True):
    """What ``function(rank)`` returned on each rank, or the first error of one.

    coalesces: whether messages that are posted together have one work, as NCCL's.
    """
    number, store = next(_numbers), dist.HashStore()
    results, errors = [None] * world, []

    def create(_, rank, size, timeout):
        return late.new_group(number, rank, size, coalesces)

    def main(rank):
        torch.accelerator.set_device_index(rank)
        dist.init_process_group("late", store=store, rank=rank, world_size=world)
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
        finally:
            dist.destroy_process_group()

    late.library.late_separate_hosts()
    dist.Backend.register_backend("late", create, devices=["late"])
    with worlds_of_threads(), mock.patch.object(dist, "all_reduce", Reductions(world)):
        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results


@contextmanager
def worlds_of_threads():
    """Each thread is a rank to torch.distributed."""
    module, alone = dist.distributed_c10d, dist.distributed_c10d._world
    module._world = World()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        module._world = alone
