"""A schedule of your own, from a file: each rank's row lists its passes in order.

    python examples/csv_schedule.py          starts its two processes itself
    torchrun --nproc-per-node 2 examples/csv_schedule.py

0F1 is stage 0's forward of microbatch 1; I and W are the input and the weight pass, B both at once. torch adds sends
and receives. The gradients of every step are compared with those of the same model in one piece.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import zbpipe

STAGES, MICROBATCHES, BATCH, WIDTH, STEPS = 4, 4, 16, 32, 2

# A V of two ranks. Every weight pass waits until no other rank waits for anything.
ROWS = """\
0F0,0F1,0F2,0F3,3F0,3I0,3F1,3I1,3F2,3I2,3F3,3I3,0B0,0B1,0B2,0B3,3W0,3W1,3W2,3W3
1F0,2F0,1F1,2F1,1F2,2F2,1F3,2F3,2I0,1I0,2I1,1I1,2I2,1I2,2I3,1I3,2W0,1W0,2W1,1W1,2W2,1W2,2W3,1W3
"""


def make_blocks():
    torch.manual_seed(0)
    return [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)]


def loss_function(out, target):
    return (out - target).square().sum()


def train():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mine = [dist.get_rank(), STAGES - 1 - dist.get_rank()]
    blocks, reference = make_blocks(), nn.Sequential(*make_blocks())
    stages = [PipelineStage(blocks[i], i, STAGES, torch.device("cpu")) for i in mine]
    schedule = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(ROWS)
        file.flush()
        schedule._load_csv(file.name)

    zbpipe.patch()
    for step in range(STEPS):
        torch.manual_seed(1 + step)
        x, target = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
        schedule.step(*([x] if 0 in mine else []), **({"target": target} if STAGES - 1 in mine else {}))
        loss_function(reference(x), target).backward()
        for i in mine:
            for weight, twin in zip(blocks[i].parameters(), reference[i].parameters(), strict=True):
                torch.testing.assert_close(weight.grad, twin.grad, rtol=1e-4, atol=1e-4)
                with torch.no_grad():
                    weight -= 1e-3 * weight.grad
                weight.grad = None
        for twin in reference.parameters():
            with torch.no_grad():
                twin -= 1e-3 * twin.grad
            twin.grad = None

    dist.barrier()
    if 0 in mine:
        print(f"a schedule from a file: gradients of {STEPS} steps equal those of the model in one piece")
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
