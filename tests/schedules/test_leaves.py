"""Leaves of a stage's graph that its module does not list, beside an ordinary backward of the whole model.

One process has both stages.
"""

import pytest
import torch
import torch.nn.functional as F
from support import pipelines
from support.blocks import ZERO_BUBBLE
from support.functions import Asks
from support.pipelines import Pipeline
from torch import nn
from torch.distributed.pipelining.microbatch import _Replicate

import zbpipe

MICROBATCHES, BATCH, WIDTH, WORDS = 4, 8, 6, 10

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.parametrize("name", ZERO_BUBBLE)]


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, words, **_):
        return torch.tanh(self.layer(F.embedding(words, self.weight)))


class Second(nn.Module):
    """Its head is its own, or the first stage's embedding, which it does not list."""

    def __init__(self, owner=None):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = None if owner is not None else nn.Parameter(torch.randn(WORDS, WIDTH))
        self.owner = [owner]

    def forward(self, x, **given):
        hidden = torch.tanh(self.layer(x))
        for value in given.values():
            hidden = hidden + value
        return F.linear(hidden, self.owner[0].weight if self.head is None else self.head)


class Prototypes(nn.Module):
    """A loss with a matrix, a vector and a scale of its own."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Linear(WORDS, WORDS)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, out, target):
        return F.cross_entropy(self.rows(out) * self.scale.exp(), target, reduction="sum")


def cross_entropy(out, target):
    return F.cross_entropy(out, target, reduction="sum")


class Model:
    """Two stages, a loss, and what is given by keyword: a function of `extra`, made anew for each step."""

    def __init__(self, borrows=False, loss=cross_entropy, keyword=None, named="extra", is_whole=False):
        torch.manual_seed(1)
        first = First()
        self.extra = nn.Parameter(torch.randn(*[BATCH] * (not is_whole), WIDTH, dtype=torch.float64))
        self.parts = [first.double(), Second(first if borrows else None).double()]
        self.loss = loss().double() if isinstance(loss, type) else loss
        self.keyword, self.named, self.is_whole = keyword, named, is_whole

    def leaves(self):
        modules = [*self.parts, *([self.loss] if isinstance(self.loss, nn.Module) else [])]
        return {**pipelines.named(dict(enumerate(modules))), "extra": self.extra}

    def keywords(self):
        return {} if self.keyword is None else {self.named: self.keyword(self.extra)}

    def grads(self):
        return {name: leaf.grad for name, leaf in self.leaves().items()}

    def unsplit(self, words, target):
        """Ordinary backwards of the whole model."""
        given = self.keywords()
        for i, (value, goal) in enumerate(zip(words.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)):
            chunk = {k: t if self.is_whole else t.chunk(MICROBATCHES)[i] for k, t in given.items()}
            self.loss(self.parts[1](self.parts[0](value), **chunk), goal).backward()

    def pipeline(self, name, scale_grads=False):
        spec = {"kwargs_chunk_spec": {self.named: _Replicate()}} if self.is_whole else {}
        return Pipeline(name, self.parts).start(self.loss, MICROBATCHES, scale_grads, **spec)

    def step(self, name, words, target, **options):
        self.pipeline(name, **options).step(words, target, **self.keywords())


def batch(step):
    torch.manual_seed(10 + step)
    return torch.randint(WORDS, (BATCH,)), torch.randint(WORDS, (BATCH,))


MODELS = {
    "a loss with weights": {"loss": Prototypes},
    "a borrowed weight": {"borrows": True},
    "a parameter by keyword": {"keyword": lambda extra: extra},
    "by keyword, computed from a parameter": {"keyword": lambda extra: extra.t().reshape(BATCH, WIDTH)},
    "a parameter by keyword, whole": {"keyword": lambda extra: extra, "is_whole": True},
    "by a keyword that zbpipe uses": {"keyword": lambda extra: extra, "named": "original"},
    "all of them": {"loss": Prototypes, "borrows": True, "keyword": lambda extra: extra},
}


@pytest.mark.parametrize("model", MODELS)
def test_every_leaf_is_trained(name, model):
    split, whole = Model(**MODELS[model]), Model(**MODELS[model])
    line = split.pipeline(name)
    for step in range(2):
        words, target = batch(step)
        whole.unsplit(words, target)
        with zbpipe.patch():
            line.step(words, target, **split.keywords())
        torch.testing.assert_close(split.grads(), whole.grads())


def test_a_borrowed_weight_is_scaled_with_its_owners(name):
    """Its owner's last weight pass comes after the borrower's, in all of torch's schedules."""
    split, whole = Model(borrows=True), Model(borrows=True)
    whole.unsplit(*batch(0))
    with zbpipe.patch():
        split.step(name, *batch(0), scale_grads=True)
    scaled = {name: None if grad is None else grad / MICROBATCHES for name, grad in whole.grads().items()}
    torch.testing.assert_close(split.grads(), scaled)


