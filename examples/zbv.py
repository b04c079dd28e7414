"""The shortest training on zbpipe: four stages, two processes, ZBV.

torchrun --nproc-per-node 2 examples/zbv.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble

import zbpipe

zbpipe.patch()  # all that changes

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
mine = (rank, 2 * ranks - 1 - rank)  # a V: rank 0 has the first and the last stage

stages = []
for index in mine:
    torch.manual_seed(index)
    block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    stages.append(PipelineStage(block, index, 2 * ranks, torch.device("cpu")))
schedule = ScheduleZBVZeroBubble(stages, n_microbatches=8, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW([weight for stage in stages for weight in stage.submod.parameters()], lr=1e-3)

torch.manual_seed(0)
x, target = torch.randn(2, 256, 64)  # 8 microbatches of 32 rows
for step in range(5):
    losses = []
    if rank == 0:
        schedule.step(x, target=target, losses=losses)
        print(f"step {step}: loss {torch.stack(losses).mean():.3f}")
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
