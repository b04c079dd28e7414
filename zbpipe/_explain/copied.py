"""A copy of a module, to be run in its place.

Note [What the copy shares]

The copy has the memory of the module's parameters and nothing else of it. Each parameter of the copy is a leaf of its
own, of the same class, without the module's gradient and hooks. So a backward within a backward, as a reentrant
checkpoint runs one, adds to the copy's gradients. All else that the module has is copied by ``copy.deepcopy``: buffers,
counters, caches, hooks with their state. A forward and an input pass change the copy alone.

Process groups are shared, for nobody can copy them. So is an attribute that has a history, such as the weight that a
pruned layer computes before each forward. What leads from there, or from a function that refers to the module, to the
module's own parameters is found in the graph and refused.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import sys
import textwrap
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from zbpipe._torch import autograd, compiler
from zbpipe._torch.modules import REGISTERED, parametrizations_cache


def copy_of(module: nn.Module) -> nn.Module:
    """See Note [What the copy shares]. Raises RuntimeError for a module that cannot be copied."""
    own = dict(module.named_parameters())
    with autograd.without_torch_functions():
        memo: dict[int, Any] = {id(p): autograd.alias_of(p).requires_grad_(p.requires_grad) for p in own.values()}
    memo.update((id(value), value) for part in module.modules() for value in vars(part).values() if _stays(value))
    for name, parameter in own.items():
        for attribute, value in vars(parameter).items():
            where = f"the attribute {attribute!r} of its parameter {name!r}"
            setattr(memo[id(parameter)], attribute, _deepcopy(module, where, value, memo))
    try:
        copied = copy.deepcopy(module, dict(memo))
    except Exception:
        _refuse_parts(module, memo)
        copied = _deepcopy(module, "it", module, memo)
    for part, twin in zip(module.modules(), copied.modules(), strict=False):
        _compile_again(part, twin)
    if [*map(id, copied.parameters())] != [id(memo[id(parameter)]) for parameter in own.values()]:
        raise RuntimeError(
            f"explain runs a copy, and the copy of {type(module).__name__} has other parameters: let its __deepcopy__ "
            "keep them, or explain the module that a torch.jit one was made of"
        )
    return copied


def _stays(value: Any) -> bool:
    """Whether an attribute of a module is also the copy's."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None
    group = getattr(sys.modules.get("torch.distributed"), "ProcessGroup", ())  # without it there are none
    return isinstance(value, group) or compiler.is_compilation(value)


def _deepcopy(module: nn.Module, what: str, value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise RuntimeError(
            f"explain runs a copy of {type(module).__name__}, and {what}, a {type(value).__name__}, cannot be copied "
            f"({type(error).__name__}: {textwrap.shorten(str(error), 100)}): take it away before, or give its class a "
            "__deepcopy__"
        ) from error


def _refuse_parts(module: nn.Module, memo: dict[int, Any]) -> None:
    """Raises for the first attribute that cannot be copied."""
    for prefix, part in module.named_modules():
        for attribute, value in vars(part).items():
            if attribute not in REGISTERED:
                where = f"its attribute {f'{prefix}.{attribute}' if prefix else attribute!r}"
                _deepcopy(module, where, value, dict(memo))


def _compile_again(part: nn.Module, twin: nn.Module) -> None:
    """Compiled functions among its attributes refer to the part itself, and are not copied."""
    for name, value in vars(part).items():
        found = compiler.compilation_of(value)
        if found is not None and vars(twin).get(name) in (None, value):
            compilation, function = found
            if isinstance(function, MethodType) and function.__self__ is part:
                setattr(twin, name, compilation(MethodType(function.__func__, twin)))


@contextlib.contextmanager
def apart(module: nn.Module) -> Iterator[None]:
    """Restores random numbers and caches at its end. Inside, gradients are recorded and inference mode is off."""
    with torch.inference_mode(False), torch.enable_grad(), _random_numbers(module), _without_caches():
        yield


@contextlib.contextmanager
def _random_numbers(module: nn.Module) -> Iterator[None]:
    by_type: dict[str, list[int]] = {"cuda": []}  # the CPU's numbers are always restored
    for device in {tensor.device for tensor in itertools.chain(module.parameters(), module.buffers())}:
        if device.type not in ("cpu", "meta"):
            by_type.setdefault(device.type, []).append(device.index or 0)
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy.random")
    numpys = None if numpy is None else numpy.get_state()
    with contextlib.ExitStack() as stack:
        for kind, indices in by_type.items():
            stack.enter_context(torch.random.fork_rng(devices=indices, device_type=kind))
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.set_state(numpys)


@contextlib.contextmanager
def _without_caches() -> Iterator[None]:
    """Turns off the caches of an autocast outside and of parametrizations."""
    # Casts would live until that autocast's end. Parametrizations' keys are addresses, which another module may get.
    torch.autocast_increment_nesting()
    is_nested = torch.autocast_decrement_nesting() > 0
    was_enabled = torch.is_autocast_cache_enabled()
    cache = parametrizations_cache()
    cached = dict(cache)
    cache.clear()
    torch.set_autocast_cache_enabled(was_enabled and not is_nested)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
        cache.clear()
        cache.update(cached)
