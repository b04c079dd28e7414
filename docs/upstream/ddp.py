"""DistributedDataParallel never reduces the gradients that torch's module computes: each rank keeps its own.

    python ddp.py

DDP reduces in hooks of the weights' accumulators. W takes the gradients from torch.autograd.grad, which calls none, and
adds them to .grad itself. Silent; upstream issue 144530. Here the split backward of one stage on two ranks whose
batches differ; in a schedule it is the same.

The minimal patch: let W accumulate through the accumulators (torch.autograd.backward with inputs=weights), in one run.
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn.parallel import DistributedDataParallel


def gradient(rank, split):
    torch.manual_seed(0)
    stage = DistributedDataParallel(nn.Linear(4, 4))
    x = torch.full((2, 4), rank + 1.0, requires_grad=True)
    loss = stage(x).sum()
    if split:
        _, groups = stage_backward_input([loss], None, [x], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
    else:
        loss.backward()
    return stage.module.weight.grad[0, 0].item()


def main(rank, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = [None, None]
    dist.all_gather_object(found, (gradient(rank, False), gradient(rank, True)))
    if rank == 0:
        right, split = (list(of_ranks) for of_ranks in zip(*found))
        print(f"torch {torch.__version__}: weight.grad[0, 0] of each rank: right {right}, torch's module {split}")
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    mp.spawn(main, args=(store.port,), nprocs=2)
