"""Mixed precision under ZBV: float16 autocast with a loss scale, the gradients' norm clipped over the pipeline's ranks.

    python examples/mixed_precision.py          starts its two processes itself
    torchrun --nproc-per-node 2 examples/mixed_precision.py

A step that overflows anywhere is skipped everywhere. The weights after every step are compared with those of the same
model in one piece, trained on the same microbatches.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

import zbpipe

STAGES, MICROBATCHES, BATCH, WIDTH, STEPS, MAX_NORM = 4, 8, 32, 32, 3, 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            return self.down(self.up(self.norm(x)).tanh())


def make_blocks():
    torch.manual_seed(0)
    return [Block() for _ in range(STAGES)]


def loss_function(out, target):
    return (out.float() - target).square().mean()


def data(step):
    torch.manual_seed(1 + step)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def clip(weights, sum_over_ranks):
    squared = torch.nn.utils.get_total_norm([w.grad for w in weights]).square()
    sum_over_ranks(squared)
    torch.nn.utils.clip_grads_with_norm_(weights, MAX_NORM, squared.sqrt())


def train():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    blocks = make_blocks()
    mine = [rank, 2 * world - 1 - rank]  # a V
    weights = [w for i in mine for w in blocks[i].parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    # Its found-infinities are reduced over the group: all ranks skip a step, or none does.
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, process_group=dist.group.WORLD)
    stages = [PipelineStage(blocks[i], i, STAGES, torch.device("cpu")) for i in mine]
    schedule = ScheduleZBVZeroBubble(
        stages, MICROBATCHES, loss_fn=lambda out, target: scaler.scale(loss_function(out, target))
    )

    reference = nn.Sequential(*make_blocks())
    reference_weights = list(reference.parameters())
    reference_optimizer = torch.optim.SGD(reference_weights, lr=0.1)
    reference_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    zbpipe.patch()
    for step in range(STEPS):
        x, target = data(step)
        scaler.scale(torch.zeros(()))  # ranks without the last stage never call the loss function
        schedule.step(*([x] if 0 in mine else []), **({"target": target} if STAGES - 1 in mine else {}))
        scaler.unscale_(optimizer)
        clip(weights, dist.all_reduce)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

        for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            loss = loss_function(reference(part), goal) / MICROBATCHES
            reference_scaler.scale(loss).backward()
        reference_scaler.unscale_(reference_optimizer)
        clip(reference_weights, lambda squared: None)
        reference_scaler.step(reference_optimizer)
        reference_scaler.update()
        reference_optimizer.zero_grad()
        for i in mine:
            for weight, twin in zip(blocks[i].parameters(), reference[i].parameters(), strict=True):
                torch.testing.assert_close(weight, twin, rtol=1e-3, atol=1e-4)

    dist.barrier()
    if rank == 0:
        print(f"float16 under ZBV: weights after {STEPS} steps equal those of the model in one piece")
    dist.destroy_process_group()


def start(rank):
    os.environ["RANK"] = str(rank)
    train()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(store.port), WORLD_SIZE="2")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the ranks use the store above
        torch.multiprocessing.spawn(start, nprocs=2)
