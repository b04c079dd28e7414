"""What lives, by its storages: whoever made it, and whenever."""

from __future__ import annotations

import torch

from zbpipe import _C


def bytes_of_tensors(device: torch.device) -> int:
    """The bytes of all tensors' storages on a device, each once; without an index of all devices of its type."""
    from zbpipe.leaks._search import storages_now

    spans = _C.storage_spans(storages_now())
    return sum(size for place, _, size, _ in spans if _is_on(torch.device(place), device))


def _is_on(place: torch.device, device: torch.device) -> bool:
    return place.type == device.type and device.index in (None, place.index)
