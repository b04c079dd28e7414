"""What outlives a check and is nobody's leak: libraries' own cycles, autocast's weight cache, DDP's buckets."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from zbpipe import _C
from zbpipe._torch import autograd, ddp, torchscript
from zbpipe.leaks._results import Holder

# Files whose cycles are theirs: what imports, traces, mocks and compares, once for each import or call. Never a part of
# torch that a training step runs through: a cycle there is a leak in each step.
_OWN = ("torch/", "unittest/", "importlib/", "<frozen importlib")
_OF_STEPS = (
    "torch/distributed/",
    "torch/autograd/",
    "torch/utils/checkpoint",
    "torch/optim/",
    "torch/nn/modules/",
    "torch/nn/parallel/",
)
_SCRIPTED = ("a torch.ScriptModule", "a torch.ScriptObject")
_OF_SOMEBODY = (
    "frame",
    "thread",
    "traceback",
    "cell",
    "function",
    "attribute",
    "module",
    "hook",
    "group",
    "work",
    "unknown",
)


def is_a_librarys_own(cycle: Iterable[Holder]) -> bool:
    """Whether a cycle belongs wholly to torch, unittest or an import: each link that somebody wrote is theirs."""
    links = [holder for holder in cycle if holder.kind in _OF_SOMEBODY]
    return bool(links) and all(map(_is_own, links))


def _is_own(link: Holder) -> bool:
    if not link.is_library or link.where is None or not link.where.startswith(_OWN):
        return False
    return link.kind == "attribute" or not link.where.startswith(_OF_STEPS)


def is_a_script_module(chain: Sequence[Holder]) -> bool:
    """Whether a TorchScript module holds it, and nobody visible that. To script one leaves a cycle that has it: of the
    variables of torch.jit's functions, seen by what resolves names."""
    return len(chain) > 1 and chain[0].kind == "unknown" and chain[1].text in _SCRIPTED


def in_compiled_code() -> Callable[[int, int], bool]:
    """Tells a storage, or else an address, of a constant of TorchScript's compiled code."""
    constants = torchscript.constants()
    storages, addresses = _C.storages_of(constants), _C.addresses_of(constants)
    return lambda storage, address: storage in storages or address in addresses


def bounded_blocks(sizes: Iterable[int]) -> dict[int, tuple[int, str]]:
    """Of blocks that nothing visible holds, by their bytes: how many of that size what torch keeps and never shows may
    hold, and what that is."""
    wanted = set(sizes)
    found: dict[int, tuple[int, str]] = {}
    cached = _autocast_sizes()
    for size in wanted & cached.keys():
        text = "autocast's weight cache, which lasts until its outermost region ends (torch.clear_autocast_cache())"
        found[size] = cached[size], text
    buckets = ddp.bucket_bytes(_living(DistributedDataParallel)) if wanted - found.keys() else Counter()
    for size in (wanted - found.keys()) & buckets.keys():
        found[size] = buckets[size], "a bucket of DistributedDataParallel, which lasts as long as the model"
    return found


def _living(cls: type) -> list[Any]:
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


def optimizer_state() -> list[torch.Tensor]:
    """The tensors that the living optimizers keep, each for a parameter that it still has."""
    found = []
    for optimizer in _living(torch.optim.Optimizer):
        state, groups = (vars(optimizer).get(name) for name in ("state", "param_groups"))
        if not issubclass(type(state), dict) or not issubclass(type(groups), list):
            continue
        parameters = {id(p) for group in groups for p in group.get("params", ())}
        for parameter, values in dict.items(state):
            if id(parameter) in parameters and issubclass(type(values), dict):
                found += [value for value in dict.values(values) if issubclass(type(value), torch.Tensor)]
    return found
