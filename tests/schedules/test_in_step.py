"""What I and W do is a function of the graph, the policy and the order of the calls: ranks that share a region's collectives
compute it equally often, in the same order, however late one of them is and whatever it holds.

Two ranks of a pipeline, and at each of its places a team of two that share the layers: tensor or expert parallel. In the second
step ranks are late at random, and each team's second one holds more than its peer.
"""

import collections
import functools
import itertools
import random
import time
import zlib
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.blocks import ZERO_BUBBLE, f64, loss_function
from support.functions import function_of
from support.oracle import needs_zbpipe
from support.pipelines import Case, Pipeline, assert_close, copied, named, ranks_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbpipe

TEAM, PLACES, STAGES, MICROBATCHES, STEPS = 2, 2, 4, 4, 2
WORLD = PLACES * TEAM
TOKENS, WIDTH = 6, 8
HEADS, HEAD, HIDDEN = (3, 1), 2, (12, 4)  # per rank of a team
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


enter = function_of(lambda x, seat: x.view_as(x), lambda x, seat, grad: seat.all_reduced(grad))
leave = function_of(lambda x, seat: seat.all_reduced(x), lambda x, seat, grad: grad)
exchange = function_of(
    lambda x, seat, sent, received: seat.exchanged(x, sent, received),
    lambda x, seat, sent, received, grad: seat.exchanged(grad, received, sent),
)


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
        h, total = enter(self.norm(x), self.seat), 0.0
        for share in self.shares:
            qkv = h @ self.get_parameter(f"qkv{share}")
            q, k, v = qkv.view(TOKENS, 3, HEADS[share], HEAD).permute(1, 2, 0, 3)
            a = ((q @ k.mT).softmax(-1) @ v).transpose(0, 1).flatten(1)
            total = total + a @ self.get_parameter(f"out{share}")
        if 0 in self.shares:
            total = total + self.bias
        return x + leave(total, self.seat).tanh()

    def mlp(self, x, microbatch):
        self.computes("mlp", microbatch)
        h, total = enter(x, self.seat), 0.0
        for share in self.shares:
            total = total + (h @ self.get_parameter(f"up{share}")).tanh() @ self.get_parameter(f"down{share}")
        return x + leave(total, self.seat).tanh()

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
            y = self.expert(seat.number, exchange(h[order], seat, sent, received))
            y = exchange(y, seat, received, sent)
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
SOME = {"side by side": ("default", "recompute", "input_pass"), "experts": ("default", "input_pass")}
RUNS = [run for run in itertools.product(KINDS, ZERO_BUBBLE, POLICIES) if run[2] in SOME.get(run[0], POLICIES)]


def parts_of(kind, seat):
    return [nn.Sequential(*(KINDS[kind](seat, (number, layer)) for layer in range(2))) for number in range(STAGES)]


def data(kind, step, share):
    torch.manual_seed(100 + step + 10 * share * ("experts" in kind))
    return torch.randn(2, MICROBATCHES * TOKENS, WIDTH, dtype=f64).unbind()


@functools.cache
def reference(kind):
    """The weights' gradients after each step, of the model in one piece, whose weights have the names of their rank's share."""
    seat, steps = Seat(), []
    net = nn.Sequential(*parts_of(kind, seat))
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


@functools.cache
def groups():
    """The team's, and the pipeline's."""
    teams = [dist.new_group([place * TEAM, place * TEAM + 1]) for place in range(PLACES)]
    pipes = [dist.new_group([number, number + TEAM]) for number in range(TEAM)]
    return teams[dist.get_rank() // TEAM], pipes[dist.get_rank() % TEAM]


def run(kind, name, policy):
    """What this rank computed and sent in each step, in order, and its weights' gradients."""
    rank, (team, pipe), steps = dist.get_rank(), groups(), []
    seat, x = Seat(rank % TEAM, team), torch.zeros(TOKENS, WIDTH, dtype=f64)

    def shapes(i):
        return {"input_args": x.clone().requires_grad_(i > 0), "output_args": x.clone().requires_grad_()}

    line = Pipeline(name, parts_of(kind, seat), given=shapes, group=pipe).start(loss_function, MICROBATCHES)
    with zbpipe.policy(**POLICIES[policy]):
        for step in range(STEPS):
            seat.late = random.Random(rank) if step else None
            held = more_than_its_peer(line.parts.values()) if step and seat.number else None
            line.step(*data(kind, step, seat.number))
            del held
            steps.append((list(seat.log), {name: copied(w.grad) for name, w in named(line.parts).items()}))
            seat.log.clear()
    return steps


CASES = {".".join(case): Case(partial(run, *case), module="zbpipe") for case in RUNS}
ranks = ranks_of(__file__, CASES, WORLD)


pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_zbpipe,
    pytest.mark.parametrize(("kind", "name", "policy"), RUNS),
]


def test_ranks_of_a_team_compute_and_send_alike_whenever_and_whatever_they_hold(kind, name, policy, ranks):
    logs = [[log for log, _ in steps] for steps in ranks(f"{kind}.{name}.{policy}")]
    for first in range(0, WORLD, TEAM):
        for step, log in enumerate(logs[first]):
            assert log == logs[first + 1][step], f"step {step}, ranks {first} and {first + 1}"
        assert logs[first][0] == logs[first][1], f"two steps of rank {first}"


def test_regions_are_computed_again_once_or_with_recompute_twice(kind, name, policy, ranks):
    again = set()
    for log, _ in itertools.chain(*ranks(f"{kind}.{name}.{policy}")):
        counts = collections.Counter(what for what in log if isinstance(what, tuple))
        assert {microbatch for *_, microbatch in counts} == set(range(MICROBATCHES))
        again |= {count - 1 for count in counts.values()}
    # A stage whose backward is not split computes its regions again once.
    assert again == ({1, 2} if policy in ("recompute", "recompute, all") else {1})


def test_gradients_are_those_of_the_model_in_one_piece(kind, name, policy, ranks):
    for rank in ranks(f"{kind}.{name}.{policy}"):
        for (_, grads), whole in zip(rank, reference(kind), strict=True):
            assert_close(grads, {weight: whole[weight] for weight in grads})
