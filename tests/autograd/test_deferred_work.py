"""zbpipe.defer: work that a Function's backward hands over in I is done in W, once, and added as all else is."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from oracle import ORDERS, Stage, check, late, one_weight_pass, weight
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import zbpipe

f64 = torch.float64


class Phases:
    """Which pass runs, for the functions that are handed over to say where they were called."""

    def __init__(self):
        self.calls = []
        self.phase = "forward"

    def __call__(self, name):
        self.calls.append((name, self.phase))


@pytest.fixture
def phases(monkeypatch):
    """Tells what `note(name)` is called in: "forward", "I", "W" or "backward"."""
    note = Phases()

    def watch(owner, name, phase):
        run = getattr(owner, name)

        def wrapped(*args, **kwargs):
            before, note.phase = note.phase, phase
            try:
                return run(*args, **kwargs)
            finally:
                note.phase = before

        monkeypatch.setattr(owner, name, wrapped)

    watch(zbpipe, "stage_backward_input", "I")
    watch(zbpipe, "stage_backward_weight", "W")
    watch(torch.autograd, "backward", "backward")
    return note


class Linear(Function):
    """x @ w + b; b may be None."""

    @staticmethod
    def forward(ctx, x, w, b, note=lambda name: None):
        ctx.save_for_backward(x, w)
        ctx.note = note
        return x @ w if b is None else x @ w + b

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        note = ctx.note

        def weight_grads(x, grad):
            note("work")
            return x.mT @ grad, grad.sum(0)

        dw, db = zbpipe.defer(weight_grads, weights=(1, 2), saved=(x, grad))
        return grad @ w.mT, dw, db, None


def two_layers(m, x):
    return Linear.apply(Linear.apply(x, m.a, m.b).sin(), m.c, None)


def layers():
    return {"a": (4, 5), "b": (5,), "c": (5, 3)}


def test_gradients_are_those_of_an_ordinary_backward():
    check(Stage(two_layers, **layers()), (3, 4), exact=True, orders=(*ORDERS, one_weight_pass))


def test_work_is_done_in_the_weight_pass(phases):
    def forward(m, x):
        return Linear.apply(Linear.apply(x, m.a, m.b, phases).sin(), m.c, None, phases)

    check(Stage(forward, **layers()), (3, 4), orders=(late,))
    assert phases.calls == [("work", "W")] * 4 + [("work", "backward")] * 4
