"""zbpipe.explain runs a copy that shares the parameters: the module, and what it draws on, is as before; or it refuses."""

import collections
import copy
import functools
import random
import types
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.functions import Product
from support.oracle import Stage, needs_zbpipe, without_collector
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import zbpipe

pytestmark = needs_zbpipe

f32 = torch.float32


class Kept(nn.Module):
    """`forward` is a function of the module and its input; `kept` is what it may change."""

    def __init__(self, forward, kept=None, parameter=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4)) if parameter is None else parameter
        self.function, self.kept = forward, kept

    def forward(self, x):
        return self.function(self, x)


def product(m, x):
    return x @ m.weight


def counting(m, x):
    m.kept[tuple(x.shape)] += 1
    return x @ m.weight


def appending(m, x):
    m.kept["w"].append(x.detach())
    m.kept["calls"].append(3)
    m.late = 4
    m.function = product
    m.eval()
    return x @ m.weight


def hooking(m, x):
    m.register_buffer("new", torch.zeros(1))
    m.register_forward_hook(lambda *args: None)
    m.weight.register_hook(lambda grad: None)
    m.weight.register_post_accumulate_grad_hook(lambda p: None)
    m.weight.notes = 3
    return x @ m.weight


def drawing(m, x):
    return x @ m.weight * (torch.rand(4) + random.random() + np.random.rand() + torch.rand(4, generator=m.kept))


def into_main_grad(m, x):
    m.weight.main_grad.add_(1)
    m.weight.notes.append(2)
    return x @ m.weight


def with_main_grad():
    module = Kept(into_main_grad)
    module.weight.main_grad = torch.ones(4, 4)
    module.weight.notes = [1]
    return module


