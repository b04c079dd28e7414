"""All that a run on many GPUs combines: NCCL, fully_shard, ZBV, checkpointing, a memory report, a leak check.

torchrun --nproc-per-node 8 examples/at_scale.py     two pipeline ranks of four shards each, a GPU per process
torchrun --nproc-per-node 4 examples/at_scale.py     where there are none: on the CPU, over gloo
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe.leaks import check_tensor_leak

PIPELINE_RANKS, STAGES, BLOCKS, MICROBATCHES, TOKENS, WIDTH, STEPS = 2, 4, 2, 4, 128, 64, 5


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def sharded(mesh):
    module, precision = Stage(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*module.blocks, module):
        fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    return module


def main():
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    shape = (PIPELINE_RANKS, dist.get_world_size() // PIPELINE_RANKS)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp"))
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    mine = [rank, STAGES - 1 - rank]  # the V of ZBV
    modules = [sharded(mesh["dp"]).to(device) for _ in mine]
    stages = [PipelineStage(module, i, STAGES, device, group=group) for module, i in zip(modules, mine, strict=True)]
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, nn.functional.mse_loss, scale_grads=False)
    optimizer = torch.optim.AdamW([weight for module in modules for weight in module.parameters()], lr=1e-3)

    zbpipe.patch()
    zbpipe.set_policy(checkpoint="recompute")  # least memory between I and W; see docs/memory.md

    def train_step():
        x = torch.randn(MICROBATCHES * TOKENS, WIDTH, device=device)
        schedule.step(*([x] if 0 in mine else []), **({"target": x.tanh()} if STAGES - 1 in mine else {}))
        optimizer.step()
        optimizer.zero_grad()
        for stage in stages:
            stage.clear_runtime_states()  # otherwise a stage keeps its last outputs until the next step

    train_step()  # optimizer state and buffers are made here
    with zbpipe.memory.record(device) as recording:
        recording.watch(schedule)
        train_step()
    with check_tensor_leak(action="record") as check:
        train_step()
    for _ in range(STEPS - 3):
        train_step()

    if dist.get_rank() == 0:
        print(recording)
        print(check.report or "no tensor outlived its step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
