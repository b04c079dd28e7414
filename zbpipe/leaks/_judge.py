"""What becomes of what a check's search has found: which of it is a leak."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

from zbpipe import _C
from zbpipe.leaks._alike import plain
from zbpipe.leaks._collector import collect
from zbpipe.leaks._excused import bounded_blocks, is_a_constant
from zbpipe.leaks._results import COLLECTED
from zbpipe.leaks._search import Found, storages_now

_LOOKS = 25  # at what other threads may be about to let go of
_SECONDS_BETWEEN = 0.02


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
        judged.append(entry if fate == entry.leak.fate else replace(entry, leak=replace(entry.leak, fate=fate)))
    return judged


def _living_after_others(found: list[Found], born: dict[int, int], freed: set[int], since: int) -> set[int]:
    """The serials of the blocks that live now; what nothing visible holds is given a moment, for a thread of
    Python's or torch's (an operation, a process group) may be about to let go of it."""
    unheld = {born[entry.address] for entry in found if entry.rank == "none" and entry.address in born} - freed
    for _ in range(_LOOKS):
        living = {serial for _, _, serial in _C.live_blocks(since)}
        if not unheld & living:
            break
        time.sleep(_SECONDS_BETWEEN)
    return living


def without_excused(found: list[Found], imported: set[str]) -> tuple[list[Found], list[str]]:
    """Those that are leaks, and a line for each kind of the others; ``imported`` are modules that it imported."""
    sizes = Counter(entry.leak.bytes for entry in found if entry.rank == "none")
    bounded = bounded_blocks(sizes) if sizes else {}
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
    return leaks, [f"{_count(sizes)} {line}" for line, sizes in kinds.values()]


def _count(sizes: list[int]) -> str:
    return f"{len(sizes)} storage{'s' * (len(sizes) > 1)} ({sum(sizes)} bytes)"
