"""Compiled stages under a zero-bubble schedule: zbpipe.compile leaves the weight products of their backwards to W.

    python examples/compile_split.py [inductor | aot_eager]

Two processes train four compiled transformer blocks with ScheduleZBVZeroBubble. Compares every gradient with the model
in one piece, not compiled. A profile of the last step shows in which of its actions the products ran.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.profiler import profile

import zbpipe

STEPS, MICROBATCHES, BATCH, TOKENS, WIDTH = 2, 4, 8, 16, 32


def blocks():
    torch.manual_seed(0)
    layer = {"dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True, "norm_first": True}
    return [nn.TransformerEncoderLayer(WIDTH, 4, **layer) for _ in range(4)]


def batch(step):
    torch.manual_seed(step)
    return torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, TOKENS, WIDTH)


def train(rank, backend, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    zbpipe.patch()  # the schedules run on zbpipe, and take compiled stages
    mine = {i: block for i, block in enumerate(blocks()) if i in (rank, 3 - rank)}  # a V: stages 0 and 3, 1 and 2
    stages = [
        PipelineStage(zbpipe.compile(block, backend=backend), i, 4, torch.device("cpu")) for i, block in mine.items()
    ]
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss, scale_grads=False)
    weights = {f"{i}.{name}": w for i, block in mine.items() for name, w in block.named_parameters()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    grads = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, target = batch(step)
        with profile(record_shapes=True, with_flops=True) as prof:
            schedule.step(x, target=target) if rank == 0 else schedule.step()
        grads.append({name: w.grad.clone() for name, w in weights.items()})
        optimizer.step()
    torch.save((grads, flops_by_action(prof)), f"{folder}/{rank}")
    dist.destroy_process_group()


def flops_by_action(prof):
    """FLOPs of the products within the schedule's actions, such as "2W0": stage 2, W, microbatch 0."""
    events = prof.events()
    ranges = [(e.name.removeprefix("PP:"), e.time_range) for e in events if e.name.startswith("PP:")]
    return {
        action: sum(e.flops or 0 for e in events if range_.start <= e.time_range.start <= range_.end)
        for action, range_ in ranges
    }


def reference():
    """Gradients of each step of the model in one piece."""
    net = nn.Sequential(*blocks())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, target in zip(*(part.chunk(MICROBATCHES) for part in batch(step)), strict=True):
            nn.functional.mse_loss(net(x), target).backward()
        yield {name: w.grad.clone() for name, w in net.named_parameters()}
        optimizer.step()


def main(backend):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (backend, folder), nprocs=2)
        (first, flops), (second, more) = (torch.load(Path(folder) / str(rank)) for rank in range(2))
    for step, expected in enumerate(reference()):
        torch.testing.assert_close({**first[step], **second[step]}, expected, rtol=1e-4, atol=1e-6)
    print(f"gradients of {STEPS} steps equal those of the model in one piece")

    products = sum(w.numel() for w in blocks()[0].parameters() if w.dim() == 2) * 2 * BATCH * TOKENS
    for stage in (1, 2, 3):  # stage 0 has no input whose gradient anybody needs
        in_w = sum(n for action, n in {**flops, **more}.items() if action.startswith(f"{stage}W"))
        print(f"stage {stage}: {in_w / products:.0%} of the weight products' FLOPs are in W")
        assert in_w >= 0.9 * products


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "inductor")
