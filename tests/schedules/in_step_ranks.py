"""What each process of test_in_step.py runs: checkpointed regions that communicate, under every zero-bubble schedule.

    python in_step_ranks.py RANK WORLD FOLDER

Two ranks of a pipeline, and at each of its places a team of two that share the layers: tensor or expert parallel. For each
run the rank writes to FOLDER, per step, what it computed and sent, in order, and its weights' gradients. In the second step
ranks are late at random, and each team's second one holds more than its peer.
"""

import itertools
import random
import sys
import time
import zlib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from support.blocks import f64, loss_function, stages_of
from support.ranks import join
from torch import nn
from torch.autograd import Function
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

import zbpipe

TEAM, PLACES, STAGES, MICROBATCHES, STEPS = 2, 2, 4, 4, 2
TOKENS, WIDTH = 6, 8
HEADS, HEAD, HIDDEN = (3, 1), 2, (12, 4)  # per rank of a team
SCHEDULES = {"ScheduleInterleavedZeroBubble": "loop", "ScheduleZBVZeroBubble": "v", "ScheduleDualPipeV": "v"}
POLICIES = {
    "default": {},
    "recompute": {"checkpoint": "recompute"},
    "input_pass": {"checkpoint": "input_pass"},
    "keep, all": {"checkpoint": "keep", "defer": "all"},
    "recompute, all": {"checkpoint": "recompute", "defer": "all"},
    "recompute, nothing": {"checkpoint": "recompute", "defer": "nothing"},
}


@dataclass
class Seat:
    """A rank's in its team; without a group, that of the model in one piece, which has the weights of all."""

    number: int = 0
    group: dist.ProcessGroup | None = None
    log: list = field(default_factory=list)
    late: random.Random | None = None

    def all_reduced(self, x):
        x = x.clone()
        if self.group:
            self.log.append("all_reduce")
            dist.all_reduce(x, group=self.group)
        return x

    def exchanged(self, x, sent, received):
        self.log.append("all_to_all")
        result = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(result, x.contiguous(), received, sent, group=self.group)
        return result


class Enter(Function):
    @staticmethod
    def forward(ctx, x, seat):
        ctx.seat = seat
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.seat.all_reduced(grad), None


class Leave(Function):
    @staticmethod
    def forward(ctx, x, seat):
        return seat.all_reduced(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Exchange(Function):
    @staticmethod
    def forward(ctx, x, seat, sent, received):
        ctx.back = seat, received, sent
        return seat.exchanged(x, sent, received)

    @staticmethod
    def backward(ctx, grad):
        seat, sent, received = ctx.back
        return seat.exchanged(grad, sent, received), None, None, None


class Layer(nn.Module):
    def __init__(self, seat, place):
        super().__init__()
        self.seat, self.place, self.calls = seat, place, 0
        self.shares = (seat.number,) if seat.group else range(TEAM)

    def weights(self, name, shape_of):
        for share in self.shares:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.place} {name} {share}".encode()))
            weight = torch.randn(shape_of(share), dtype=f64, generator=generator) / 3
            self.register_parameter(f"{name}{share}", nn.Parameter(weight))

    def computes(self, region, microbatch):
        self.seat.log.append((*self.place, region, microbatch))
        if self.seat.late and self.seat.late.random() < 0.2:
            time.sleep(0.01)

    def forward(self, x):
        self.calls += 1
        return self.block(x, (self.calls - 1) % MICROBATCHES)


class TensorParallel(Layer):
    """Attention and a layer of its kind, with an all-reduce each, in one region or side by side in two."""

    def __init__(self, seat, place, in_one):
        super().__init__(seat, place)
        self.in_one = in_one
        self.norm = nn.LayerNorm(WIDTH, dtype=f64)
        self.weights("qkv", lambda share: (WIDTH, 3 * HEADS[share] * HEAD))
        self.weights("out", lambda share: (HEADS[share] * HEAD, WIDTH))
        self.weights("up", lambda share: (WIDTH, HIDDEN[share]))
        self.weights("down", lambda share: (HIDDEN[share], WIDTH))
        if 0 in self.shares:
            self.bias = nn.Parameter(torch.ones(WIDTH, dtype=f64))

    def attention(self, x, microbatch):
        self.computes("attention", microbatch)
        h, total = Enter.apply(self.norm(x), self.seat), 0.0
        for share in self.shares:
            qkv = h @ self.get_parameter(f"qkv{share}")
            q, k, v = qkv.view(TOKENS, 3, HEADS[share], HEAD).permute(1, 2, 0, 3)
            a = ((q @ k.mT).softmax(-1) @ v).transpose(0, 1).flatten(1)
            total = total + a @ self.get_parameter(f"out{share}")
        if 0 in self.shares:
            total = total + self.bias
        return x + Leave.apply(total, self.seat).tanh()

    def mlp(self, x, microbatch):
        self.computes("mlp", microbatch)
        h, total = Enter.apply(x, self.seat), 0.0
        for share in self.shares:
            total = total + (h @ self.get_parameter(f"up{share}")).tanh() @ self.get_parameter(f"down{share}")
        return x + Leave.apply(total, self.seat).tanh()

    def block(self, x, microbatch):
        if self.in_one:
            return checkpoint(lambda x: self.mlp(self.attention(x, microbatch), microbatch), x, use_reentrant=False)
        parts = [checkpoint(part, x, microbatch, use_reentrant=False) for part in (self.attention, self.mlp)]
        return parts[0] + parts[1]


