"""The word on the logger ``zbpipe`` where a zero-bubble schedule's weight passes have next to nothing to do."""

import inspect
import logging
import re

import pytest
import torch
from support import functions
from support.compiled import mlp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe._stage import idle  # what was said is a process's, and a test has its own

pytestmark = pytest.mark.usefixtures("alone", "nothing_said")
N = 4


class Product(functions.Product):
    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.mT, x.mT @ grad, None


class Of(nn.Module):
    """``forward(module, x)`` with these weights, of N x N."""

    def __init__(self, forward, count=1, **modules):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(N, N) / N for _ in range(count))
        for name, module in modules.items():
            self.add_module(name, module)
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def through(function):
    def forward(module, x):
        for weight in module.weights:
            x = function.apply(x, weight)
        return module.linear(x) if hasattr(module, "linear") else x

    return forward


def linear():
    return nn.Linear(N, N, bias=False)


def post_hooked(module, x):
    y = nn.functional.linear(x, module.weights[0])
    y.grad_fn.register_hook(lambda grads, _: None)
    return y


def reentrant(module, x):
    return checkpoint(lambda x: nn.functional.linear(x, module.weights[0]).tanh(), x, use_reentrant=True)


def with_main_grads(module, is_inference=False):
    for weight in module.parameters():
        with torch.inference_mode(is_inference):
            weight.main_grad = torch.zeros_like(weight)
    return module


def lora(module, x):
    return Product.apply(x, module.weights[0]) + x @ module.weights[1] @ module.weights[2]


def frozen_base(count=3):
    module = Of(lora, count)
    module.weights[0].requires_grad_(False)
    return module


def one_expert(module, x):
    return torch.cat([x @ module.weights[0], x[:0] @ module.weights[1]])


NEEDS_BASE = "custom Function that defers nothing: runs whole in I"
SAID = {
    "a Function": (lambda: Of(through(Product)), {}, f"0 of 1 matrices, 0 % .*1 by ProductBackward: {NEEDS_BASE}"),
    "five of six": (lambda: Of(through(Product), 5, linear=linear()), {}, "1 of 6 matrices, 17 % .*5 by ProductBack"),
    "compiled": (
        lambda: torch.compile(mlp(N), backend="aot_eager"),
        {},
        "2 by CompiledFunctionBackward: compiled: runs",
    ),
    "a post hook": (lambda: Of(post_hooked), {}, r"1 by \w+Backward0: a hook on its node is owed"),
    "no known node": (
        lambda: Of(lambda m, x: m.lstm(x)[0], 0, lstm=nn.LSTM(N, N)),
        {},
        "2 by .*Backward.*: the node is not known to",
    ),
    "reentrant": (
        lambda: Of(reentrant),
        {},
        "0 of 1 matrices.*1 by a backward within the input pass.*: checkpoint with use_reentrant=False;",
    ),
    "reentrant, into main_grad": (
        lambda: with_main_grads(Of(reentrant)),
        {"main_grad": True},
        "1 by a backward within the input pass",
    ),
}
SILENT = {
    "a product": (linear, {}),
    "main_grad of inference mode, which has no version": (lambda: with_main_grads(linear(), is_inference=True), {}),
    "a node that runs again": (lambda: Of(lambda m, x: torch.addmm(x, x, m.weights[0], alpha=2)), {}),
    "work handed over": (lambda: Of(through(functions.Handing)), {}),
    "a fifth": (lambda: Of(through(Product), 4, linear=linear()), {}),
    "no matrix": (lambda: nn.BatchNorm1d(N), {}),
    "a lazy module that is not used": (
        lambda: Of(lambda m, x: m.linear(x), 0, linear=linear(), lazy=nn.LazyLinear(N)),
        {},
    ),
    "an embedding": (
        lambda: Of(lambda m, x: x + m.table(torch.arange(2)), 0, table=nn.Embedding(64, N)),
        {},
    ),
    "rows of an embedding": (
        lambda: Of(lambda m, x: torch.cat([x, m.table(torch.arange(2))])[:2], 0, table=nn.Embedding(64, N)),
        {},
    ),
    "a matrix that is added": (lambda: Of(lambda m, x: x + m.weights[0][:2]), {}),
    "LoRA": (frozen_base, {}),
    "an expert without tokens": (lambda: Of(one_expert, 2), {}),
    "defer nothing": (lambda: Of(post_hooked), {"defer": "nothing"}),
    "checkpoint in I": (
        lambda: Of(lambda m, x: checkpoint(Product.apply, x, m.weights[0], use_reentrant=False)),
        {"checkpoint": "input_pass"},
    ),
}


