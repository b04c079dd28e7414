"""Kinds of leaks that programs have: how each is made, whom it is to be blamed on, and the words of its chain.

test_kinds.py makes all within one check, so that one search finds them. Each kind has tensors of a size of its own.
"""

import asyncio
import atexit
import builtins
import collections
import concurrent.futures
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
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

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

KEPT = {}  # the global
HELD = None
CONTEXT = contextvars.ContextVar("cache", default=None)
SIZE = 8  # elements of what a kind makes: even, and another number for each
PLACE = f"module global {__name__}.KEPT"
# In Python 3.10 a generator has a frame beside it, and a pickler shows nobody what it remembers.
NEWER = sys.version_info >= (3, 11)


def made():
    return torch.ones(SIZE)


def graph():
    return (torch.ones(SIZE, requires_grad=True) * 2).exp()


def loaded():
    file = io.BytesIO()
    torch.save(made(), file)
    file.seek(0)
    return torch.load(file)


def layer():
    return nn.Linear(SIZE, 1, bias=False)


def after(thing, method, *arguments):
    """A thing, one of whose methods was called."""
    getattr(thing, method)(*arguments)
    return thing


def with_attribute(name, thing):
    setattr(thing, name, made())
    return thing


def leaf():
    return torch.ones(1, requires_grad=True)


def raised(chained=False):
    try:
        tensor = made()  # its variable
        raise ValueError(tensor.shape)  # the error
    except ValueError as error:
        if not chained:
            return error
        try:
            raise KeyError from error
        except KeyError as other:
            return other


class Owner:
    __slots__ = ("__dict__", "__weakref__", "slot")

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def remember(self):
        self.cache = made()  # the attribute
        return self

    def fill(self):
        self.slot = made()  # the slot
        return self

    def method(self):
        pass


class OfTheLanguage:
    def closure():
        tensor = made()

        def inner():  # the closure
            return tensor

        return inner

    def default():
        def inner(tensor=made()):  # noqa: B008 # the default
            return tensor

        return inner

    def context_of_an_exception():
        try:
            tensor = made()
            raise ValueError(tensor.shape)
        except ValueError:
            try:
                raise KeyError
            except KeyError as error:
                return error

    def generator():
        def steps():  # the generator
            tensor = made()
            yield tensor.shape

        walk = steps()
        next(walk)
        return walk

    def asynchronous_generator():
        async def steps():
            tensor = made()
            yield tensor.shape

        walk = steps()
        with contextlib.suppress(StopIteration):
            walk.__anext__().send(None)
        return walk

    def coroutine():
        async def steps(tensor):
            await asyncio.sleep(0)

        return steps(made())

    def frame():
        tensor = made()
        return inspect.currentframe(), tensor.shape

    def slot_of_a_dataclass():
        @dataclasses.dataclass(slots=True)
        class Entry:
            value: torch.Tensor

        return Entry(made())

    def enumeration():
        class Sizes(enum.Enum):
            SMALL = enum.auto()

        Sizes.SMALL.tensor = made()
        return Sizes

    def globals_of_a_function():
        namespace = {"tensor": made()}
        exec("def function(): return tensor", namespace)
        return namespace["function"]

    def callback_of_a_weak_reference():
        owner, tensor = Owner(), made()
        return [owner, weakref.ref(owner, lambda _, tensor=tensor: tensor)]


class OfTheStandardLibrary:
    def cache():
        @functools.lru_cache(maxsize=8)
        def compute(number):
            return made()

        compute(1)
        return compute

    def cached_property():
        class Model:
            @functools.cached_property
            def features(self):
                return made()

        model = Model()
        assert model.features is not None
        return model

    def finalizer():
        owner = Owner()
        weakref.finalize(owner, id, made())
        return owner

    def weak_keys():
        key, values = Owner(), weakref.WeakKeyDictionary()
        values[key] = made()
        return [key, values]

    def result_of_a_task():
        async def steps():
            return made()

        async def run():
            task = asyncio.ensure_future(steps())
            await task
            return task

        return asyncio.run(run())

    def error_in_a_log():
        given = (ValueError, raised(), raised().__traceback__)
        return logging.LogRecord("name", logging.INFO, "file", 1, "", (), given)

    def warning():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warning = UserWarning("x")
            warning.tensor = made()
            warnings.warn(warning, stacklevel=1)
        return caught

    def memo_of_a_pickler():
        writer = pickle._Pickler(io.BytesIO())
        writer.memo[0] = made()
        return writer

    def C_pickler():
        writer = pickle.Pickler(io.BytesIO())
        writer.memo = {0: (0, made())}
        return writer


