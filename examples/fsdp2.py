"""Pipeline and sharded data parallel: two pipeline ranks of two stages each, whose weights fully_shard shards over two
ranks, under interleaved zero bubble.

    python examples/fsdp2.py        starts its four processes itself
    torchrun --nproc-per-node 4 examples/fsdp2.py

Forward and backward run in bfloat16; the microbatches' gradients are summed and reduced in float32, each once a step.
The gradients of every step are compared with those of the same model in one piece, computed in float32.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

import zbpipe

STAGES, REPLICAS, MICROBATCHES, BATCH, WIDTH, STEPS = 4, 2, 8, 32, 64, 2


def make_blocks():
    torch.manual_seed(0)
    return [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)]


def shard(block, mesh):
    """Shards a layer by itself, then the rest. The stage's module must be sharded, too."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (block[1], block):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return block


def loss_function(out, target):
    return (out - target).square().sum()


def data(step, replica):
    torch.manual_seed(1 + REPLICAS * step + replica)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def train():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // REPLICAS, REPLICAS), mesh_dim_names=("pp", "dp"))
    pipeline_rank, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()

    blocks, reference = make_blocks(), nn.Sequential(*make_blocks())
    mine = [pipeline_rank, pipeline_rank + STAGES // 2]
    stages = [
        PipelineStage(shard(blocks[i], mesh["dp"]), i, STAGES, torch.device("cpu"), group=mesh["pp"].get_group())
        for i in mine
    ]
    schedule = ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    optimizer = torch.optim.SGD([w for i in mine for w in blocks[i].parameters()], lr=1e-3)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=1e-3)

    zbpipe.patch()
    for step in range(STEPS):
        x, target = data(step, replica)
        schedule.step(*([x] if 0 in mine else []), **({"target": target} if STAGES - 1 in mine else {}))

        for other in range(REPLICAS):
            x, target = data(step, other)
            (loss_function(reference(x), target) / REPLICAS).backward()
        for i in mine:
            for weight, twin in zip(blocks[i].parameters(), reference[i].parameters(), strict=True):
                difference = weight.grad.full_tensor() - twin.grad
                assert difference.norm() < 0.02 * twin.grad.norm(), "more than bfloat16 rounds"

        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()

    dist.barrier()
    if dist.get_rank() == 0:
        same = f"gradients of {STEPS} steps equal those of the model in one piece, to bfloat16's precision"
        print(f"fully_shard under interleaved zero bubble: {same}")
    dist.destroy_process_group()


def start(rank):
    os.environ["RANK"] = str(rank)
    train()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(store.port), WORLD_SIZE="4")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the ranks use the store above
        torch.multiprocessing.spawn(start, nprocs=4)