class Spied(nn.Parameter):
    """Its operations can be seen from Python."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("detach", "clone", "copy_", "untyped_storage", "requires_grad_"):
            raise AssertionError(f"{func} was called")
        return super().__torch_function__(func, types, args, kwargs or {})


class TwoPieces(torch.Tensor):
    """A wrapper without memory of its own, as the tensors of torchao: two tensors that add up to the matrix."""

    @staticmethod
    def __new__(cls, high, low):
        return torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype, requires_grad=False)

    def __init__(self, high, low):
        self.high, self.low = high, low

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return TwoPieces(args[0].high, args[0].low)
        plain = [a.high + a.low if isinstance(a, TwoPieces) else a for a in args]
        return func(*plain, **(kwargs or {}))


def typed(m, x):
    assert isinstance(m.weight, nn.Parameter) and type(m.weight) is m.kept
    return x @ m.weight


def two_pieces():
    return Kept(typed, TwoPieces, nn.Parameter(TwoPieces(torch.randn(4, 4), torch.randn(4, 4))))


def called_by_hook(owner):
    module = Kept(product)

    class Watcher:
        def __init__(self):
            self.calls = 0

        def __call__(self, *_):
            self.calls += 1

    watcher = Watcher() if owner == "an object" else None
    module.kept = watcher or [0]
    module.register_forward_hook(watcher or functools.partial(lambda kept, *_: kept.append(1), module.kept))
    return module


def patched_forward(way):
    module = Kept(product, 0)

    def forward(self, x):
        self.kept += 1
        return x @ self.weight

    bound = types.MethodType(forward, module)
    module.forward = functools.partial(bound) if way == "partial" else bound
    return module


def pruned():
    return prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5)


def compiled_call(way):
    module = Kept(lambda m, x: x @ m.weight + m.bias, None)
    module.register_buffer("bias", torch.zeros(4))
    if way == "forward":
        module.forward = torch.compile(module.forward, backend="eager")
    elif way == "disabled":
        module.forward = torch.compiler.disable(module.forward)
    elif way == "torch's own":  # whose forward dynamo puts into a function of its own
        module = nn.Linear(4, 4)
        module.forward = torch.compile(module.forward, backend="eager")
    else:
        module.compile(backend="eager")
    return module


MODULES = {
    "a Counter": lambda: Kept(counting, collections.Counter({"train": 3})),
    "a defaultdict": lambda: Kept(counting, collections.defaultdict(int)),
    "lists, deques, attributes": lambda: Kept(appending, {"w": [], "calls": collections.deque(maxlen=3)}),
    "hooks and buffers that the forward adds": lambda: Kept(hooking),
    "random numbers": lambda: Kept(drawing, torch.Generator().manual_seed(7)),
    "main_grad": with_main_grad,
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "pruned": pruned,
    "a buffer and its alias": lambda: with_alias(),
    "LSTM": lambda: nn.LSTM(4, 5),
    "a parameter's class": lambda: Kept(typed, Spied, Spied(torch.randn(4, 4))),
    "a parameter of two tensors": two_pieces,
    "a hook with a state": lambda: called_by_hook("an object"),
    "a hook with arguments": lambda: called_by_hook("a list"),
    "a forward that was set": lambda: patched_forward("bound"),
    "a partial forward": lambda: patched_forward("partial"),
    "Module.compile": lambda: compiled_call("call"),
    "a compiled forward": lambda: compiled_call("forward"),
    "a compiled forward of torch's own": lambda: compiled_call("torch's own"),
    "a forward that is not compiled": lambda: compiled_call("disabled"),
    "a tensor made for inference": lambda: Kept(product, torch.inference_mode()(lambda: torch.ones(3))()),
    "checkpointed": lambda: Kept(lambda m, x: checkpoint(product, m, x, use_reentrant=False)),
    "checkpointed, reentrant": lambda: Kept(lambda m, x: checkpoint(product, m, x, use_reentrant=True)),
}


def with_alias():
    def forward(m, x):
        m.kept.add_(1)
        return x @ m.weight + m.count

    module = Kept(forward)
    module.register_buffer("count", torch.zeros(4))
    module.kept = module.count
    return module


def picture(value, seen=None):
    """All that is reachable from a module: objects by identity, tensors also by contents and version."""
    seen = {} if seen is None else seen
    if id(value) in seen:
        return id(value)
    seen[id(value)] = value  # and kept alive, so that no other has its identity
    if isinstance(value, torch.Tensor):
        if isinstance(value, TwoPieces):
            return id(value), picture(value.high, seen), picture(value.low, seen)
        with torch._C.DisableTorchFunctionSubclass():
            plain = value.detach().clone().tolist()
            version = None if value.is_inference() else value._version
            place = value.data_ptr(), value.requires_grad, value.grad_fn
        hooks = value._backward_hooks, value._post_accumulate_grad_hooks
        attributes = picture(vars(value), seen)
        return (id(value), plain, version, place, attributes, *(picture(h, seen) for h in hooks))
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().tolist()
    if isinstance(value, dict):
        return id(value), [(key, picture(item, seen)) for key, item in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return id(value), [picture(item, seen) for item in value]
    if isinstance(value, functools.partial):
        return id(value), picture(value.args, seen)
    is_open = isinstance(value, nn.Module) or type(value).__name__ == "Watcher"
    return (id(value), picture(vars(value), seen)) if is_open else (id(value), repr(value))


@pytest.mark.parametrize("name", MODULES)
def test_the_module_and_what_it_draws_on_are_as_before(name):
    torch.manual_seed(0)
    module = MODULES[name]()
    calls = []
    for parameter in module.parameters():
        if not isinstance(parameter, TwoPieces):
            parameter.register_hook(lambda grad: calls.append("own"))
            parameter.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
            parameter.view_as(parameter).grad_fn.next_functions[0][0].register_hook(lambda *a: calls.append("node"))
    shape = (3, 2, 4) if name == "LSTM" else (3, 4)
    alive = {}
    before = picture(module, alive)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    explained = zbpipe.explain(module, torch.randn(shape, generator=torch.Generator()))
    assert picture(module, {}) == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]
    assert calls == [] and all(parameter.grad is None for parameter in module.parameters())
    expected = {"I"} if "reentrant" in name else {"W"} if isinstance(module, Kept) else {"I", "W"}
    assert {plan.runs_in for plan in explained.parameters} <= expected
    out = module(torch.ones(shape, requires_grad=True))
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_it_is_as_before_where_the_forward_raises():
    def forward(m, x):
        m.kept.append(1)
        torch.rand(3)
        raise ArithmeticError("no")

    module = Kept(forward, [])
    module.weight.grad = grad = torch.ones(4, 4)
    state = torch.get_rng_state()
    with pytest.raises(ArithmeticError, match="no"):
        zbpipe.explain(module, torch.randn(2, 4, generator=torch.Generator()))
    assert module.kept == [] and module.weight.grad is grad and torch.equal(torch.get_rng_state(), state)


def test_a_step_that_is_under_way_goes_on():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv1d(3, 3, 3, padding=1),
            nn.BatchNorm1d(3),
            nn.Linear(5, 5),
            parametrizations.weight_norm(nn.Linear(5, 5)),
        )

    def step(stage, trial):
        pending = []
        for _ in range(2):
            x = torch.randn(2, 3, 5, requires_grad=True)
            out = stage(x)
            _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], stage.parameters())
            pending.append(groups)
            out = stage(torch.randn(2, 3, 5))
            trial(stage)
            out.sum().backward()
        for groups in pending:
            trial(stage)
            zbpipe.stage_backward_weight(stage.parameters(), groups)
        return {name: parameter.grad for name, parameter in stage.named_parameters()}

    expected = step(build(), lambda stage: None)
    found = step(build(), lambda stage: zbpipe.explain(stage, torch.ones(2, 3, 5)))
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_autocasts_cache_is_left_alone():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        zbpipe.explain(layer, x)
        first = layer(x)
        explained = zbpipe.explain(layer, x)
        second = layer(x)
        assert torch.is_autocast_cache_enabled()

    def cast(out):
        return out.grad_fn.next_functions[2][0].next_functions[0][0]

    assert cast(first).name() == "ToCopyBackward0"
    assert cast(first) is cast(second)
    assert "autocast's cache is left alone: here every use casts its weight by itself" in explained.notes
    (first + second).sum().backward()
    assert layer.weight.grad is not None
    assert zbpipe.explain(layer, x).notes == ()


def test_what_parametrizations_cache_is_left_alone():
    layer, x = parametrizations.weight_norm(nn.Linear(4, 4)), torch.randn(2, 4)
    with parametrize.cached():
        zbpipe.explain(layer, x)
        weight = layer.weight
        zbpipe.explain(layer, x)
        assert layer.weight is weight
        layer(x).sum().backward()


def test_a_process_group_is_shared(alone):
    module = Kept(lambda m, x: x @ m.weight * dist.get_world_size(m.kept), dist.group.WORLD)
    assert [plan.runs_in for plan in zbpipe.explain(module, torch.randn(2, 4)).parameters] == ["W"]


def test_a_weight_that_is_the_output():
    stage = Stage(lambda m, x: (x @ m.a, m.a, m.c), a=(4, 4), c=(4, 4))
    explained = zbpipe.explain(stage, torch.randn(2, 4, dtype=torch.float64))
    assert {plan.name: plan.runs_in for plan in explained.parameters} == {"a": "W", "c": "W"}
    assert stage.a.is_leaf and stage.c.is_leaf and stage.a.requires_grad


def test_nothing_of_the_trial_lives_on():
    """Not even until the garbage collector runs."""
    born = []

    class Handing(Product):
        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors

            class Token:
                pass

            token = Token()
            born.extend((weakref.ref(token), weakref.ref(grad), weakref.ref(w)))
            return grad @ w.mT, zbpipe.defer(lambda x, grad, token: x.mT @ grad, 1, (x, grad, token))

    stage = Stage(lambda m, x: (Handing.apply(x, m.a) @ (m.b @ m.c), m.c * 2), a=(4, 5), b=(5, 3), c=(3, 3))
    seen = []
    stage.register_forward_hook(lambda module, args, out: seen.extend(map(weakref.ref, (module, *args, *out))))
    x = torch.randn(2, 4, dtype=torch.float64)
    with without_collector():
        explained = zbpipe.explain(stage, x)
        assert len(born) == 3 and len(seen) == 4
        assert [ref() for ref in born + seen] == [None] * 7
    assert explained.groups == 3 or explained.groups == 2


class Caching(nn.Module):
    """Keeps what it computed of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.transposed, self.listed = None, []

    def forward(self, x):
        self.transposed = self.weight.t() if self.transposed is None else self.transposed
        self.listed[:] = [self.transposed]
        return x @ self.transposed


