"""What each process of test_nccl.py runs: schedules over NCCL, one GPU per rank.

    python nccl_ranks.py RANK WORLD FOLDER

For each schedule it writes to FOLDER/NAME.RANK, as JSON: whether two steps' gradients equal those of the model in one
piece, what grew over further steps with the collector off, and the bytes in use after each.
"""

import gc
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from support.blocks import MICROBATCHES, SCHEDULES, batch, blocks, loss_function, stages_of
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import zbpipe
from zbpipe.leaks import Growth

STEPS = 6  # whose growth is looked at, after two that are compared


def reference(count, device):
    """The model in one piece, with its gradients and weights after each of two steps."""
    model = nn.Sequential(*blocks(count)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after = []
    for step in range(2):
        x, target = (t.to(device) for t in batch(step))
        for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            loss_function(model(part), wanted).backward()
        after.append([[w.grad.clone() for w in block.parameters()] for block in model])
        optimizer.step()
        optimizer.zero_grad()
    return after


def run(name, rank, world):
    device = torch.device("cuda", rank)
    per_rank, shape = SCHEDULES[name]
    count = world * per_rank
    mine = stages_of(rank, world, per_rank, shape)
    parts = blocks(count)
    modules = [parts[i].to(device) for i in mine]
    stages = [PipelineStage(m, i, count, device) for m, i in zip(modules, mine, strict=True)]
    kind = getattr(schedules, name)
    one = per_rank == 1
    schedule = kind(stages[0] if one else stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    weights = [w for m in modules for w in m.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)

    def step(number):
        x, target = (t.to(device) for t in batch(number))
        given = {"target": target, "losses": []} if count - 1 in mine else {}
        schedule.step(*([x] if 0 in mine else []), **given)

    equal = True
    for number, expected in enumerate(reference(count, device)):
        step(number)
        for index, module in zip(mine, modules, strict=True):
            for weight, grad in zip(module.parameters(), expected[index], strict=True):
                equal = equal and torch.allclose(weight.grad, grad)
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    in_use = []
    with Growth() as growth:
        for number in range(STEPS):
            step(number)
            optimizer.step()
            optimizer.zero_grad()
            for stage in stages:
                stage.clear_runtime_states()  # torch keeps the last stage's outputs for its user
            torch.cuda.synchronize()
            in_use.append(torch.cuda.memory_allocated(device))
            growth.step()
        grown = growth.table() if growth.grown() else ""
    return {"equal": equal, "grown": grown, "in_use": in_use}


def main(rank, world, folder):
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    names = [name for name, (_, shape) in SCHEDULES.items() if world > 1 or shape == "v"]
    with zbpipe.patch():
        for name in names:
            (folder / f"{name}.{rank}").write_text(json.dumps(run(name, rank, world)))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
