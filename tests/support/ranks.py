"""What the scripts of ranks have in common: each is a process of a job, and leaves its results in the job's folder."""

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist

import zbpipe

MODULES = ("zbpipe", "torch")
UNDER_TEST = os.environ.get("ZBPIPE_TEST_MODULE") or "zbpipe"


def on(module):
    """What a run on that of MODULES is within."""
    return zbpipe.patch() if module == "zbpipe" else contextlib.nullcontext()


def join(rank, world, folder, store="store", seconds=60):
    """The job's gloo group; on one thread, as the ranks of a machine share its cores.

    Returns when all have joined: one that fails at once and leaves would cut off a peer that is still connecting."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=seconds)
    meeting = dist.FileStore(str(folder / store), world)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world, timeout=timeout)
    meeting.set(f"{rank} has joined", "")
    meeting.wait([f"{peer} has joined" for peer in range(world)], timeout)
