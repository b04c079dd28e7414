"""Pipeline, tensor and sequence parallel: two pipeline ranks of two stages each, whose weights and activations are
DTensors over two ranks, under DualPipeV.

    python examples/tensor_parallel.py     starts its four processes itself
    torchrun --nproc-per-node 4 examples/tensor_parallel.py

Stages hand on DTensors that are sharded over the sequence. The weight pass multiplies each rank's parts of the matrices
and communicates nothing. The gradients of every step are compared with those of the same model in one piece.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleDualPipeV
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zbpipe

STAGES, SHARDS, MICROBATCHES, BATCH, SEQUENCE, WIDTH, STEPS = 4, 2, 8, 32, 8, 64, 2


def make_blocks():
    torch.manual_seed(0)
    return [
        nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
        )
        for _ in range(STAGES)
    ]


def shard(block, mesh):
    plan = {
        "0": SequenceParallel(sequence_dim=1),
        "1": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "1.0": ColwiseParallel(use_local_output=False),
        "1.2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return parallelize_module(block, mesh, plan)


def loss_function(out, target):
    loss = (out - target).square().sum()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def data(step):
    torch.manual_seed(1 + step)
    return torch.randn(BATCH, SEQUENCE, WIDTH), torch.randn(BATCH, SEQUENCE, WIDTH)


def train():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // SHARDS, SHARDS), mesh_dim_names=("pp", "tp"))
    pipeline_rank = mesh["pp"].get_local_rank()

    blocks, reference = make_blocks(), nn.Sequential(*make_blocks())
    mine = [pipeline_rank, STAGES - 1 - pipeline_rank]  # a V
    stages = [
        PipelineStage(
            shard(blocks[i], mesh["tp"]),
            i,
            STAGES,
            torch.device("cpu"),
            group=mesh["pp"].get_group(),
            get_mesh=lambda names, layout: mesh["tp"],
        )
        for i in mine
    ]
    schedule = ScheduleDualPipeV(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    optimizer = torch.optim.SGD([w for i in mine for w in blocks[i].parameters()], lr=1e-4)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=1e-4)

    zbpipe.patch()
    for step in range(STEPS):
        x, target = data(step)
        loss_function(reference(x), target).backward()

        x, target = (distribute_tensor(tensor, mesh["tp"], [Shard(1)]) for tensor in (x, target))
        schedule.step(*([x] if 0 in mine else []), **({"target": target} if STAGES - 1 in mine else {}))
        for i in mine:
            for weight, twin in zip(blocks[i].parameters(), reference[i].parameters(), strict=True):
                torch.testing.assert_close(weight.grad.full_tensor(), twin.grad, rtol=1e-4, atol=1e-3)

        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()

    dist.barrier()
    if dist.get_rank() == 0:
        same = f"gradients of {STEPS} steps equal those of the model in one piece"
        print(f"tensor and sequence parallel under DualPipeV: {same}")
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
