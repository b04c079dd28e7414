"""What lives on and is nobody's leak, and what became of the rest.

No leaks are libraries' own cycles and constants, autocast's weight cache, DDP's buckets and what other threads let go
of meanwhile. What an optimizer keeps for its parameters, and what has a greatest length, may grow up to a bound.
"""

from __future__ import annotations

import functools
import gc
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from zbpipe import _C
from zbpipe._torch import autograd, ddp
from zbpipe.leaks._alike import plain
from zbpipe.leaks._allow import tensors_in
from zbpipe.leaks._collector import collect
from zbpipe.leaks._results import COLLECTED, Holder, Leak
from zbpipe.leaks._search import Found, storages_now

_LOOKS = 25  # at what other threads may be about to let go of
_SECONDS_BETWEEN = 0.02
_GLOBAL = "module global "
_A_BUCKET = "a bucket of DistributedDataParallel, which lasts as long as the model"
_AUTOCASTS = "autocast's weight cache, which lasts until its outermost region ends (torch.clear_autocast_cache())"
_BOUNDED = (deque, functools._lru_cache_wrapper)  # if they have a greatest length


def is_a_constant(chain: Sequence[Holder], modules: set[str]) -> bool:
    """Whether one of these modules has it by its globals, attributes or default arguments, with no collection."""
    text = chain[0].text if chain else ""
    if not text.startswith(_GLOBAL) or text.removeprefix(_GLOBAL).rpartition(".")[0] not in modules:
        return False
    return all(holder.kind in ("function", "attribute") for holder in chain[1:-1])


def bounded_blocks() -> dict[int, tuple[int, str]]:
    """Of blocks that nothing visible holds: how many of each size torch itself may keep, and as what. Keyed by their
    bytes."""
    buckets, cast = ddp.bucket_bytes(living(DistributedDataParallel)), _autocast_sizes()
    kept = ((buckets, _A_BUCKET), (cast, _AUTOCASTS))
    return {size: (count, holder) for counts, holder in kept for size, count in counts.items()}


def living(cls: type | tuple[type, ...]) -> list[Any]:
    """All instances that the collector knows, by their types alone."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), cls)]


def _autocast_sizes() -> Counter[int]:
    """The bytes of the weights that autocast may have cast and kept: leaves that require a gradient, in float32."""
    width = autograd.cached_by_autocast()
    weights = living(torch.nn.Parameter) if width else []
    with autograd.without_torch_functions():
        return Counter(one.numel() * width for one in weights if one.requires_grad and one.dtype == torch.float32)


def windows_of(optimizers: Iterable[Any]) -> list[torch.Tensor]:
    """What may grow up to a bound: tensors in optimizers' state, in collections and caches with a maximum length."""
    found: list[torch.Tensor] = []
    for optimizer in optimizers:
        state, groups = (vars(optimizer).get(name) for name in ("state", "param_groups"))
        if issubclass(type(state), dict) and issubclass(type(groups), list):
            parameters = {id(p) for group in groups for p in group.get("params", ())}
            for parameter, values in dict.items(state):
                found += tensors_in(values) if id(parameter) in parameters else []
    for thing in living(_BOUNDED):
        if issubclass(type(thing), deque):
            if deque.maxlen.__get__(thing) is not None:
                found += tensors_in(list(deque.__iter__(thing)), is_wide=True)
        elif thing.cache_parameters()["maxsize"] is not None:
            found += tensors_in(thing, is_wide=True)
    return found


def with_fates(found: list[Found], born: dict[int, int], since: int) -> list[Found]:
    """What became of them when the collector ran, which it does only if it can make a difference.

    ``born`` are the blocks that lived when the check's block ended, serials by addresses; the search looked at no
    others. What other threads have let go of since then is left out.
    """
    freed: set[int] = set()
    gone: set[int] = set()
    if any(entry.rank != "root" for entry in found):
        watched = storages_now()
        freed = collect()
        gone = _C.storages_gone(watched)
    living = _living_after_others(found, born, freed, since)
    judged = []
    for entry in found:
        serial = born.get(entry.address)
        if serial in freed or (serial is None and entry.leak.storage in gone):
            fate = COLLECTED
        elif serial is not None and serial not in living:
            continue
        else:
            fate = "uncollectable" if entry.rank == "cycle" else "alive"
        if fate != entry.leak.fate:
            entry.leak = replace(entry.leak, fate=fate)
        judged.append(entry)
    return judged


def _living_after_others(found: list[Found], born: dict[int, int], freed: set[int], since: int) -> set[int]:
    """The serials of the blocks that live now. What nothing visible holds is given a moment: a thread of Python's or
    torch's (an operation, a process group) may be about to let go of it."""
    unheld = {born[entry.address] for entry in found if entry.rank == "none" and entry.address in born} - freed
    for _ in range(_LOOKS):
        living = {serial for _, _, serial, _ in _C.live_blocks(since)}
        if not unheld & living:
            break
        time.sleep(_SECONDS_BETWEEN)
    return living


def without_excused(found: list[Found], imported: set[str]) -> tuple[list[Found], list[str]]:
    """Those that are leaks, and a line for each kind of the others; ``imported`` are modules that it imported."""
    sizes = Counter(entry.leak.bytes for entry in found if entry.rank == "none")
    bounded = bounded_blocks() if sizes else {}
    leaks: list[Found] = []
    kinds: dict[str, tuple[str, list[int]]] = {}  # lines and sizes, by the lines without numbers
    for entry in found:
        size = entry.leak.bytes
        most, holder = bounded.get(size, (0, ""))
        if entry.excused is not None and entry.leak.fate == COLLECTED:
            line = f"that hung on a cycle of a library's own, which the collector frees: {entry.excused}"
        elif is_a_constant(entry.leak.chain, imported):
            line = "that modules hold which were imported inside"
        elif entry.rank == "none" and sizes[size] <= most:
            line = f"as large as {holder}"
        else:
            leaks.append(entry)
            continue
        kinds.setdefault(plain(line), (line, []))[1].append(size)
    notes = [
        f"{len(sizes)} storage{'s' * (len(sizes) > 1)} ({sum(sizes)} bytes) {line}" for line, sizes in kinds.values()
    ]
    return leaks, notes


def what_next(leaks: Sequence[Leak]) -> list[str]:
    """Lines: what to try where nobody is to be seen."""
    first = [leak.chain[leak.place_of_blame] for leak in leaks if leak.chain and leak.chain[0].kind == "unknown"]
    if not any(holder.kind == "unknown" for holder in first):
        return []
    said = ["where the holder cannot be seen"]
    if not any(leak.created for leak in leaks):
        said.append("  check one step with check_tensor_leak(trace=True): it says which line made the memory")
    return [*said, "  let go of what you suspect (del it, clear it) inside the check: what then goes, that held"]
