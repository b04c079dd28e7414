"""Runs a module for a trial and leaves it, and what it draws on, as it was.

Note [What a trial leaves alone]

The module runs with its own parameters, not with copies: what they are (subclasses, attributes, who else has them:
lists of an RNN, caches, the graph of a step that is under way) decides what its backward does. So everything that a
forward and an input pass could change is noted before, and put back:

- gradients and hooks of the leaves are set aside natively (zbp_aside.h): no hook fires, an inner backward adds to
  nothing;
- the bytes of parameters, buffers and other tensors that the modules have, copied to main memory and compared
  afterwards: memory that is as it was is not written to. Versions too, so that what autograd has saved stays valid;
- attributes of modules, parameters and their plain containers (lists, dictionaries, sets, deques), in place: caches,
  counters, hooks, training flags, registered tensors;
- random numbers, of torch on every device that is used, of Python and of NumPy, and the generators among the
  attributes;
- the caches that outlive a forward: autocast's, which is not used, and parametrize's.

What is kept elsewhere (globals, objects of other classes, memory that tensors do not show) is not seen.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zbpipe import _C
from zbpipe._torch import autograd
from zbpipe._torch.dispatch import is_traceable_wrapper_subclass
from zbpipe._torch.modules import parametrizations_cache


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Within it ``module`` may be run, forward and backward; afterwards it is as before. See Note [What a trial
    leaves alone]. Gradients are recorded, and no tensor made within is an inference tensor, whatever holds outside.

    Costs a copy of the module's tensors in main memory while it lasts.
    """
    with torch.inference_mode(False), torch.enable_grad(), contextlib.ExitStack() as stack:
        with autograd.without_torch_functions():
            state = _State(module)
        stack.callback(state.restore)
        stack.enter_context(_random_numbers({t.device for t in state.tensors.values()}))
        stack.enter_context(_without_caches())
        leaves = [t for t in state.tensors.values() if t.is_leaf]
        stack.enter_context(_without_hooks(leaves))
        yield


class _State:
    """What modules have, from one of them on: attributes in containers, tensors in attributes."""

    def __init__(self, module: nn.Module) -> None:
        self.containers: dict[int, tuple[Any, Any]] = {}  # by id: the container, its contents
        self.tensors: dict[int, torch.Tensor] = {}
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self.pending: list[Any] = [module, *module.parameters(), *module.buffers()]
        seen: dict[int, Any] = {}
        while self.pending:
            item = self.pending.pop()
            if not isinstance(item, _ATOMS) and id(item) not in seen:
                seen[id(item)] = item
                self._note(item)
        self.values = [_Value(tensor) for tensor in self.tensors.values()]
        self.storages = _Storages(self.values)

    def _note(self, item: Any) -> None:
        kind = type(item)
        if isinstance(item, nn.Module):
            self.pending.append(vars(item))
        elif isinstance(item, torch.Tensor):
            self.tensors[id(item)] = item
            self.pending.append(getattr(item, "__dict__", None))
            self.pending.extend(_parts_of(item))
        elif isinstance(item, torch.Generator):
            self.generators[id(item)] = (item, item.get_state())
        elif kind in _MAPPINGS:
            self.containers[id(item)] = (item, list(item.items()))
            self.pending.extend(item.values())
        elif kind in _COLLECTIONS:
            self.containers[id(item)] = (item, list(item))
            self.pending.extend(item)
        elif kind is tuple:
            self.pending.extend(item)

    def restore(self) -> None:
        for container, contents in self.containers.values():
            _refill(container, contents)
        with autograd.without_torch_functions():
            self._restore_tensors()
        for generator, state in self.generators.values():
            generator.set_state(state)

    def _restore_tensors(self) -> None:
        for value in self.values:
            value.restore()
        self.storages.restore()
        versions = [
            (v.tensor, v.version)
            for v in self.values
            if v.version is not None and v.version != autograd.version_of(v.tensor)
        ]
        if versions:
            tensors, numbers = zip(*versions, strict=True)
            autograd.set_versions(tensors, numbers)