def test_main_grad(name):
    split, whole = (Model(loss=Prototypes, borrows=True, keyword=lambda extra: extra) for _ in range(2))
    for leaf in split.leaves().values():
        leaf.main_grad = torch.zeros_like(leaf)
    whole.unsplit(*batch(0))
    with zbpipe.patch(), zbpipe.policy(main_grad=True):
        split.step(name, *batch(0))
    assert all(grad is None for grad in split.grads().values())
    torch.testing.assert_close({name: leaf.main_grad for name, leaf in split.leaves().items()}, whole.grads())


def test_hooks_of_the_loss_fire_once_per_microbatch(name):
    split, whole = Model(loss=Prototypes), Model(loss=Prototypes)
    seen = [watch(model.loss) for model in (split, whole)]
    whole.unsplit(*batch(0))
    with zbpipe.patch():
        split.step(name, *batch(0))
    torch.testing.assert_close(*seen)


def watch(loss):
    """What the hooks of a loss's weights are called with."""
    seen = []
    loss.rows.weight.register_hook(lambda grad: seen.append(grad.clone()))
    loss.scale.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    return seen


class Adds(nn.Module):
    """A loss with a product whose work adds all gradients itself, and names no weight."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(WORDS, WORDS))

    def ask(self, x, w, grad):
        def add(x, grad):
            product = x.t() @ grad
            self.rows.grad = product if self.rows.grad is None else self.rows.grad + product

        zbpipe.defer(add, None, (x, grad))
        return None, None

    def forward(self, out, target):
        return cross_entropy(Asks.apply(out, self.rows, None, self.ask), target)


def test_work_that_names_no_weight(name):
    split, whole = Model(loss=Adds), Model(loss=Adds)
    line = split.pipeline(name)
    for step in range(2):
        words, target = batch(step)
        for leaf in [*split.leaves().values(), *whole.leaves().values()]:
            leaf.grad = None  # the first step has learned from a backward what gradients look like
        whole.unsplit(words, target)
        with zbpipe.patch():
            line.step(words, target)
    torch.testing.assert_close(split.grads(), whole.grads())


def test_weights_given_by_hand_restrict_even_within_a_stages_pass(name):
    """What a hook calls is not the stage's."""
    split, whole = Model(), Model()
    layer, other = nn.Linear(WIDTH, WIDTH).double(), nn.Parameter(torch.randn(WIDTH, WIDTH).double())

    def by_hand(grad):
        with torch.enable_grad():
            x = torch.ones(1, WIDTH, dtype=torch.float64, requires_grad=True)
            out = layer(x) @ other
        _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], layer.parameters())
        zbpipe.stage_backward_weight(layer.parameters(), groups)

    split.parts[1].layer.weight.register_hook(by_hand)
    split.parts[1].layer.register_full_backward_hook(lambda module, grads, _: by_hand(grads))
    whole.unsplit(*batch(0))
    with zbpipe.patch():
        split.step(name, *batch(0))
    assert layer.weight.grad is not None and other.grad is None
    torch.testing.assert_close(split.grads(), whole.grads())