def expert_of_tokens(place, microbatch, share):
    """The first expert gets none in microbatch 2, the second none in microbatch 0."""
    if microbatch in (0, 2):
        return torch.full((TOKENS,), microbatch // 2)
    return torch.randint(
        2, (TOKENS,), generator=torch.Generator().manual_seed(zlib.crc32(f"{place}{microbatch}{share}".encode()))
    )


class ExpertParallel(Layer):
    """A rank's tokens go to the ranks of their experts, and come back; gated, by a weight that each rank has."""

    def __init__(self, seat, place, gated):
        super().__init__(seat, place)
        self.gated = gated
        self.weights("scale", lambda share: (WIDTH,))
        self.weights("up", lambda share: (WIDTH, HIDDEN[0]))
        self.weights("down", lambda share: (HIDDEN[0], WIDTH))
        if gated:
            self.weights("gate", lambda share: (WIDTH, WIDTH))

    def expert(self, number, x):
        """A rank that gets no token has nothing of a weight in its graph."""
        return (x @ self.get_parameter(f"up{number}")).tanh() @ self.get_parameter(f"down{number}") if len(x) else x

    def experts(self, x, microbatch):
        self.computes("experts", microbatch)
        seat, h = self.seat, x.sin() * self.get_parameter(f"scale{self.seat.number}")
        if self.gated:
            h = h * (x @ self.get_parameter(f"gate{seat.number}")).sigmoid()
        chosen = [expert_of_tokens(self.place, microbatch, share) for share in range(TEAM)]
        order = chosen[seat.number].argsort(stable=True)
        sent = chosen[seat.number].bincount(minlength=TEAM).tolist()
        received = [int((those == seat.number).sum()) for those in chosen]
        if seat.group:
            y = self.expert(seat.number, Exchange.apply(h[order], seat, sent, received))
            y = Exchange.apply(y, seat, received, sent)
        else:
            y = torch.cat([self.expert(number, part) for number, part in enumerate(h[order].split(sent))])
        return x + torch.zeros_like(x).index_add(0, order, y).tanh() * x

    def block(self, x, microbatch):
        return checkpoint(self.experts, x, microbatch, use_reentrant=False)


KINDS = {
    "one region": partial(TensorParallel, in_one=True),
    "side by side": partial(TensorParallel, in_one=False),
    "gated experts": partial(ExpertParallel, gated=True),
    "experts": partial(ExpertParallel, gated=False),
}


# With recompute, a region that communicates needs a weight on every rank: experts alone are none.
RUNS = [
    (kind, name, policy)
    for kind, name, policy in itertools.product(KINDS, SCHEDULES, POLICIES)
    if kind in ("one region", "gated experts")
    or policy in {"side by side": ("default", "recompute", "input_pass"), "experts": ("default", "input_pass")}[kind]
]


def stage(kind, number, seat):
    return nn.Sequential(*(KINDS[kind](seat, (number, layer)) for layer in range(2)))


def data(kind, step, share):
    torch.manual_seed(100 + step + 10 * share * ("experts" in kind))
    return torch.randn(MICROBATCHES * TOKENS, WIDTH, dtype=f64), torch.randn(MICROBATCHES * TOKENS, WIDTH, dtype=f64)


def reference(kind):
    """The weights' gradients after each step, of the model in one piece, whose weights have the names of their rank's share."""
    seat, steps = Seat(), []
    net = nn.Sequential(*(stage(kind, number, seat) for number in range(STAGES)))
    for step in range(STEPS):
        for seat.number in range(TEAM if "experts" in kind else 1):
            for x, target in zip(*(whole.split(TOKENS) for whole in data(kind, step, seat.number)), strict=True):
                loss_function(net(x), target).backward()
        steps.append({name: w.grad.clone() for name, w in net.named_parameters()})
    return steps


def more_than_its_peer(parts):
    """What a rank may hold beside its stages: bytes, references to gradients, groups of a region that wait for their W."""
    m, x = nn.Linear(WIDTH, WIDTH), torch.randn(64, WIDTH, requires_grad=True)
    out = checkpoint(m, x.sin(), use_reentrant=False)
    groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    return groups, torch.empty(1 << 22), [[w, w.grad] for part in parts for w in part.parameters()]


def run(kind, name, rank, group, pipe):
    place, seat = rank // TEAM, Seat(rank % TEAM, group)
    mine = stages_of(place, PLACES, 2, SCHEDULES[name])
    parts, x = {i: stage(kind, i, seat) for i in mine}, torch.zeros(TOKENS, WIDTH, dtype=f64)
    shapes = [{"input_args": x.clone().requires_grad_(i > 0), "output_args": x.clone().requires_grad_()} for i in mine]
    stages = [
        PipelineStage(part, i, STAGES, torch.device("cpu"), group=pipe, **shape)
        for (i, part), shape in zip(parts.items(), shapes, strict=True)
    ]
    schedule = getattr(schedules, name)(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    steps = []
    for step in range(STEPS):
        x, target = data(kind, step, seat.number)
        seat.late = random.Random(rank) if step else None
        held = more_than_its_peer(parts.values()) if step and seat.number else None
        schedule.step(*([x] if 0 in mine else []), **({"target": target} if STAGES - 1 in mine else {}))
        del held
        grads = {f"{i}.{n}": w.grad.clone() for i, part in parts.items() for n, w in part.named_parameters()}
        steps.append((list(seat.log), grads))
        seat.log.clear()
    return steps


def main(rank, world, folder):
    join(rank, world, folder, seconds=20)
    teams = [dist.new_group([place * TEAM, place * TEAM + 1]) for place in range(PLACES)]
    pipes = [dist.new_group([number, number + TEAM]) for number in range(TEAM)]
    with zbpipe.patch():
        for kind, name, policy in RUNS:
            with zbpipe.policy(**POLICIES[policy]):
                steps = run(kind, name, rank, teams[rank // TEAM], pipes[rank % TEAM])
            torch.save(steps, folder / f"{kind}.{name}.{policy}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
