"""Training that keeps what training keeps: nothing of it grows, and nothing of it is said to."""

import collections
import copy
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zbpipe.leaks import Growth

STEPS = 80


class Run:
    """A small model with its optimizer; `step` is one step of training."""

    def __init__(self):
        torch.manual_seed(0)
        self.random = random.Random(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.number = 0
        self.recent, self.listed, self.by_length = collections.deque(maxlen=10), [], {}

    def batch(self):
        return torch.randn(4, 8)

    def loss(self):
        return self.net(self.batch()).square().mean()

    def step(self):
        self.number += 1
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Accumulation(Run):
    def step(self):
        for _ in range(3):
            self.loss().backward()
        super().step()


class WindowOfLosses(Run):
    def step(self):
        self.recent.append(super().step())


class LossesOfEpochs(Run):
    def step(self):
        self.listed.append(super().step())
        if self.number % 15 == 0:
            self.listed.clear()


class MeansOfEpochs(Run):
    """As numbers, which no allocator of torch's sees."""

    def step(self):
        self.listed.append(float(super().step()))


class Average(Run):
    def step(self):
        if self.number == 0:
            self.average = copy.deepcopy(self.net)
        super().step()
        with torch.no_grad():
            for mean, weight in zip(self.average.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(weight, 0.1)


class BestModel(Run):
    best = None

    def step(self):
        super().step()
        if self.number in (5, 11, 30, 47):
            self.best = copy.deepcopy(self.net.state_dict())


class RandomLengths(Run):
    """The last batch and its outputs live on after the step, of a length that nothing before may have had."""

    def batch(self):
        self.last = torch.randn(self.random.randrange(1, 400), 8)
        return self.last


class LengthsInOrder(Run):
    """Each epoch begins with its shortest batches."""

    def batch(self):
        self.last = torch.randn(1 + self.number % 10, 8)
        return self.last


class Replay(Run):
    def loss(self):
        self.recent.append(self.batch())
        return self.net(self.random.choice(self.recent)).square().mean()


class CachedMasks(Run):
    def loss(self):
        length = 1 + self.number % 7
        mask = self.by_length.setdefault(length, torch.ones(length, length).tril())
        return self.net(mask @ torch.randn(length, 8)).square().mean()


class Stateful(Run):
    state = None

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def loss(self):
        out, state = self.lstm(self.batch().unsqueeze(0), self.state)
        self.state = tuple(part.detach() for part in state)
        return out.square().mean()


class Checkpointed(Run):
    def loss(self):
        return checkpoint(self.net, self.batch(), use_reentrant=False).square().mean()


class Autocast(Run):
    def loss(self):
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss()


class Penalty(Run):
    """A backward through a backward."""

    def loss(self):
        x = self.batch().requires_grad_()
        (grad,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return grad.square().mean() + super().loss()


class Lbfgs(Run):
    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.LBFGS(self.net.parameters(), history_size=5, max_iter=2)

    def step(self):
        self.number += 1
        data = self.batch()

        def closure():
            self.optimizer.zero_grad()
            loss = self.net(data).square().mean()
            loss.backward()
            return loss

        self.optimizer.step(closure)


class Adversary(Run):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 1)
        self.others = torch.optim.SGD(self.other.parameters(), lr=0.01)

    def step(self):
        made = self.net(self.batch())
        self.other(made.detach()).mean().backward()
        self.others.step()
        (-self.other(made).mean()).backward()
        self.optimizer.step()
        for optimizer in (self.optimizer, self.others):
            optimizer.zero_grad()


class Schedule(Run):
    def __init__(self):
        super().__init__()
        self.warmup = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=10)

    def step(self):
        super().step()
        self.warmup.step()


class HooksOfOneStep(Run):
    def loss(self):
        out = self.net(self.batch())
        out.register_hook(lambda grad: grad.clamp(-1, 1))
        return out.square().mean()


class OptimizerInHooks(Run):
    def __init__(self):
        super().__init__()
        self.of = {p: torch.optim.SGD([p], lr=0.01, momentum=0.9) for p in self.net.parameters()}
        for p in self.net.parameters():
            p.register_post_accumulate_grad_hook(self.update)

    def update(self, p):
        self.of[p].step()
        p.grad = None


class Averaged(Run):
    """Of the weights of many steps, by torch's own."""

    def __init__(self):
        super().__init__()
        self.swa = torch.optim.swa_utils.AveragedModel(self.net)

    def step(self):
        super().step()
        if self.number > 20:
            self.swa.update_parameters(self.net)


KINDS = [Run, *Run.__subclasses__()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nothing_grows(kind):
    run = kind()
    for _ in range(2):
        run.step()
    with Growth() as growth:
        for _ in range(STEPS):
            run.step()
            growth.step()
            if len(growth.counts) in (10, 23, 41, 67):
                growth.grown()  # as the command looks; what is not full yet may look as if it grew
        assert growth.grown() == [], growth.table()


def test_the_same_with_a_leak_grows():
    run, kept = RandomLengths(), []
    with Growth() as growth:
        for _ in range(STEPS):
            kept.append(run.step())
            growth.step()
        (group,) = growth.grown()
        assert "variable kept of " in "".join(group.held_by)
