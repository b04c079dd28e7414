"""Kinds of leaks that programs have: each is found, and the program's own place is named, not a library's."""

import asyncio
import contextlib
import contextvars
import ctypes
import enum
import functools
import inspect
import io
import itertools
import logging
import pickle
import queue
import sys
import threading
import types
import unittest.mock
import warnings
import weakref
from concurrent.futures import Future

import pytest
import torch

from zbpipe.leaks import check_tensor_leak

KEPT = []


@pytest.fixture(autouse=True)
def _nothing_kept():
    yield
    for thing in KEPT:
        if inspect.iscoroutine(thing):
            thing.close()
    KEPT.clear()


def made():
    return torch.ones(7)


def raised(chained=False):
    try:
        tensor = made()
        raise ValueError(tensor.shape)
    except ValueError as error:
        if not chained:
            return error
        try:
            raise KeyError from error
        except KeyError as other:
            return other


def suspended():
    def steps():
        tensor = made()
        yield tensor.shape

    walk = steps()
    next(walk)
    return walk


def awaited():
    async def steps(tensor):
        await asyncio.sleep(0)

    return steps(made())


class Method:
    def __init__(self):
        self.tensor = made()

    def method(self):
        pass


def cached():
    @functools.lru_cache(maxsize=8)
    def compute(number):
        return made()

    compute(1)
    return compute


def finalized():
    owner = Method.__new__(Method)
    KEPT.append(weakref.finalize(owner, print, made()))
    return owner


def referred():
    owner = Method.__new__(Method)
    tensor = made()
    return [owner, weakref.ref(owner, lambda _: tensor)]


def of_a_context():
    context = contextvars.copy_context()
    context.run(contextvars.ContextVar("of the run").set, made())
    return context


def metaclass():
    class Meta(type):
        pass

    Meta.tensor = made()
    return Meta("Made", (), {})


def enumeration():
    class Sizes(enum.Enum):
        SMALL = enum.auto()

    Sizes.SMALL.tensor = made()
    return Sizes


def future():
    done = Future()
    done.set_result(made())
    return done


def weak_keys():
    key, values = Method.__new__(Method), weakref.WeakKeyDictionary()
    values[key] = made()
    return [key, values]


def queued():
    waiting = queue.Queue()
    waiting.put(made())
    return waiting


def logged():
    return logging.LogRecord("name", logging.INFO, "file", 1, "%s", (made(),), None)


def logged_error():
    return logging.LogRecord("name", logging.INFO, "file", 1, "", (), (ValueError, raised(), raised().__traceback__))


def warned():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warning = UserWarning("x")
        warning.tensor = made()
        warnings.warn(warning, stacklevel=1)
    return caught


def of_asyncio():
    waiting = asyncio.Queue()
    waiting.put_nowait(made())
    return waiting


def mocked():
    mock = unittest.mock.Mock()
    mock(made())
    return mock


def pickler():
    writer = pickle._Pickler(io.BytesIO())
    writer.memo[0] = made()
    return writer


def hooked():
    tensor = made()
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda grad: grad * tensor.sum())
    return weight


def by_several():
    tensor = made()
    weights = [torch.ones(1, requires_grad=True) for _ in range(2)]
    return weights, torch.autograd.graph.register_multi_grad_hook(weights, lambda grads: tensor)


def of_ctypes():
    return ctypes.py_object(made())


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.tensor = made()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


KINDS = {
    "partial": lambda: functools.partial(print, made()),
    "keyword of a partial": lambda: functools.partial(print, end=made()),
    "bound method": lambda: Method().method,
    "default": lambda: lambda tensor=made(): tensor,  # noqa: B008
    "exception": raised,
    "cause of an exception": lambda: raised(chained=True),
    "generator": suspended,
    "coroutine": awaited,
    "cache": cached,
    "finalizer": finalized,
    "callback of a weak reference": referred,
    "context": of_a_context,
    "metaclass": metaclass,
    "enumeration": enumeration,
    "cycle": lambda: itertools.cycle([made()]),
    "tee": lambda: itertools.tee([made()]),
    "map": lambda: map(print, [made()]),
    "memoryview": lambda: memoryview(made().numpy()),
    "ctypes": of_ctypes,
    "typed storage": lambda: made().untyped_storage(),
    "context of a Function": lambda: Kept.apply(torch.ones(1, requires_grad=True)),
    "hook": hooked,
    "hook of several": by_several,
    "state_dict": lambda: torch.nn.Linear(7, 1, bias=False).state_dict(),
    "sparse": lambda: torch.sparse_coo_tensor(
        torch.zeros(1, 7, dtype=torch.int64), made(), (9,), check_invariants=False
    ),
    "future": future,
    "weak keys": weak_keys,
    "queue": queued,
    "record of a log": logged,
    "error in a log": logged_error,
    "timer": lambda: threading.Timer(1e6, print, [made()]),
    "warning": warned,
    "queue of asyncio": of_asyncio,
    "nullcontext": lambda: contextlib.nullcontext(made()),
    "call of a mock": mocked,
    "memo of a pickler": pickler,
    "namespace": lambda: types.SimpleNamespace(x=made()),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_found_and_the_programs_place_is_named(kind):
    with check_tensor_leak(action="record") as check:
        KEPT.append(KINDS[kind]())
    leaks = [leak for leak in check.report.leaks if leak.bytes == 28]
    assert leaks, check.report
    if kind == "finalizer":  # nobody but the standard library holds it
        assert "finalize" in leaks[0].blame.text
        return
    for leak in leaks:
        assert not leak.blame.is_library, check.report
        assert __name__ in leak.blame.text or __file__.endswith(str(leak.blame.where).partition(":")[0]), check.report
        assert leak.chain[0].kind != "unknown", check.report


@pytest.mark.parametrize(("module", "name"), [("sys", "last_value"), ("builtins", "_")])
def test_what_the_interpreter_remembers(module, name, monkeypatch):
    monkeypatch.setattr(sys.modules[module], name, None, raising=False)
    with check_tensor_leak(action="record") as check:
        setattr(sys.modules[module], name, made())
    (leak,) = check.report.leaks
    assert leak.chain[0].text == f"module global {module}.{name}"