def _parts_of(tensor: Any) -> list[Any]:
    """The tensors that one holds which has no memory of its own, as far as it tells."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


_ATOMS = (str, bytes, int, float, complex, type(None), type)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_COLLECTIONS = (list, set, deque)


def _refill(container: Any, contents: list[Any]) -> None:
    """Nothing is touched where nothing has changed: compilers watch some of these."""
    if type(container) in _MAPPINGS:
        now = list(container.items())
        if not _same([key for key, _ in now], [key for key, _ in contents]):
            container.clear()
            container.update(contents)
        elif not _same([value for _, value in now], [value for _, value in contents]):
            for (key, before), (_, after) in zip(contents, now, strict=True):
                if before is not after:
                    container[key] = before
    elif not _same(list(container), contents):
        container.clear()
        (container.update if type(container) is set else container.extend)(contents)


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


class _Value:
    """A tensor's metadata, and a plain alias of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else autograd.version_of(tensor)
        self.requires_grad = tensor.requires_grad
        self.alias = _alias_of(tensor)
        self.place = _place_of(tensor)

    def restore(self) -> None:
        if self.alias is not None and _place_of(self.tensor) != self.place:
            self.tensor.data = self.alias
        if self.tensor.is_leaf and self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)


def _alias_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """None for tensors that hold others, or no memory that one could look at."""
    return tensor.detach() if _is_dense(tensor) and not tensor.is_inference() else None


def _place_of(tensor: torch.Tensor) -> Any:
    if not _is_dense(tensor):
        return None
    storage = autograd.storage_id(tensor.untyped_storage())
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _is_dense(tensor: torch.Tensor) -> bool:
    has_own_memory = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return has_own_memory and tensor.layout is torch.strided and not tensor.is_nested


class _Storages:
    """The bytes behind tensors, each storage once."""

    def __init__(self, values: list[_Value]) -> None:
        self.copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        for value in values:
            if value.alias is None or value.alias.device.type == "meta":
                continue
            storage = value.alias.untyped_storage()
            if storage.nbytes() and autograd.storage_id(storage) not in self.copies:
                copy = _copy(storage)
                self.copies[autograd.storage_id(storage)] = (storage, copy)

    def restore(self) -> None:
        for storage, copy in self.copies.values():
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            if not torch.equal(_bytes(storage).cpu(), _bytes(copy)):
                storage.copy_(copy)


def _copy(storage: Any) -> torch.UntypedStorage:
    copy: torch.UntypedStorage = storage.clone() if storage.device.type == "cpu" else storage.cpu()
    return copy


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextlib.contextmanager
def _without_hooks(leaves: list[torch.Tensor]) -> Iterator[None]:
    """The leaves without gradients and without hooks on their accumulation."""
    kinds = [(leaf, autograd.hook_kinds(leaf)) for leaf in leaves]
    contents = [(held, list(held.items())) for leaf in leaves for held in autograd.hooks_of(leaf)]
    aside = _C.set_aside(leaves)
    try:
        yield
    finally:
        # Python's side of hooks that were added meanwhile.
        for held, before in contents:
            _refill(held, before)
        for leaf, had in kinds:
            autograd.drop_hooks(leaf, but=had)
        _C.put_back(aside)


@contextlib.contextmanager
def _random_numbers(devices: set[torch.device]) -> Iterator[None]:
    by_type: dict[str, list[int]] = {}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            by_type.setdefault(device.type, []).append(device.index or 0)
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy.random")
    numpys = None if numpy is None else numpy.get_state()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[], device_type="cuda"))
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
    """Within an autocast that has begun outside, casts are not cached: they would lead later forwards into the trial's
    graph, and the trial into that of an earlier forward. The same holds for what parametrizations have computed."""
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
