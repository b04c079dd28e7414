"""Pipeline and data parallel: two pipeline ranks of two stages each, in DistributedDataParallel, under ZBV.

    python examples/ddp.py          starts its four processes itself
    torchrun --nproc-per-node 4 examples/ddp.py

Each of two replicas trains on its own data. DDP reduces each gradient once, in a stage's last weight pass. The
gradients of every step are compared with those of the same model in one piece, on the data of both replicas.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
from torch.nn.parallel import DistributedDataParallel

import zbpipe

STAGES, REPLICAS, MICROBATCHES, BATCH, WIDTH, STEPS = 4, 2, 8, 32, 64, 2


def make_blocks():
    torch.manual_seed(0)
    return [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)]


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
    mine = [pipeline_rank, STAGES - 1 - pipeline_rank]  # a V
    stages = [
        PipelineStage(
            DistributedDataParallel(blocks[i], process_group=mesh["dp"].get_group()),
            i,
            STAGES,
            torch.device("cpu"),
            group=mesh["pp"].get_group(),
        )
        for i in mine
    ]
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
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
                torch.testing.assert_close(weight.grad, twin.grad, rtol=1e-4, atol=1e-4)

        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()

    dist.barrier()
    if dist.get_rank() == 0:
        print(f"DDP under ZBV: gradients of {STEPS} steps equal those of the model in one piece")
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
