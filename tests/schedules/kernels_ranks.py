"""What each process of test_kernels.py runs: stages of Functions that hand over their weights' gradients, two steps with an
optimizer between, under schedules that split the backward.

    python kernels_ranks.py RANK WORLD FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.functions import Affine
from support.ranks import join
from torch import nn
from torch.autograd import Function
from torch.distributed.pipelining import PipelineStage, schedules

import zbpipe

MICROBATCHES, BATCH, WIDTH, STEPS = 8, 16, 8, 2
SCHEDULES = ("ScheduleZBVZeroBubble", "ScheduleInterleavedZeroBubble", "ScheduleDualPipeV")
phase = ["outside"]  # of this process: which pass of zbpipe runs


class Deferring(Affine):
    """x @ w + b by zbpipe.defer."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        calls = ctx.given

        def work(x, grad):
            calls.append(phase[-1])
            return x.mT @ grad, grad.sum(0)

        dw, db = zbpipe.defer(work, weights=(1, 2), saved=(x, grad))
        return grad @ w.mT, dw, db, None


class Gated(Function):
    """x @ w by zbpipe.defer, for w that comes from the stage's input; the bias is None."""

    @staticmethod
    def forward(ctx, x, w, frozen, b, calls):
        ctx.save_for_backward(x, w, frozen)
        ctx.calls = calls
        return x @ (w + frozen)

    @staticmethod
    def backward(ctx, grad):
        x, w, frozen = ctx.saved_tensors
        calls = ctx.calls

        def work(x, grad):
            calls.append(phase[-1])
            product = x.mT @ grad
            return product, product, None

        dw, dfrozen, db = zbpipe.defer(work, weights=(1, 2, 3), saved=(x, grad))
        return grad @ (w + frozen).mT, dw, dfrozen, db, None


class Fused(Function):
    """x @ w + b by zbpipe.defer of work that adds the gradients itself."""

    @staticmethod
    def forward(ctx, x, w, b, calls):
        ctx.save_for_backward(x, w)
        ctx.buffers, ctx.calls = [w.main_grad, b.main_grad], calls
        return x @ w + b

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        calls, buffers = ctx.calls, ctx.buffers

        def gemm(x, grad):
            if phase[-1] == "outside":  # where torch's stages learn shapes, from memory that is not initialised
                return
            calls.append(phase[-1])
            buffers[0].addmm_(x.mT, grad)
            buffers[1].add_(grad.sum(0))

        zbpipe.defer(gemm, weights=None, saved=(x, grad))
        return grad @ w.mT, None, None, None


class Layer(nn.Module):
    def __init__(self, kind, is_plain):
        super().__init__()
        self.kind = kind
        self.is_plain = is_plain
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 3)
        self.b = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.calls = []
        self.register_buffer("frozen", torch.eye(WIDTH, dtype=torch.float64))
        if kind == "fused":
            self.w.main_grad, self.b.main_grad = torch.zeros_like(self.w), torch.zeros_like(self.b)

    def forward(self, x):
        if self.kind == "gated":
            w = self.w * torch.sigmoid(x.mean() + self.b[0])
            return x @ (w + self.frozen) if self.is_plain else Gated.apply(x, w, self.frozen, None, self.calls)
        if self.is_plain:
            return x @ self.w + self.b
        return (Deferring if self.kind == "defer" else Fused).apply(x, self.w, self.b, self.calls)


KINDS = ("defer", "gated", "fused")


def parts(count, plain=False):
    torch.manual_seed(1)
    return [nn.Sequential(*(Layer(kind, plain) for kind in KINDS), nn.Tanh()) for _ in range(count)]


def batch(step):
    torch.manual_seed(100 + step)
    return [torch.randn(BATCH, WIDTH, dtype=torch.float64) for _ in range(2)]


def loss_function(out, target):
    return (out - target).pow(2).sum()


def optimizer_of(nets):
    return torch.optim.SGD([w for net in nets for w in net.parameters()], lr=1e-3)


def reference(count):
    """The weights' gradients after each step of the same model, by autograd alone and unpipelined."""
    nets = parts(count, plain=True)
    optimizer = optimizer_of(nets)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, target = batch(step)
        for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            loss_function(nn.Sequential(*nets)(part), goal).backward()
        steps.append({f"{i}.{n}": w.grad.clone() for i, net in enumerate(nets) for n, w in net.named_parameters()})
        optimizer.step()
    return steps


def run(name, rank, world):
    count = 2 * world
    mine = [rank, rank + world] if name == "ScheduleInterleavedZeroBubble" else [rank, count - 1 - rank]
    nets = parts(count)
    stages = [PipelineStage(nets[i], i, count, torch.device("cpu")) for i in mine]
    schedule = getattr(schedules, name)(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    optimizer = optimizer_of([nets[i] for i in mine])
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, target = batch(step)
        given = {"target": target, "losses": []} if count - 1 in mine else {}
        schedule.step(*([x] if 0 in mine else []), **given)
        for net in nets:
            take_main_grads(net)
        steps.append({f"{i}.{n}": w.grad.clone() for i in mine for n, w in nets[i].named_parameters()})
        optimizer.step()
    return steps, {f"{i}.{j}": layer.calls for i in mine for j, layer in enumerate(nets[i]) if j < len(KINDS)}


def take_main_grads(net):
    for w in net.parameters():
        if hasattr(w, "main_grad"):
            w.grad = w.main_grad.clone()
            w.main_grad.zero_()


def watch_phases():
    """Notes which of zbpipe's passes runs."""
    from torch.distributed.pipelining import stage as stage_module

    for name in ("stage_backward_input", "stage_backward_weight", "stage_backward"):
        run_pass = getattr(stage_module, name)

        def watched(*args, run_pass=run_pass, name=name, **kwargs):
            phase.append(name)
            try:
                return run_pass(*args, **kwargs)
            finally:
                phase.pop()

        setattr(stage_module, name, watched)


def main(rank, world, folder):
    join(rank, world, folder)
    zbpipe.patch()
    watch_phases()
    for name in SCHEDULES:
        torch.save(run(name, rank, world), folder / f"{name}.{rank}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