@pytest.fixture
def nothing_said():
    yield
    idle._said.clear()


def known(i):
    """What else a stage finds out by a backward, which a reentrant checkpoint would refuse."""
    grad = torch.zeros(2, N)
    meta = {
        "input_args": grad.clone().requires_grad_(i > 0),
        "output_args": grad.clone().requires_grad_(),
        "input_grads": grad if i > 0 else (None,),
        "output_grads": grad if i < 2 else (None,),
    }
    return {name: value for name, value in meta.items() if name in inspect.signature(PipelineStage).parameters}


def step(modules, schedule=ScheduleInterleavedZeroBubble, steps=1, **more):
    stages = [
        PipelineStage(module, i, 3, torch.device("cpu"), **known(i), **(more if i == 1 else {}))
        for i, module in enumerate(modules)
    ]
    if schedule is Schedule1F1B:
        stages = PipelineStage(nn.Sequential(*modules), 0, 1, torch.device("cpu"))
    run = schedule(stages, 2, loss_fn=nn.functional.mse_loss, scale_grads=False)
    for _ in range(steps):
        run.step(torch.randn(4, N), target=torch.randn(4, N))


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("case", SAID)
def test_it_is_said_once_what_runs_in_i_and_why(case, caplog, monkeypatch):
    make, choices, words = SAID[case]
    middle, word, asked = make(), idle.word, []
    monkeypatch.setattr(idle, "word", lambda *given: asked.append(given) or word(*given))
    with zbpipe.patch(), zbpipe.policy(**choices):
        step([linear(), middle, linear()], steps=2)
        step([linear(), middle, linear()])
    assert len(asked) == 2 * 2  # two stages that are split, of two schedules
    (text,) = said(caplog)
    assert text.startswith("stage 1: the weight pass computes the gradients of ")
    assert re.search(words, text), text


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_said_where_w_has_its_share_or_was_to_have_none(case, caplog):
    make, choices = SILENT[case]
    with zbpipe.patch(), zbpipe.policy(**choices):
        step([linear(), make(), linear()])
    assert not said(caplog)


def test_nothing_is_said_of_what_is_excluded(caplog):
    middle = Of(through(Product))
    with zbpipe.patch(), zbpipe.policy(exclude=list(middle.weights)):
        step([linear(), middle, linear()])
    assert not said(caplog)


@pytest.mark.parametrize("how", ["stage 0", "dw_builder", "whole backwards"])
def test_nothing_is_said_of_a_stage_that_is_not_split(how, caplog):
    modules = [linear(), linear(), linear()]
    modules[0 if how == "stage 0" else 1] = Of(through(Product))
    more = {"dw_builder": lambda: lambda: None} if how == "dw_builder" else {}
    with zbpipe.patch():
        step(modules, Schedule1F1B if how == "whole backwards" else ScheduleInterleavedZeroBubble, **more)
    assert not said(caplog)


def test_a_users_filter_cannot_stop_a_step(caplog):
    def raises(record):
        raise RuntimeError("planted")

    logger = logging.getLogger("zbpipe")
    logger.addFilter(raises)
    try:
        middle = Of(through(Product))
        with zbpipe.patch():
            step([linear(), middle, linear()])
        assert middle.weights[0].grad is not None
    finally:
        logger.removeFilter(raises)


def test_what_it_holds_instead_is_said(caplog):
    with zbpipe.patch():
        step([linear(), Of(through(Product)), linear()])
    assert f"{4 * N * N} bytes of gradients wait for the weight pass, per microbatch" in said(caplog)[0]