def caching(called):
    module = Caching()
    module(torch.ones(2, 4))
    if called == "in an attribute":
        module.listed = []
    else:
        module.transposed = None
    return module


def of_closure():
    module = nn.Linear(4, 4, bias=False)
    own = module.forward
    module.forward = lambda x: own(x)
    return module


def of_other_parameters():
    class Renaming(nn.Linear):
        def __deepcopy__(self, memo):
            return nn.Sequential(nn.Linear(4, 4))

    return Renaming(4, 4)


def without_a_copy():
    class Locked:
        def __deepcopy__(self, memo):
            raise TypeError("cannot\nbe copied " + "at all " * 100)

    return nn.Sequential(Kept(product, {"a": Locked()}))


def with_notes():
    module = Kept(product)
    module.weight.notes = (i for i in range(3))
    return module


_COPY = r"explain runs a copy of \w+, and "
_REACHES = "its forward reaches 'weight' of the module itself, by a function that refers to it or by what an earlier"
REFUSED = {
    "an attribute": (
        without_a_copy,
        _COPY + r"its attribute '0.kept', a dict, cannot be copied \(TypeError: cannot be copied at all .*: take it",
    ),
    "an attribute of a parameter": (
        with_notes,
        _COPY + "the attribute 'notes' of its parameter 'weight', a generator, cannot be copied",
    ),
    "a list of what has a history": (
        lambda: caching("in a list"),
        _COPY + "its attribute 'listed', a list, cannot be copied",
    ),
    "a function of the module": (of_closure, _COPY + _REACHES),
    "what an earlier forward has kept": (lambda: caching("in an attribute"), _COPY + _REACHES),
    "a copy that is another one": (
        of_other_parameters,
        "the copy of Renaming has other parameters: let its __deepcopy__",
    ),
    "a copy of other tensors": (
        lambda: torch.jit.script(nn.Linear(4, 4)),
        "the copy of RecursiveScriptModule has other parameters: .*, or explain the module that a torch.jit one was",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_copied_is_refused_in_a_sentence(name):
    build, message = REFUSED[name]
    module = build()
    before = copy.copy(vars(module))
    with pytest.raises(RuntimeError, match=message) as caught:
        zbpipe.explain(module, torch.randn(2, 4))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert vars(module) == before
    assert all(parameter.grad is None for parameter in module.parameters())
