"""The events of a recording's log, as bytes of zbp_event in csrc/core/memory/zbp_record.h."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from zbpipe import _C
from zbpipe.memory._results import Allocation

_EVENT = struct.Struct("QQQQII")
_ALLOC, _FREE, _FREE_OLDER = range(3)


def all_events(log: _C.Recorder) -> Iterator[Allocation]:
    start = log.marks()[0][0]
    live = 0
    for time, address, size, _, thread, kind in _EVENT.iter_unpack(log.events()):
        live += size if kind == _ALLOC else -size if kind == _FREE else 0
        yield Allocation(time - start, address, size if kind == _ALLOC else -size, live, thread, kind == _FREE_OLDER)


def own_events(log: _C.Recorder) -> Iterator[tuple[int, int, int, int]]:
    """Time, address, bytes and live bytes of those that are not older."""
    start = log.marks()[0][0]
    live = 0
    for time, address, size, _, _, kind in _EVENT.iter_unpack(log.events()):
        if kind == _FREE_OLDER:
            continue
        change = size if kind == _ALLOC else -size
        live += change
        yield time - start, address, change, live
