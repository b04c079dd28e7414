"""What lives on and is nobody's leak: libraries' own cycles and constants, autocast's weight cache, DDP's buckets, what
an optimizer keeps, what a window has a place for."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from zbpipe._torch import autograd, ddp
from zbpipe.leaks._allow import tensors_in
from zbpipe.leaks._results import NAMED, TELLING, Holder

# Files whose cycles are theirs: what imports, traces, mocks and compares, once for each import or call. Never a part of
# torch that a training step runs through: a cycle there is a leak in each step.
_OWN = ("torch/", "unittest/", "importlib/", "<frozen importlib")
_OF_STEPS = re.compile("torch/(distributed/|autograd/|utils/checkpoint|optim/|nn/modules/|nn/parallel/)")
_GLOBAL = "module global "
_DEPTH = 4  # of containers in a window, within which tensors are the window's
_BOUNDED = (deque, functools._lru_cache_wrapper)  # if they have a greatest length
_OF_SOMEBODY = {*NAMED, *TELLING, "unknown"}  # kinds


def is_a_librarys_own(cycle: Iterable[Holder]) -> bool:
    """Whether a cycle belongs wholly to torch, unittest or an import: each link that somebody wrote is theirs."""
    links = [holder for holder in cycle if holder.kind in _OF_SOMEBODY]
    return bool(links) and all(map(_is_own, links))


def _is_own(link: Holder) -> bool:
    if not link.is_library or link.where is None or not link.where.startswith(_OWN):
        return False
    return link.kind == "attribute" or not _OF_STEPS.match(link.where)


def is_a_constant(chain: Sequence[Holder], modules: set[str]) -> bool:
    """Whether one of these modules has it by its globals, classes or default arguments, with no collection between."""
    text = chain[0].text if chain else ""
    if not text.startswith(_GLOBAL) or text.removeprefix(_GLOBAL).rpartition(".")[0] not in modules:
        return False
    return all(
        holder.kind == "function" or (holder.kind == "attribute" and holder.text.startswith("class attribute"))
        for holder in chain[1:-1]
    )


def bounded_blocks(sizes: Iterable[int]) -> dict[int, tuple[int, str]]:
    """Of blocks that nothing visible holds, by their bytes: how many of that size what torch keeps and never shows may
    hold, and what that is."""
    found: dict[int, tuple[int, str]] = {}
    for holds, text in _KEPT_BY_TORCH:
        wanted = {*sizes} - found.keys()
        counts = holds() if wanted else Counter[int]()
        found |= {size: (counts[size], text) for size in wanted & counts.keys()}
    return found


def _living(cls: type | tuple[type, ...]) -> list[Any]:
    """All instances that the collector knows, by their types alone."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), cls)]


def _autocast_sizes() -> Counter[int]:
    """The bytes of the weights that autocast may have cast and kept: leaves that require a gradient, in float32."""
    width = autograd.cached_by_autocast()
    if not width:
        return Counter()
    with autograd.without_torch_functions():
        return Counter(
            weight.numel() * width
            for weight in _living(torch.nn.Parameter)
            if weight.requires_grad and weight.dtype == torch.float32
        )


def _bucket_sizes() -> Counter[int]:
    return ddp.bucket_bytes(_living(DistributedDataParallel))


_KEPT_BY_TORCH = (
    (
        _autocast_sizes,
        "autocast's weight cache, which lasts until its outermost region ends (torch.clear_autocast_cache())",
    ),
    (_bucket_sizes, "a bucket of DistributedDataParallel, which lasts as long as the model"),
)


class Windows:
    """What may become more and has a bound: what the optimizers of this moment keep for the parameters that they have,
    and what collections and caches of a greatest length hold."""

    def __init__(self) -> None:
        self._optimizers = weakref.WeakSet(_living(torch.optim.Optimizer))

    def tensors(self) -> list[torch.Tensor]:
        """Those in them now."""
        found: list[torch.Tensor] = []
        for optimizer in self._optimizers:
            state, groups = (vars(optimizer).get(name) for name in ("state", "param_groups"))
            if issubclass(type(state), dict) and issubclass(type(groups), list):
                parameters = {id(p) for group in groups for p in group.get("params", ())}
                for parameter, values in dict.items(state):
                    found += tensors_in(values) if id(parameter) in parameters else []
        for thing in _living(_BOUNDED):
            if issubclass(type(thing), deque):
                if deque.maxlen.__get__(thing) is not None:
                    found += tensors_in(list(deque.__iter__(thing)), _DEPTH)
            elif thing.cache_parameters()["maxsize"] is not None:
                found += tensors_in(thing, _DEPTH)
        return found
