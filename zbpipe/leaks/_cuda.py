"""Blocks of CUDA memory, from the snapshot of torch's caching allocator.

A tensor on a device is found as any other one is. This adds blocks that C++ holds: the allocator counts them as handed
out, and no tensor that can be seen lies on them. A block is told by its address and size. So a block that was freed
inside a check, and handed out again for something else of its size, counts as the old one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zbpipe._torch import allocator

Block = tuple[str, int, int]
"""Device, address, bytes."""


def is_in_use() -> bool:
    """True if this process has a CUDA context, without making one."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def blocks_now() -> set[Block]:
    """The blocks in use; nothing where CUDA is not used or its allocator keeps no account."""
    if not is_in_use() or torch.cuda.get_allocator_backend() != "native":
        return set()
    return set(active(allocator.segments()))


def active(segments: Iterable[Mapping[str, Any]]) -> list[Block]:
    """The blocks in use in a snapshot's segments, with the bytes that were asked for."""
    found: list[Block] = []
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                size = block.get("requested_size", block["size"])
                found.append((f"cuda:{segment['device']}", block.get("address", address), size))
            address += block["size"]
    return found


def unexplained(before: set[Block], now: Iterable[Block], spans: Iterable[Block]) -> list[Block]:
    """The blocks of ``now`` that were not there before and in which none of ``spans``, the living storages, begins."""
    begins = sorted((device, address) for device, address, size in spans if size)

    def has_one(device: str, address: int, size: int) -> bool:
        at = bisect_left(begins, (device, address))
        return at < len(begins) and begins[at] < (device, address + max(size, 1))

    return [block for block in now if block not in before and not has_one(*block)]
