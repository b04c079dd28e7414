"""What is private in the CUDA allocator: its history, counts and snapshot."""

from __future__ import annotations

from typing import Any

import torch


def is_recording() -> bool:
    """Whether the allocator keeps a history."""
    return torch._C._cuda_isHistoryEnabled()


def begin_history(entries: int) -> None:
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=entries, clear_history=True)


def end_history() -> None:
    torch.cuda.memory._record_memory_history(None)


def event_count(device: int) -> int:
    """How many blocks have been handed out and given back so far."""
    count = torch._C._cuda_memoryStats(device)["allocation"]["all"]
    return int(count["allocated"] + count["freed"])


def segments() -> list[dict[str, Any]]:
    """The allocator's segments of all devices, with their blocks."""
    found: list[dict[str, Any]] = torch.cuda.memory._snapshot()["segments"]
    return found


def history(device: int) -> list[dict[str, Any]]:
    """What the allocator has recorded of a device."""
    found: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][device]
    return found
