"""Kinds of leaks in the language and its library, each with the holder that is to be named first."""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import io
import pickle
import queue
import re
import sys
import threading
import types

import pytest
import torch
from support.checks import checked

KEPT = []
BYTES = 28
PLACE = f"module global {__name__}.KEPT"
# In Python 3.10 a generator has a frame beside it, and a pickler shows nobody what it remembers.
NEWER = sys.version_info >= (3, 11)


@pytest.fixture(autouse=True)
def _nothing_kept():
    yield
    KEPT.clear()


def made():
    return torch.ones(7)


class Owner:
    cache = None

    def __init__(self, **fields):
        self.__dict__.update(fields)


# ---- of the language


def closure():
    tensor = made()
    return lambda: tensor


def context_of_an_error():
    try:
        tensor = made()
        raise ValueError(tensor.shape)
    except ValueError:
        try:
            raise KeyError
        except KeyError as error:
            return error


def error_with_it():
    return ValueError("a shape", made())


def in_a_class():
    Owner.cache = made()


def in_a_slot():
    @dataclasses.dataclass(slots=True)
    class Entry:
        value: torch.Tensor

    return Entry(made())


def module_outside():
    module = types.ModuleType("outside")
    module.tensor = made()
    return module


def code_with_globals():
    namespace = {"tensor": made()}
    exec("def function(): return tensor", namespace)
    return namespace["function"]


def suspended_async():
    async def steps():
        tensor = made()
        yield tensor.shape

    walk = steps()
    with contextlib.suppress(StopIteration):
        walk.__anext__().send(None)
    return walk


def wrapped():
    @functools.wraps(made)
    def function():
        pass

    function.result = made()
    return function


def cached_property():
    class Model:
        @functools.cached_property
        def features(self):
            return made()

    model = Model()
    assert model.features is not None
    return model


def singledispatch():
    tensor = made()

    @functools.singledispatch
    def function(x):
        pass

    function.register(int, lambda x: tensor)
    return function


def stack():
    stack = contextlib.ExitStack()
    stack.callback(print, made())
    return stack


def frame():
    tensor = made()
    return inspect.currentframe(), tensor.shape


def of_c_pickler():
    writer = pickle.Pickler(io.BytesIO())
    writer.persistent_id = lambda thing: None
    writer.memo = {0: (0, made())}
    return writer


def keyed_by_tensors():
    return {made(): 1}


def ordered():
    return collections.OrderedDict(x=collections.ChainMap({"y": made()}))


def proxied():
    return types.MappingProxyType({"x": made()})


def deque():
    return collections.deque([None, made()], maxlen=5)


def counter():
    counted = collections.defaultdict(list)
    counted["x"].append(made())
    return counted


# ---- other threads and tasks


def thread_local():
    local = threading.local()
    local.cache = made()
    return local


def done_future():
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(made)
    future.result()
    pool.shutdown()
    return future


def priority():
    waiting = queue.PriorityQueue()
    waiting.put((1, made()))
    return waiting


def simple_queue():
    waiting = queue.SimpleQueue()
    waiting.put(made())
    return waiting


def done_task():
    async def steps():
        return made()

    async def run():
        task = asyncio.ensure_future(steps())
        await task
        return task

    return asyncio.run(run())


KINDS = {
    "closure": (closure, "closure variable tensor of .*closure"),
    "context of an error": (context_of_an_error, PLACE),
    "arguments of an error": (error_with_it, PLACE),
    "class attribute": (in_a_class, f"class attribute cache of {__name__}.Owner"),
    "slot of a dataclass": (in_a_slot, "attribute value of .*Entry"),
    "module outside of sys.modules": (module_outside, "module global outside.tensor"),
    "globals of a function": (code_with_globals, PLACE),
    "asynchronous generator": (
        suspended_async,
        "suspended suspended_async.<locals>.steps" if NEWER else "variable tensor of steps",
    ),
    "attribute of a function": (wrapped, "function .*made"),
    "cached property": (cached_property, "attribute features of .*Model"),
    "single dispatch": (singledispatch, "closure variable tensor of .*singledispatch.<locals>.<lambda>"),
    "exit stack": (stack, PLACE),
    "frame": (frame, "variable tensor of .*frame"),
    "C pickler": (of_c_pickler, PLACE if NEWER else r"C or C\+\+ that cannot be seen"),
    "key of a dictionary": (keyed_by_tensors, PLACE),
    "ordered dictionary": (ordered, PLACE),
    "proxy of a dictionary": (proxied, PLACE),
    "deque": (deque, PLACE),
    "default dictionary": (counter, PLACE),
    "attribute": (lambda: Owner(x=made()), f"attribute x of {__name__}.Owner"),
    "attribute of an attribute": (lambda: Owner(x=Owner(y=[made()])), f"attribute y of {__name__}.Owner"),
    "thread local": (thread_local, PLACE),
    "result of a future": (done_future, PLACE),
    "priority queue": (priority, PLACE),
    "simple queue": (simple_queue, PLACE),
    "result of a task": (done_task, PLACE),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore:TypedStorage")
def test_the_first_is_to_blame(kind):
    make, expected = KINDS[kind]
    report = checked(lambda: KEPT.append(make()))
    Owner.cache = None
    leaks = [leak for leak in report.leaks if leak.bytes >= BYTES]
    assert leaks, report
    assert re.match(expected, leaks[0].blame.text), report
    assert not leaks[0].blame.is_library
    assert report.notes == []
