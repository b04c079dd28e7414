"""Activation checkpointing under ZBV: what a stage holds from I to W is the policy's choice.

    python examples/checkpointed.py          starts its two processes itself
    torchrun --nproc-per-node 2 examples/checkpointed.py
    ZBPIPE_POLICY=checkpoint=recompute torchrun --nproc-per-node 2 examples/checkpointed.py
    ZBPIPE_POLICY=checkpoint=input_pass torchrun --nproc-per-node 2 examples/checkpointed.py

Prints the peak of each rank's last step, and the phase in which it is. The gradients of the first step are compared
with those of the same model in one piece, without checkpointing.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.utils.checkpoint import checkpoint

import zbpipe

STAGES, BLOCKS, MICROBATCHES, TOKENS, WIDTH, STEPS = 4, 2, 4, 256, 64, 3


class Block(nn.Module):
    """(tokens, WIDTH) to the same: x + down(gelu(up(norm(x))))."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stage(nn.Module):
    def __init__(self, is_checkpointed):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x


def make_stages(is_checkpointed):
    torch.manual_seed(0)
    return [Stage(is_checkpointed) for _ in range(STAGES)]


def loss_function(out, target):
    return (out - target).square().mean()


def data(step):
    torch.manual_seed(1 + step)
    return torch.randn(MICROBATCHES * TOKENS, WIDTH), torch.randn(MICROBATCHES * TOKENS, WIDTH)


def gradients_in_one_piece(mine):
    stages = make_stages(is_checkpointed=False)
    x, target = data(0)
    loss_function(nn.Sequential(*stages)(x), target).backward()
    return [weight.grad for i in mine for weight in stages[i].parameters()]


def train():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mine = [dist.get_rank(), STAGES - 1 - dist.get_rank()]
    modules = make_stages(is_checkpointed=True)
    stages = [PipelineStage(modules[i], i, STAGES, torch.device("cpu")) for i in mine]
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=loss_function)
    weights = [weight for i in mine for weight in modules[i].parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    wanted = gradients_in_one_piece(mine)

    zbpipe.patch()
    for step in range(STEPS):
        x, target = data(step)
        with zbpipe.memory.record() as recording:
            recording.watch(schedule)
            schedule.step(*([x] if 0 in mine else []), **({"target": target} if STAGES - 1 in mine else {}))
        if step == 0:
            torch.testing.assert_close([weight.grad for weight in weights], wanted, rtol=1e-4, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()

    highest = max(recording.phases, key=lambda phase: phase.peak)
    peaks = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, f"rank {dist.get_rank()}: peak {highest.peak / 1e6:.3f} MB in {highest.label}")
    if 0 in mine:
        print("checkpointed stages: gradients equal those of the model in one piece, without checkpointing")
        print(*peaks, sep="\n")
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
