"""zbpipe.explain runs the module itself, and leaves it, and what it draws on, as it was."""

import collections
import copy
import gc
import random
import weakref

import pytest
import torch
from support.functions import Product
from support.oracle import Stage, needs_zbpipe, weight
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import zbpipe

pytestmark = needs_zbpipe


def linear_step(module, x):
    """The gradients that an ordinary backward gives, by name; they are taken away again."""
    module(x).sum().backward()
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    return grads


class Tagged(nn.Parameter):
    """A subclass, as quantised and FP8 weights are; with what sharding and buffers of gradients put on parameters."""


class TypedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Tagged(torch.randn(4, 4))
        self.weight.partition_dim = 1
        self.seen = []

    def forward(self, x):
        self.seen.append(type(self.weight))
        if self.weight.partition_dim != 1 or not isinstance(self.weight, Tagged):
            raise TypeError(f"not the module's own weight but a {type(self.weight)}")
        return x @ self.weight


def test_the_parameters_are_the_modules_own():
    stage = TypedLinear()
    own = []
    stage.register_forward_pre_hook(lambda module, args: own.append(module.weight))
    (plan,) = zbpipe.explain(stage, torch.randn(2, 4)).parameters
    assert own[0] is stage.weight
    assert (plan.name, plan.runs_in) == ("weight", "W")
    assert stage.seen == []


