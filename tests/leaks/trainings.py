"""Kinds of training that keep what training keeps, and of which nothing grows: what their own code keeps from step to step.

trainings_of_torch.py has those that use one thing of torch's each.
"""

import collections
import copy
import io
import queue
import random
import threading

import torch
from torch import nn


class Run:
    """A small model with its optimizer; `step` is one step of training, `close` comes after the last."""

    def __init__(self):
        torch.manual_seed(0)
        self.random = random.Random(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.number = 0
        self.recent, self.listed, self.by_length = collections.deque(maxlen=10), [], {}

    def close(self):
        pass

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


class Unfrozen(Run):
    """A layer more every 25 steps."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def step(self):
        if self.number % 25 == 0:
            self.net[-1 - self.number // 25 % 8].requires_grad_(True)
        return super().step()


class LayersWithRates(Run):
    """Each gets a group of the optimizer's when its time comes."""

    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.Adam(self.net[2].parameters(), lr=1e-3)

    def step(self):
        if self.number == 50:
            self.optimizer.add_param_group({"params": list(self.net[0].parameters()), "lr": 1e-4})
        return super().step()


class Distilled(Run):
    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self):
        batch = self.batch()
        return (self.net(batch) - self.teacher(batch)).square().mean()


class TargetNetwork(Replay):
    """As in Q-learning: made anew from the other one now and then."""

    def step(self):
        if self.number % 20 == 0:
            self.target = copy.deepcopy(self.net)
        return super().step()

    def loss(self):
        return super().loss() + (self.net(self.batch()) - self.target(self.batch()).detach()).square().mean()


class QueueOfKeys(Run):
    """A buffer of fixed size that the newest keys are written to."""

    def __init__(self):
        super().__init__()
        self.keys = torch.zeros(32, 4)

    def loss(self):
        keys = self.net(self.batch())
        loss = (keys @ self.keys.clone().T).square().mean()
        at = 4 * self.number % 32
        self.keys[at : at + 4] = keys.detach()
        return loss


class Generation(Run):
    """A text for every fifth step, with a cache that grows by a token a time."""

    @torch.no_grad()
    def generate(self):
        cache = torch.empty(0, 4)
        for _ in range(12):
            cache = torch.cat([cache, self.net(self.batch()[:1])])
        return cache

    def step(self):
        if self.number % 5 == 0:
            self.text = self.generate()
        return super().step()


class Evaluation(Run):
    """What it gathers over its batches is let go of after them; the mean of each is kept."""

    def step(self):
        if self.number % 10 == 0:
            self.net.eval()
            with torch.inference_mode():
                outputs = [self.net(self.batch()) for _ in range(5)]
            self.listed.append(torch.cat(outputs).mean().item())
            self.net.train()
        return super().step()


class Metrics(Run):
    def __init__(self):
        super().__init__()
        self.sums = {name: torch.zeros(()) for name in ("loss", "error")}

    def step(self):
        for name in self.sums:
            self.sums[name] = self.sums[name] + super().step()
        if self.number % 20 == 0:
            self.sums = {name: torch.zeros(()) for name in self.sums}


class Worst(Run):
    """The ten batches of the largest loss."""

    def step(self):
        self.last = self.batch()
        self.listed.append((float(super().step()), self.last))
        self.listed = sorted(self.listed, key=lambda entry: entry[0])[-10:]

    def loss(self):
        return self.net(self.last).square().mean()


class LastCheckpoints(Run):
    """The last three, in files; those of memory here, whose bytes are Python's."""

    def step(self):
        loss = super().step()
        if self.number % 8 == 0:
            file = io.BytesIO()
            torch.save({"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            self.listed = [*self.listed[-2:], file]
            file.seek(0)
            self.optimizer.load_state_dict(torch.load(file)["optimizer"])
        return loss


class SkippedBatches(Run):
    """Some raise, and the loop goes on; the last error is kept."""

    def loss(self):
        loss = super().loss()
        if self.number % 6 == 3:
            raise ValueError(f"a bad batch: {loss.shape}")
        return loss

    def step(self):
        try:
            super().step()
        except ValueError as error:
            self.error = error
            self.optimizer.zero_grad()


class PrefetchingThread(Run):
    """Makes the batches, and never more than two ahead."""

    def __init__(self):
        super().__init__()
        self.waiting, self.ends = queue.Queue(maxsize=2), False
        self.thread = threading.Thread(target=self.fetch)
        self.thread.start()

    def fetch(self):
        while not self.ends:
            self.waiting.put(torch.ones(4, 8))

    def close(self):
        self.ends = True
        self.waiting.get()
        self.thread.join()

    def batch(self):
        return self.waiting.get()


class Tokens(Run):
    """Windows of one text, truncated between one and the next; hidden states go from each to the next."""

    hidden = None

    def loss(self):
        losses = []
        hidden = torch.zeros(4, 4) if self.hidden is None else self.hidden.detach()
        for _ in range(5):
            hidden = self.net(torch.cat([hidden, self.batch()[:, :4]], 1))
            losses.append(hidden.square().mean())
        self.hidden = hidden
        return torch.stack(losses).mean()


class CurriculumOfLengths(Run):
    """From short to long, and no longer."""

    def batch(self):
        self.last = torch.randn(min(1 + self.number // 4, 12), 8)
        return self.last
