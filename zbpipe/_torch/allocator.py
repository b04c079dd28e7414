"""What is private in the CUDA allocator: its history, counts and snapshot."""

from __future__ import annotations

from typing import Any

import torch


def is_recording() -> bool:
    return torch._C._cuda_isHistoryEnabled()


def begin_history(entries: int, trace: bool) -> None:
    """With ``trace``, of what is handed out the Python stack."""
    context = "alloc" if trace else None
    torch.cuda.memory._record_memory_history(
        "all", context=context, stacks="python", max_entries=entries, clear_history=True
    )


def end_history() -> None:
    torch.cuda.memory._record_memory_history(None)


def event_count(device: int) -> int:
    """How many blocks have been handed out and given back so far."""
    count = torch._C._cuda_memoryStats(device)["allocation"]["all"]
    return int(count["allocated"] + count["freed"])


def is_in_use() -> bool:
    """Whether this process has a CUDA context, without making one."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def blocks_now() -> set[tuple[str, int, int]]:
    """The CUDA blocks in use: device, address, bytes asked for. Empty without CUDA, or without torch's allocator."""
    if not is_in_use() or torch.cuda.get_allocator_backend() != "native":
        return set()
    return {
        (f"cuda:{segment['device']}", block["address"], block["requested_size"])
        for segment in torch.cuda.memory._snapshot()["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def history(device: int) -> list[dict[str, Any]]:
    return list(torch.cuda.memory._snapshot()["device_traces"][device])