class TwoPieces(torch.Tensor):
    """A wrapper without memory of its own, as the tensors of torchao: two tensors that add up to the matrix."""

    @staticmethod
    def __new__(cls, high, low):
        return torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype, requires_grad=False)

    def __init__(self, high, low):
        self.high, self.low = high, low

    def __tensor_flatten__(self):
        return ["high", "low"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return TwoPieces(inner["high"], inner["low"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return TwoPieces(args[0].high, args[0].low)
        plain = [a.high + a.low if isinstance(a, TwoPieces) else a for a in args]
        return func(*plain, **(kwargs or {}))


def test_a_parameter_that_wraps_others():
    stage = nn.Module()
    stage.weight = nn.Parameter(TwoPieces(torch.randn(4, 4), torch.randn(4, 4)))
    high, low = stage.weight.high.clone(), stage.weight.low.clone()

    def forward(x):
        with torch.no_grad():
            stage.weight.high.mul_(2)
        return x @ stage.weight

    stage.forward = forward
    (plan,) = zbpipe.explain(stage, torch.randn(2, 4)).parameters
    assert plan.runs_in == "W"
    assert torch.equal(stage.weight.high, high) and torch.equal(stage.weight.low, low)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_flat_weights_of_recurrent_layers_stay(kind):
    layer, x = kind(4, 5), torch.randn(3, 2, 4)
    before = list(layer._flat_weights)
    zbpipe.explain(layer, x)
    assert all(a is b for a, b in zip(layer._flat_weights, before, strict=True))
    layer(x)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


class Caching(nn.Module):
    """Keeps what it computed of its weight in the ways that modules do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.transposed = None
        self.lists = {"w": [], "calls": collections.deque(maxlen=3)}
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.transposed is None:
            self.transposed = self.weight.t()
        self.lists["w"].append(self.transposed)
        self.lists["calls"].append(self.calls)
        self.late = self.transposed
        return x @ self.transposed


def test_what_modules_keep_for_themselves_is_put_back():
    stage, x = Caching(), torch.randn(2, 4)
    lists = stage.lists
    inner = lists["w"]
    zbpipe.explain(stage, x)
    assert stage.transposed is None and stage.calls == 0 and not hasattr(stage, "late")
    assert stage.lists is lists and lists["w"] is inner and inner == [] and not lists["calls"]

    stage(x)
    kept, called = stage.transposed, list(lists["calls"])
    (plan,) = zbpipe.explain(stage, x).parameters
    assert plan.runs_in == "W"  # by the transposed weight of the forward before
    assert stage.transposed is kept and stage.late is kept and list(lists["calls"]) == called and len(inner) == 1
    assert linear_step(stage, x)["weight"] is not None


class Changing(nn.Module):
    """Its forward changes all that it can reach."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.scaled = nn.Parameter(torch.randn(4, 4))
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.zeros(4))
        self.alias = self.count  # the same tensor, under a name that is no buffer's
        self.plain = torch.zeros(2)
        self.generator = torch.Generator().manual_seed(7)
        self.weight.main_grad = torch.ones(4, 4)
        self.weight.notes = ["a"]

    def forward(self, x):
        self.alias.add_(1)
        self.plain += 1
        with torch.no_grad():
            self.weight.mul_(0.5)
        self.scaled.data = self.scaled.data / 2
        self.unused.requires_grad_(False)
        self.weight.main_grad.add_(1)
        self.weight.notes.append("b")
        self.weight.late = 1
        self.weight.register_hook(lambda grad: None)
        self.scaled.register_post_accumulate_grad_hook(lambda p: None)
        self.register_buffer("new", torch.zeros(1))
        self.register_forward_hook(lambda *args: None)
        self.eval()
        noise = torch.rand(4, generator=self.generator) + random.random() + torch.rand(4)
        return x @ self.weight @ self.scaled + self.count * noise


def test_what_a_forward_changes_is_put_back():
    stage, x = Changing(), torch.randn(2, 4)
    parameters = dict(stage.named_parameters())
    places = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    before = copy.deepcopy(stage.state_dict())
    versions = [t._version for t in (stage.weight, stage.scaled, stage.count, stage.plain, stage.weight.main_grad)]
    states = torch.get_rng_state(), random.getstate(), stage.generator.get_state()
    zbpipe.explain(stage, x)
    assert stage.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in stage.state_dict().items())
    assert all(stage.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert {name: parameter.data_ptr() for name, parameter in stage.named_parameters()} == places
    after = [t._version for t in (stage.weight, stage.scaled, stage.count, stage.plain, stage.weight.main_grad)]
    assert after == versions
    assert stage.alias is stage.count and torch.equal(stage.plain, torch.zeros(2))
    assert stage.training and not stage._forward_hooks and stage.unused.requires_grad
    assert torch.equal(stage.weight.main_grad, torch.ones(4, 4)) and stage.weight.notes == ["a"]
    assert not hasattr(stage.weight, "late")
    assert stage.weight._backward_hooks is None and stage.scaled._post_accumulate_grad_hooks is None
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert torch.equal(stage.generator.get_state(), states[2])


def test_it_is_put_back_where_the_forward_raises():
    class Raising(Changing):
        def forward(self, x):
            super().forward(x)
            raise ArithmeticError("no")

    stage = Raising()
    before = copy.deepcopy(stage.state_dict())
    called = []
    stage.weight.register_hook(called.append)
    stage.weight.grad = torch.ones(4, 4)
    with pytest.raises(ArithmeticError, match="no"):
        zbpipe.explain(stage, torch.randn(2, 4))
    assert all(torch.equal(value, before[name]) for name, value in stage.state_dict().items())
    assert torch.equal(stage.weight.grad, torch.ones(4, 4))
    (stage.weight * 2).sum().backward()
    assert len(called) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_and_hooks_are_kept_from_an_inner_backward(reentrant):
    stage = Stage(lambda m, x: checkpoint(lambda x: x @ m.a, x, use_reentrant=reentrant) @ m.b, a=(4, 4), b=(4, 4))
    x = torch.randn(3, 4, dtype=torch.float64)
    calls = []
    stage.a.register_hook(lambda grad: calls.append("own"))
    stage.a.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    accumulator = stage.a.view_as(stage.a).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *args: calls.append("node"))
    accumulator.register_prehook(lambda *args: calls.append("node before"))
    stage.a.grad = grad = torch.ones_like(stage.a)
    version = grad._version
    found = {plan.name: plan for plan in zbpipe.explain(stage, x).parameters}
    assert calls == []
    assert stage.a.grad is grad and grad._version == version and torch.equal(grad, torch.ones_like(grad))
    assert stage.b.grad is None
    assert found["a"].note == "hooks watch it"
    if reentrant:
        assert found["a"].runs_in == "I"
        assert [use.why for use in found["a"].uses] == [
            "it is added within I, by a backward in the backward, as that of a reentrant checkpoint"
        ]
    stage(x.requires_grad_()).sum().backward()
    assert sorted(calls) == ["after", "node", "node before", "own"]


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
        linear_step(layer, x)
    buffered = parametrizations.spectral_norm(nn.Linear(4, 4))
    before = copy.deepcopy(buffered.state_dict())
    zbpipe.explain(buffered, x)
    assert all(torch.equal(value, before[name]) for name, value in buffered.state_dict().items())


def test_a_state_that_is_carried_on_from_an_earlier_forward():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = weight(4, 4), weight(4, 4)
            self.state = None

        def forward(self, x):
            before, self.state = self.state, (self.a @ self.b).sin()
            return (x @ self.a if before is None else x @ before), before

    stage, x = Stateful(), torch.randn(2, 4, dtype=torch.float64)
    stage(x)
    kept = stage.state
    expected = torch.autograd.grad(kept.sum(), [stage.a, stage.b], retain_graph=True)
    explained = zbpipe.explain(stage, x)
    assert {plan.runs_in for plan in explained.parameters} == {"W"}
    assert stage.state is kept and kept.grad_fn is not None
    assert all(map(torch.equal, torch.autograd.grad(kept.sum(), [stage.a, stage.b]), expected))


def test_tensors_made_for_inference_among_the_attributes():
    stage = Stage(lambda m, x: x @ m.a, a=(4, 4))
    with torch.inference_mode():
        stage.seen = torch.ones(3)
    zbpipe.explain(stage, torch.randn(2, 4, dtype=torch.float64))
    assert torch.equal(stage.seen, torch.ones(3))


def test_a_tied_weight_and_one_that_is_the_output():
    stage = Stage(lambda m, x: (x @ m.a, m.a, m.c), a=(4, 4), c=(4, 4))
    explained = zbpipe.explain(stage, torch.randn(2, 4, dtype=torch.float64))
    assert {plan.name: plan.runs_in for plan in explained.parameters} == {"a": "W", "c": "W"}
    assert stage.a.is_leaf and stage.c.is_leaf and stage.a.requires_grad


def test_nothing_of_the_trial_lives_on():
    """Not even until the garbage collector runs: a group that dies unrun tells those who wait for it."""
    born = []

    class Handing(Product):
        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors

            class Token:
                pass

            token = Token()
            born.extend((weakref.ref(token), weakref.ref(grad)))
            return grad @ w.mT, zbpipe.defer(lambda x, grad, token: x.mT @ grad, 1, (x, grad, token))

    stage = Stage(lambda m, x: (Handing.apply(x, m.a) @ (m.b @ m.c), m.c * 2), a=(4, 5), b=(5, 3), c=(3, 3))
    seen = []
    stage.register_forward_hook(lambda module, args, out: seen.extend(weakref.ref(t) for t in (*args, *out)))
    x = torch.randn(2, 4, dtype=torch.float64)
    gc.collect()
    gc.disable()
    try:
        explained = zbpipe.explain(stage, x)
        assert len(born) == 2 and len(seen) == 3
        assert [ref() for ref in born + seen] == [None] * 5
    finally:
        gc.enable()
    assert explained.groups == 3 or explained.groups == 2


class Spied(nn.Parameter):
    """Its operations can be seen from Python."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        seen = getattr(func, "__name__", str(func))
        if seen in ("detach", "clone", "copy_", "untyped_storage"):
            raise AssertionError(f"{seen} was called")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_what_puts_back_does_not_call_a_subclass():
    stage = nn.Module()
    stage.weight = Spied(torch.randn(4, 4))
    stage.forward = lambda x: x @ stage.weight
    (plan,) = zbpipe.explain(stage, torch.randn(2, 4)).parameters
    assert plan.runs_in == "W"


class Queued(nn.Module):
    """Computes its weight's gradient in compute_first(), first in, first out."""

    def __init__(self):
        super().__init__()
        self.weight = weight(4, 4, dtype=torch.float32)
        self.queue = []

    def forward(self, x):
        return _Queueing.apply(x, self)

    def compute_first(self):
        x, grad = self.queue.pop(0)
        self.weight.grad = x.mT @ grad if self.weight.grad is None else self.weight.grad + x.mT @ grad


class _Queueing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.x, ctx.module = x, module
        return x @ module.weight

    @staticmethod
    def backward(ctx, grad):
        ctx.module.queue.append((ctx.x.detach(), grad))
        return grad @ ctx.module.weight.mT, None


def test_a_queue_of_a_module_is_as_before():
    stage = Queued()
    x = torch.ones(3, 4, requires_grad=True)
    stage(x).sum().backward()
    zbpipe.explain(stage, torch.ones(3, 4) * 5)
    assert len(stage.queue) == 1
    stage.compute_first()
    assert torch.equal(stage.weight.grad, torch.full((4, 4), 3.0))


def test_what_is_set_aside_comes_back_however_it_ends():
    leaf = torch.ones(2, requires_grad=True)
    calls = []
    leaf.register_hook(lambda grad: calls.append("own"))
    leaf.grad = grad = torch.ones(2)

    aside = zbpipe._C.set_aside([leaf, leaf, leaf * 2])
    assert leaf.grad is None
    leaf.sum().backward()
    assert calls == [] and leaf.grad is not grad
    zbpipe._C.put_back(aside)
    zbpipe._C.put_back(aside)
    assert leaf.grad is grad
    leaf.sum().backward()
    assert calls == ["own"]

    aside = zbpipe._C.set_aside((leaf,))
    del aside  # nobody gave it back
    assert leaf.grad is grad
    leaf.sum().backward()
    assert calls == ["own"] * 2

    for bad in ([leaf, 3], 3):
        with pytest.raises(TypeError, match=r"tensors"):
            zbpipe._C.set_aside(bad)
    assert leaf.grad is grad
    with pytest.raises(TypeError, match="aside is a int; expected what set_aside"):
        zbpipe._C.put_back(3)
