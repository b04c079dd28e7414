"""Where the stages before are frozen, as with adapters on the last layers alone, a stage gets no gradients at all.

    python frozen_first_stage.py

The input of such a stage requires no gradient, so I has nothing to lead to, keeps no group, and W has nothing to do.
Silent. One process with both stages of a V; the same over several ranks.

The minimal patch: where no stage input requires a gradient, W runs the whole backward from the outputs.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble


def loss_function(out, target):
    return (out - target).square().sum()


def gradients(split):
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    frozen = nn.Sequential(stages[0], stages[1].requires_grad_(False))
    adapted = nn.Sequential(stages[2], stages[3])
    if split:
        of_rank = [PipelineStage(m, i, 2, torch.device("cpu")) for i, m in enumerate((frozen, adapted))]
        schedule = ScheduleZBVZeroBubble(of_rank, 4, loss_fn=loss_function, scale_grads=False)
        schedule.step(x, target=target)
    else:
        loss_function(adapted(frozen(x)), target).backward()
    return [None if w.grad is None else round(w.grad.norm().item(), 2) for w in adapted.parameters()]


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"torch {torch.__version__}: norms of gradients: right {gradients(False)}, torch's module {gradients(True)}")
    dist.destroy_process_group()
