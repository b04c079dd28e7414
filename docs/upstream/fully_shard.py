"""Weights of a stage that fully_shard reshards after its forward get no gradient from torch's module.

    python fully_shard.py

I asks for the gradients of the weights that the module has when it begins. Those are the shards, for the whole weights
are gone since the forward; the graph ends in the whole ones. So no weight is found, no group is made, and W has nothing
to do. Silent. Here two stages of a V in one process, sharded over one rank; the same over several.

torchtitan's default, the chunked loss, leads here too, without any data parallelism: it shards the last norm and the
head over a mesh of one rank, and reshards them itself after the loss. The last norm then is never trained.

The minimal patch: the stage calls its module's unshard() before I. All the numbers are right then.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble


def loss_function(out, target):
    return (out - target).square().sum()


def gradients(split):
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))]
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    if split:
        mesh = dist.init_device_mesh("cpu", (1,))
        for module in stages:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        of_rank = [PipelineStage(m, i, 2, torch.device("cpu")) for i, m in enumerate(stages)]
        schedule = ScheduleZBVZeroBubble(of_rank, 4, loss_fn=loss_function, scale_grads=False)
        schedule.step(x, target=target)
    else:
        loss_function(stages[1](stages[0](x)), target).backward()
    weights = [w for module in stages for w in module.parameters()]
    return [None if w.grad is None else round(w.grad.norm().item(), 2) for w in weights]


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"torch {torch.__version__}: norms of gradients: right {gradients(False)}, torch's module {gradients(True)}")
    dist.destroy_process_group()