class Finalized(np.ndarray):
    def __array_finalize__(self, obj):
        if obj is not None and type(obj) is Finalized:
            pytest.fail("its code ran")

    base = property(lambda self: pytest.fail("its code ran"))
    dtype = property(lambda self: pytest.fail("its code ran"))


class OfNumpy:
    def objects():
        array = np.empty((2, 3), dtype=object)
        array[1, 2] = made()
        return array

    def fields():
        array = np.zeros(3, dtype=[("x", "i1"), ("p", [("q", "O"), ("r", "O", (2,))])])
        array["p"]["r"][1, 1] = made()
        return array

    def view_on_objects():
        array = np.empty((4, 6), dtype=object)[::2, ::-2]
        array[1, 1] = made()
        return array


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # the Function
        ctx.save_for_backward(x * 2)
        ctx.tensor = made()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = layer()  # the layer
        self.register_buffer("mask", torch.ones(3))


class Half(nn.Module):
    def forward(self, x):
        return x / 2


class Rows:
    def __init__(self):
        self.tensors = made()


def hook_with(held):
    def hook(*given):  # the hook
        pytest.fail(f"a hook with {held} ran")

    return hook


def with_a_hook_at_its_leaf(register):
    out = leaf().exp()
    after(out.grad_fn.next_functions[0][0], register, hook_with(made()))
    return out


class Mine(torch.Tensor):
    pass


class OfTorch:
    def history_of_LBFGS():
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.LBFGS([weight])
        optimizer.state[weight]["prev_flat_grad"] = made()
        return optimizer

    def parametrization():
        parametrized = layer()
        parametrize.register_parametrization(parametrized, "weight", Half())
        with parametrize.cached():
            assert parametrized.weight is not None
            return parametrized, dict(parametrize._cache)

    def constant_of_fx():
        tensor = made()

        class Module(nn.Module):
            def forward(self, x):
                return x + tensor

        return torch.fx.symbolic_trace(Module())

    def gradient():
        x = graph()
        x.retain_grad()
        x.sum().backward()
        return x.grad

    def hook_of_several():
        weights = [torch.ones(SIZE, requires_grad=True) for _ in range(2)]
        return weights, torch.autograd.graph.register_multi_grad_hook(weights, hook_with(made()))

    def pack_hook():
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (tensor.detach(), made()), lambda packed: pytest.fail("unpacked")
        ):
            return torch.ones(1, requires_grad=True).exp()

    def anomaly_mode():
        with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly(check_nan=False):
            return graph()

    def accumulated():
        leaf = torch.ones(SIZE, requires_grad=True)
        (leaf * 1).sum().backward()
        return (leaf * 2).grad_fn

    def function_that_fights_back():
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

        out = Double.apply(torch.ones(SIZE, requires_grad=True))
        Double.forward = Ran()
        return out

    def other_data():
        """`out.data = torch.empty(1)`: the tensor is small, its graph keeps the saved output."""
        out = torch.ones(1, requires_grad=True).expand(SIZE).exp()
        out.data = torch.empty(1)
        return out


class Odd:
    def __repr__(self):
        raise ValueError("no")

    __str__ = __eq__ = __hash__ = __len__ = __bool__ = __iter__ = __repr__

    @property
    def __class__(self):
        raise ValueError("no")

    def __getattribute__(self, name):
        raise ValueError(name)


class OddDict(dict):
    def __getitem__(self, key):
        raise ValueError("no")

    items = keys = values = __iter__ = __contains__ = __getitem__


class OddList(list):
    def __iter__(self):
        raise ValueError("no")

    __getitem__ = index = __eq__ = __iter__


