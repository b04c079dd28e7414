"""What becomes of what a check's search has found: which of it is a leak."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

from zbpipe import _C
from zbpipe.leaks._alike import plain
from zbpipe.leaks._collector import collect
from zbpipe.leaks._excused import bounded_blocks, in_compiled_code, is_a_script_module
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


def without_excused(found: list[Found]) -> tuple[list[Found], list[str]]:
    """Those that are leaks, and a line for each kind of the others."""
    sizes = Counter(entry.leak.bytes for entry in found if entry.rank == "none")
    bounded = bounded_blocks(sizes) if sizes else {}
    is_compiled = in_compiled_code() if any(entry.rank in ("hidden", "none") for entry in found) else None
    leaks: list[Found] = []
    kept: dict[str, list[int]] = {}
    cycles: dict[str, tuple[str, list[int]]] = {}
    of_torchscript: dict[str, list[int]] = {}
    for entry in found:
        size = entry.leak.bytes
        most, holder = bounded.get(size, (0, ""))
        if entry.excused is not None and entry.leak.fate == COLLECTED:
            cycles.setdefault(plain(entry.excused), (entry.excused, []))[1].append(size)
        elif (
            is_compiled is not None
            and entry.rank in ("hidden", "none")
            and is_compiled(entry.leak.storage, entry.address)
        ):
            of_torchscript.setdefault("that TorchScript's compiled code keeps as long as the process", []).append(size)
        elif entry.leak.fate == COLLECTED and is_a_script_module(entry.leak.chain):
            of_torchscript.setdefault(
                "of TorchScript modules, which torch.jit.script leaves to the collector", []
            ).append(size)
        elif entry.rank == "none" and sizes[size] <= most:
            kept.setdefault(holder, []).append(size)
        else:
            leaks.append(entry)
    notes = [f"{_count(sizes)} as large as {holder}" for holder, sizes in kept.items()]
    notes += [f"{_count(sizes)} {what}" for what, sizes in of_torchscript.items()]
    notes += [
        f"{_count(sizes)} that hung on a cycle of a library's own, which the collector frees: {text}"
        for text, sizes in cycles.values()
    ]
    return leaks, notes


def _count(sizes: list[int]) -> str:
    return f"{len(sizes)} storage{'s' * (len(sizes) > 1)} ({sum(sizes)} bytes)"
