"""From the process to a report: calls the native search and puts what it found into words, then lets go of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from zbpipe import _C
from zbpipe.leaks import _source
from zbpipe.leaks._report import Cycle, Holder, Leak, Report
from zbpipe.leaks._words import Step, in_words, thread_names

_HERE = str(Path(__file__).parent)

Found = tuple[Leak, str, int]
"""A leak, its rank and the address of its block."""


def roots(skipped: Any = None) -> tuple[list[tuple[Any, list[Any] | None]], dict[int, str]]:
    """The modules and the frames of all threads with their variables, and names of threads.

    Frames of this package are left out, and variables that are ``skipped`` themselves.
    """
    found: list[tuple[Any, list[Any] | None]] = [(module, None) for module in list(sys.modules.values())]
    current = sys._current_frames()
    for frame in current.values():
        at: FrameType | None = frame
        while at is not None:
            if not at.f_code.co_filename.startswith(_HERE):
                held = [value for _, value in _C.frame_variables(at) if not _is(value, skipped)]
                found.append((at, [*held, at.f_globals]))
            at = at.f_back
    return found, thread_names(current.items())


def _is(value: Any, skipped: Any) -> bool:
    return skipped is not None and value is skipped


def search(
    *,
    since: int = 0,
    older: Any = None,
    target: torch.Tensor | None = None,
    allowed: set[int] | None = None,
    trimmed: set[int] | None = None,
    keep: Any = None,
) -> tuple[list[Found], list[Cycle], Report]:
    """Search the holders of what was born since, or of the target.

    ``trimmed`` are identities of objects that may hold: a chain begins behind the last of them. ``keep`` is asked for
    each leak with its Python tensors, and says whether it is one.
    """
    where, threads = roots(target)
    ignored: list[Any] = []
    result = _C.search_holders(where, ignored, target, allowed or set(), since, older)
    where.clear()
    found: list[Found] = []
    try:
        for leak in result["leaks"]:
            if keep is None or keep([tensor for _, _, tensor in leak[4] if tensor is not None]):
                found.append(_leak(leak, threads, trimmed or set()))
        cycles = [_cycle(steps, storages, found, threads) for steps, storages in result["cycles"]]
        report = Report(unseen=[f"{count} {what}" for what, count in result["unseen"].items()], visited=result["visited"])
    finally:
        # The steps refer to all that was found: nothing of it may live on.
        result.clear()
        _source.forget()
    found.sort(key=lambda entry: -entry[0].bytes)
    return found, [cycle for cycle in cycles if cycle.bytes], report


def _leak(leak: tuple[Any, ...], threads: dict[int, str], trimmed: set[int]) -> Found:
    storage, size, device, address, tensors, steps, rank, others, unseen = leak
    shape, dtype, _ = tensors[0] if tensors else ((), "", None)
    chain = in_words(_behind(steps, trimmed), threads)
    if rank == "hidden":
        chain.insert(0, Holder("unknown", "something in C or C++ that cannot be seen"))
    elif rank == "none":
        chain.insert(0, Holder("unknown", "C++ that cannot be seen from here (a node of a C++ Function, a work, a variable)"))
    if unseen and rank in ("root", "cycle"):
        chain = [*chain]
    name = f"{str(dtype).removeprefix('torch.')}"
    return (
        Leak(shape, name, device, size, storage, len(tensors), "alive", None, chain, others),
        rank,
        address,
    )


def _behind(steps: list[Step], trimmed: set[int]) -> list[Step]:
    last = max((i for i, step in enumerate(steps[:-1]) if step[1] is not None and id(step[1]) in trimmed), default=None)
    return steps if last is None else steps[last:]


def _cycle(steps: list[Step], storages: list[int], found: list[Found], threads: dict[int, str]) -> Cycle:
    mine = set(storages)
    held = sum(leak.bytes for leak, _, _ in found if leak.storage in mine)
    holders = in_words([*steps, steps[0]], threads)
    text = " -> ".join([str(holder) for holder in holders[:-1]] + ["back"])
    return Cycle(text, holders[:-1], held)