class OddMeta(type):
    def __getattribute__(cls, name):
        raise ValueError(name)

    def __instancecheck__(cls, instance):
        raise ValueError("no")


class OddClass(metaclass=OddMeta):
    pass


class Proud(type):
    @property
    def __module__(cls):
        raise RuntimeError("no module for you")


class Locked:
    @property
    def __dict__(self):
        raise SystemExit("run")


class Name(str):
    pass


class Unequal(type):
    def __eq__(cls, other):
        pytest.fail("a class was compared")

    def __hash__(cls):
        pytest.fail("a class was hashed")


class Key:
    def __hash__(self):
        return hash("__name__")

    def __eq__(self, other):
        pytest.fail("a key was compared")


class Ran:
    def __get__(self, instance, owner):
        pytest.fail("a descriptor ran")


class Contrary(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("no")


def holding(thing):
    object.__setattr__(thing, "held", made())
    return thing


def makers(cls):
    return {name.replace("_", " "): make for name, make in vars(cls).items() if not name.startswith("__")}


# How each is made: what it returns is kept.
KINDS = {
    **makers(OfTheLanguage),
    **makers(OfTheStandardLibrary),
    **makers(OfNumpy),
    **makers(OfTorch),
    "exception": raised,
    "cause of an exception": lambda: raised(chained=True),
    "metaclass": lambda: with_attribute("tensor", type("Meta", (type,), {}))("Made", (), {}),
    "module outside of sys modules": lambda: with_attribute("tensor", types.ModuleType("outside")),
    "attribute of a function": lambda: with_attribute("result", functools.wraps(made)(lambda: None)),
    "thread local": lambda: with_attribute("cache", threading.local()),
    "single dispatch": lambda: after(functools.singledispatch(print), "register", int, hook_with(made())),
    "exit stack": lambda: after(contextlib.ExitStack(), "callback", print, made()),
    "default dictionary": lambda: collections.defaultdict(list, x=[made()]),
    "queue of threads": lambda: after(queue.Queue(), "put", made()),
    "priority queue": lambda: after(queue.PriorityQueue(), "put", (1, made())),
    "simple queue": lambda: after(queue.SimpleQueue(), "put", made()),
    "queue of asyncio": lambda: after(asyncio.Queue(), "put_nowait", made()),
    "future": lambda: after(concurrent.futures.Future(), "set_result", made()),
    "call of a mock": lambda: after(unittest.mock.Mock(), "__call__", made()),
    "context": lambda: after(contextvars.copy_context(), "run", contextvars.ContextVar("of the run").set, made()),
    "optimizer": lambda: torch.optim.SGD([made()], lr=0.1),
    "schedule of rates": lambda: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(made())], lr=0.1), 2),
    "jagged": lambda: torch.nested.nested_tensor_from_jagged(made(), torch.tensor([0, 3, SIZE])),
    "subclass": lambda: made().as_subclass(Mine),
    "buffer": lambda: after(nn.Module(), "register_buffer", "seen", made()),
    "statistics": lambda: nn.BatchNorm1d(SIZE, affine=False),
    "full backward hook": lambda: after(nn.Linear(1, 1), "register_full_backward_hook", hook_with(made())),
    "hook of state dict": lambda: after(nn.Linear(1, 1), "_register_state_dict_hook", hook_with(made())),
    "forward hook": lambda: after(nn.Linear(1, 1), "register_forward_hook", functools.partial(print, made())),
    "tensor hook": lambda: after(leaf(), "register_hook", hook_with(made())),
    "hook after accumulation": lambda: after(leaf(), "register_post_accumulate_grad_hook", hook_with(made())),
    "pre hook": lambda: with_a_hook_at_its_leaf("register_prehook"),
    "post hook": lambda: with_a_hook_at_its_leaf("register_hook"),
    "attribute": lambda: Owner().remember(),
    "slot": lambda: Owner().fill(),
    "attribute of an attribute": lambda: Owner(x=Owner(y=[made()])),
    "bound method": lambda: Owner().remember().method,
    "arguments of an error": lambda: ValueError("a shape", made()),
    "nested lists": lambda: [0, [made()]],
    "tuple": lambda: (0, made()),
    "set": lambda: {made()},
    "deque": lambda: collections.deque([0, made()], maxlen=5),
    "key of a dictionary": lambda: {made(): 1},
    "ordered dictionary": lambda: collections.OrderedDict(x=collections.ChainMap({"y": made()})),
    "proxy of a dictionary": lambda: types.MappingProxyType({"x": made()}),
    "namespace": lambda: types.SimpleNamespace(x=made()),
    "partial": lambda: functools.partial(print, made()),
    "keyword of a partial": lambda: functools.partial(print, end=made()),
    "cycle": lambda: itertools.cycle([made()]),
    "tee": lambda: itertools.tee([made()]),
    "map": lambda: map(print, [made()]),
    "iterator": lambda: iter([made()] * 2),
    "nullcontext": lambda: contextlib.nullcontext(made()),
    "timer": lambda: threading.Timer(1e6, print, [made()]),
    "record of a log": lambda: logging.LogRecord("name", logging.INFO, "file", 1, "%s", (made(),), None),
    "value of a mock": lambda: unittest.mock.Mock(return_value=made()),
    "array": lambda: made().numpy(),
    "matrix": lambda: made().numpy().view(np.matrix),
    "record array": lambda: made().numpy().view(np.recarray),
    "masked array": lambda: np.ma.masked_array(made().numpy()),
    "array that fights back": lambda: made().numpy().view(Finalized),
    "array from DLPack": lambda: np.from_dlpack(made()),
    "capsule of DLPack": lambda: torch.utils.dlpack.to_dlpack(made()),
    "capsule of a version": lambda: made().__dlpack__(max_version=(1, 0)),
    "memory of numpy": lambda: torch.from_numpy(np.zeros(SIZE // 2)),
    "memoryview": lambda: memoryview(made().numpy()),
    "numpy over a memoryview": lambda: np.frombuffer(memoryview(made().numpy()), dtype=np.float32),
    "torch over a memoryview": lambda: torch.frombuffer(memoryview(made().numpy()), dtype=torch.float32),
    "torch over somebody's buffer": lambda: torch.frombuffer(bytearray(4 * SIZE), dtype=torch.float32),
    "ctypes over a memoryview": lambda: (ctypes.c_float * SIZE).from_buffer(memoryview(made().numpy())),
    "ctypes": lambda: ctypes.py_object(made()),
    "storage": lambda: made().untyped_storage(),
    "typed storage": lambda: made().storage(),
    "storage of Python's": lambda: torch.UntypedStorage(4 * SIZE),
    "deep copy": lambda: copy.deepcopy(made()),
    "loaded": loaded,
    "legacy tensor of a loaded one": lambda: torch.Tensor(loaded()),
    "view": lambda: made()[:2],
    "conjugate": lambda: torch.ones(SIZE // 2, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.sparse_coo_tensor(torch.zeros(1, SIZE, dtype=torch.int64), made(), (9,), check_invariants=False),
    "sparse by rows": lambda: made().diag().to_sparse_csr(),
    "state of a module": lambda: layer().state_dict(),
    "best state": lambda: copy.deepcopy(layer().state_dict()),
    "parts of a module": Block,
    "averaged model": lambda: torch.optim.swa_utils.AveragedModel(layer()),
    "dataset": lambda: torch.utils.data.TensorDataset(made()),
    "loader": lambda: iter(torch.utils.data.DataLoader(Rows(), batch_sampler=[[0]])),
    "context of a Function": lambda: Kept.apply(torch.ones(SIZE, requires_grad=True)),
    "graph": graph,
    "products": lambda: (torch.ones(1, requires_grad=True) * torch.full((SIZE,), 2.0)).sin(),
    "node alone": lambda: graph().sum().grad_fn,
    "losses": lambda: [graph().sum() for _ in range(3)],
    "odd object": lambda: holding(Odd()),
    "odd class": lambda: holding(OddClass()),
    "odd dictionary": lambda: OddDict({"key": made()}),
    "odd list": lambda: OddList([made()]),
    "odd key": lambda: {Odd: made()},
    "odd metaclass": lambda: holding(Proud("Proudly", (), {})()),
    "odd place of attributes": lambda: holding(Locked()),
    "odd class that is not compared": lambda: holding(Unequal("Held", (), {})()),
    "odd key that is not compared": lambda: {Key(): None, "tensor": made()},
    "odd subclass": lambda: made().as_subclass(Contrary),
    "string with an attribute": lambda: holding(Name("n")),
    "name that no encoding has": lambda: {"\udcff": made()},
}  # fmt: skip


# What is kept elsewhere than in KEPT, while its context lasts.


@contextlib.contextmanager
def beside(work):
    """A thread that waits in `work`."""
    waits = threading.Barrier(2)
    thread = threading.Thread(target=work, args=[lambda: (waits.wait(), waits.wait())], name="fetching")
    thread.start()
    waits.wait()
    yield
    waits.wait()
    thread.join()


class Elsewhere:
    def last_error():
        return unittest.mock.patch.object(sys, "last_value", made(), create=True)

    def last_result():
        return unittest.mock.patch.object(builtins, "_", made(), create=True)

    def output_of_a_notebook():  # whose file, under `python -m pytest`, is pytest's
        return unittest.mock.patch.multiple(sys.modules["__main__"], Out={1: made()}, __file__=__file__, create=True)

    def class_attribute():
        return unittest.mock.patch.object(Owner, "shared", made(), create=True)

    @contextlib.contextmanager
    def global_storage():
        global HELD
        HELD = made().untyped_storage()
        yield
        HELD = None

    @contextlib.contextmanager
    def context_variable():
        token = CONTEXT.set(made())
        yield
        CONTEXT.reset(token)

    @contextlib.contextmanager
    def cached_parametrization():
        parametrized = layer()
        parametrize.register_parametrization(parametrized, "weight", Half())
        with parametrize.cached():
            assert parametrized.weight is not None
            yield

    @contextlib.contextmanager
    def what_is_to_run_at_exit():
        """The interpreter's own list, which nobody can look into."""
        atexit.register(id, made())
        yield
        atexit.unregister(id)

    @contextlib.contextmanager
    def counted_by_nobody_in_sight():
        hidden = [made()]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(hidden))
        address = id(hidden)
        del hidden
        yield
        ctypes.pythonapi.Py_DecRef(ctypes.cast(address, ctypes.py_object))

    def frame_of_a_thread():
        def work(wait):
            tensor = made()  # the thread's
            wait()
            return tensor

        return beside(work)

    def local_of_a_thread():
        def work(wait):
            local = threading.local()
            local.cache = made()
            wait()

        return beside(work)


ELSEWHERE = makers(Elsewhere)
HOOK = f"{__name__}.hook_with.<locals>.hook"
HELD_BY_HOOK = f"closure variable held of {HOOK}"
THREAD = "thread fetching: variable {} of .*work"

# Whom to blame, as the beginning of a regular expression, where that is not PLACE.
BLAMED = {
    "closure": "closure variable tensor of .*closure",
    "default": "default argument of .*default",
    "generator": "suspended .*generator.<locals>.steps" if NEWER else "variable tensor of .*steps",
    "asynchronous generator": "suspended .*steps" if NEWER else "variable tensor of .*steps",
    "coroutine": "suspended .*coroutine.<locals>.steps" if NEWER else "variable tensor of .*steps",
    "frame": "variable tensor of .*frame",
    "slot of a dataclass": "attribute value of .*Entry",
    "metaclass": "class attribute tensor of .*Meta",
    "enumeration": "attribute tensor of .*Sizes",
    "module outside of sys modules": "module global outside.tensor",
    "callback of a weak reference": "default argument of .*callback_of_a_weak_reference.<locals>.<lambda>",
    "cached property": "attribute features of .*Model",
    "single dispatch": HELD_BY_HOOK,
    "attribute of a function": "function .*made",
    "finalizer": ".*finalize",
    "C pickler": PLACE if NEWER else r"C or C\+\+ that cannot be seen",
    "full backward hook": HELD_BY_HOOK,
    "hook of state dict": HELD_BY_HOOK,
    "tensor hook": f"tensor hook {HOOK}",
    "hook after accumulation": f"post-accumulate hook {HOOK}",
    "attribute": f"attribute cache of {__name__}.Owner",
    "slot": f"attribute slot of {__name__}.Owner",
    "attribute of an attribute": f"attribute y of {__name__}.Owner",
    "bound method": f"attribute cache of {__name__}.Owner",
    "parts of a module": f"submodule layer of {__name__}.Block",
    "loader": "attribute tensors of .*Rows",
    "odd object": f"attribute held of {__name__}.Odd",
    "context": "context variable of the run",
    "odd class": f"attribute held of {__name__}.OddClass",
    "odd metaclass": f"attribute held of {__name__}.Proudly",
    "odd class that is not compared": f"attribute held of {__name__}.Held",
    "string with an attribute": f"attribute held of {__name__}.Name",
    "last error": "module global sys.last_value",
    "last result": "module global builtins._",
    "output of a notebook": "module global .*.Out",
    "class attribute": f"class attribute shared of {__name__}.Owner",
    "global storage": f"module global {__name__}.HELD",
    "context variable": "context variable cache",
    "cached parametrization": "module global torch.nn.utils.parametrize._cache",
    "what is to run at exit": r"C or C\+\+ that cannot be seen",
    "counted by nobody in sight": r"C or C\+\+ that cannot be seen",
    "frame of a thread": THREAD.format("tensor"),
    "local of a thread": THREAD.format("local"),
}
# Whom nobody but a library can have blamed on it.
OF_LIBRARIES = ("finalizer", "last error", "last result", "cached parametrization")
# Found in a cycle, they hang on a library's own as well, and are no leaks.
EXCUSED = ("call of a mock", "constant of fx")
# Some are in cycles of Python's own when they are let go of.
IN_CYCLES = {
    "metaclass",
    "enumeration",
    "globals of a function",
    "single dispatch",
    "error in a log",
    "hook of several",
}

ARRAY = "a numpy array on its memory"
CAPSULE = "a DLPack capsule on its memory"
TENSOR = "Tensor float32 [{n}]"
LEAF = ("next node 0: AccumulateGrad", "its leaf: Tensor float32 [{n}]")

# All that the chain of one of its leaks has, below the global and its item if it is in KEPT.
CHAINS = [
    ("counted by nobody in sight", "C or C++ that cannot be seen", "list item 0", TENSOR),
    ("context variable", "context variable cache", TENSOR),
    ("output of a notebook", "module global __main__.Out", "dict item 1", TENSOR),
    ("nested lists", "list item 1", "list item 0", TENSOR),
    ("tuple", "tuple item 1", TENSOR),
    ("set", "member of a set", TENSOR),
    ("deque", "collections.deque item 1", TENSOR),
    ("key of a dictionary", "dict item as a key", TENSOR),
    ("odd dictionary", f"{__name__}.OddDict item 'key'", TENSOR),
    ("odd list", f"{__name__}.OddList item 0", TENSOR),
    ("odd key", "dict item at key type", TENSOR),
    ("odd key that is not compared", "dict item 'tensor'", TENSOR),
    ("name that no encoding has", "dict item '\\udcff'", TENSOR),
    ("partial", "partial of a builtin_function_or_method", "tuple item 0", TENSOR),
    ("bound method", f"bound method {__name__}.Owner.method", f"attribute cache of {__name__}.Owner", TENSOR),
    ("objects", "an item of a numpy array", TENSOR),
    ("fields", "an item of a numpy array", TENSOR),
    ("array", ARRAY, TENSOR),
    ("masked array", "a numpy.ma.MaskedArray (a numpy array) on its memory", ARRAY, TENSOR),
    ("array that fights back", f"a {__name__}.Finalized (a numpy array) on its memory", ARRAY, TENSOR),
    ("array from DLPack", ARRAY, CAPSULE, TENSOR),
    ("capsule of DLPack", CAPSULE, TENSOR),
    ("capsule of a version", CAPSULE, TENSOR),
    ("storage", "a storage that Python holds"),
    ("view", "Tensor float32 [2], which uses 8 of {bytes} bytes"),
    ("sparse", "Tensor", "values: Tensor float32 [{n}]"),
    ("sparse", "Tensor", "indices: Tensor int64 [1, {n}]"),
    ("sparse by rows", "Tensor", "values: Tensor float32 [{n}]"),
    ("sparse by rows", "Tensor", "compressed indices: Tensor int64 [{next}]"),
    ("jagged", "NestedTensor", "base of the view: Tensor float32 [{n}]"),
    ("parts of a module", f"buffer mask of {__name__}.Block", "Tensor float32 [3]"),
    (
        "parts of a module",
        f"submodule layer of {__name__}.Block",
        "parameter weight of torch.nn.modules.linear.Linear",
        "Parameter float32 [1, {n}]",
    ),
    ("products", TENSOR),
    ("products", TENSOR, "grad_fn: SinBackward0", "self, saved: Tensor float32 [{n}]"),
    ("products", TENSOR, "grad_fn: SinBackward0", "next node 0: MulBackward0", "other, saved: Tensor float32 [{n}]"),
    ("node alone", "SumBackward0", "next node 0: ExpBackward0", "result, saved: Tensor float32 [{n}]"),
    ("accumulated", "MulBackward0", *LEAF),
    ("accumulated", "MulBackward0", *LEAF, "grad: Tensor float32 [{n}]"),
    ("other data", "Tensor float32 [1]", "grad_fn: ExpBackward0", "result, saved: Tensor float32 [{n}]"),
    ("context of a Function", TENSOR, "grad_fn: KeptBackward", "attribute tensor of its context", TENSOR),
    ("context of a Function", TENSOR, "grad_fn: KeptBackward", "saved tensor 0: Tensor float32 [{n}]"),
    ("pack hook", "Tensor float32 [1]", "grad_fn: ExpBackward0", "saved_result: tuple item 1", TENSOR),
    ("tensor hook", "Tensor float32 [1]", f"tensor hook {HOOK}", HELD_BY_HOOK, TENSOR),
    ("hook after accumulation", "Tensor float32 [1]", f"post-accumulate hook {HOOK}", HELD_BY_HOOK, TENSOR),
    ("pre hook", "Tensor float32 [1]", "grad_fn: ExpBackward0", LEAF[0], f"pre hook {HOOK}", HELD_BY_HOOK, TENSOR),
    ("post hook", "Tensor float32 [1]", "grad_fn: ExpBackward0", LEAF[0], f"post hook {HOOK}", HELD_BY_HOOK, TENSOR),
]

# A holder of its chains by its first words, its kind, and the comment on the line that it names.
HOLDERS = [
    ("nested lists", PLACE, "module", "the global"),
    ("nested lists", "list item 1", "list", None),
    ("closure", "closure variable tensor of ", "cell", "the closure"),
    ("default", "default argument of ", "function", "the default"),
    ("generator", "suspended ", "frame", "the generator"),
    ("exception", "the traceback of an exception, in raised()", "traceback", "the error"),
    ("exception", "variable tensor of raised()", "frame", "its variable"),
    ("callback of a weak reference", "the callback of a weak reference", "object", None),
    ("attribute", "attribute cache of ", "attribute", "the attribute"),
    ("slot", "attribute slot of ", "attribute", "the slot"),
    ("parts of a module", "submodule layer of ", "attribute", "the layer"),
    ("context of a Function", "grad_fn: KeptBackward", "node", "the Function"),
    ("context of a Function", LEAF[0], "accumulator", None),
    ("products", "self, saved: ", "saved", None),
    ("products", "Tensor float32 ", "tensor", None),
    ("tensor hook", "tensor hook ", "hook", "the hook"),
    ("hook after accumulation", "post-accumulate hook ", "hook", "the hook"),
    ("pre hook", "pre hook ", "hook", "the hook"),
    ("post hook", "post hook ", "hook", "the hook"),
    ("counted by nobody in sight", "C or C++ that cannot be seen", "unknown", None),
    ("frame of a thread", "thread fetching: ", "thread", "the thread's"),
]
