"""Which tensors are a recording's peak: what lived then, by the phase and the line that made it, and who holds it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

from zbpipe import _C
from zbpipe.leaks._alike import numbered_spans
from zbpipe.leaks._found import created_at
from zbpipe.leaks._results import Leak
from zbpipe.leaks._search import Scope, search, storages_now
from zbpipe.memory._export import SHOWN_AT_PEAK
from zbpipe.memory._log import ALLOC, EVENT, FREE, AtPeak, Ended, Log, Marks, Named, label

Trace = Sequence[tuple[str, str, int]]  # (file, function, line), innermost first


@dataclass(slots=True)
class _Block:
    address: int
    bytes: int
    trace: int
    thread: int
    number: int  # of events before it
    is_alive: bool = True


def at_peak(
    log: Log, marks: Marks, ended: Sequence[Ended], device: str, trace_of: Callable[[int], Trace]
) -> list[AtPeak]:
    """What lived at the peak of a log that is whole, the most bytes first. The holders are those of this moment."""
    phase_of, place_of = _phases(marks, ended), cache(lambda trace: created_at(trace_of(trace)))
    rows: dict[tuple[str, int | None, str | None], list[tuple[_Block, int | None]]] = {}
    for block in _blocks_at_peak(log):
        kind, stage, microbatch = phase_of(bisect_right(marks.events, block.number) - 1, block.thread)
        rows.setdefault((kind, stage, place_of(block.trace)), []).append((block, microbatch))
    found = []
    for (kind, stage, created), made in rows.items():
        numbers = sorted({number for _, number in made if number is not None})
        which = f" microbatch{'es' * (len(numbers) > 1)} {numbered_spans(numbers)}" if numbers else ""
        size, alive = sum(block.bytes for block, _ in made), sum(block.is_alive for block, _ in made)
        largest = max((block for block, _ in made), key=lambda block: (block.is_alive, block.bytes))
        row = AtPeak(size, len(made), label(kind, stage, None) + which, created, alive, None)
        found.append((largest, row))
    found.sort(key=lambda pair: -pair[1].bytes)
    holders = _holders({block.address for block, _ in found[:SHOWN_AT_PEAK] if block.is_alive}, device)
    return [replace(row, holder=holders.get(block.address)) for block, row in found]


def _blocks_at_peak(log: Log) -> list[_Block]:
    """When live bytes were the most for the first time."""
    live = most = count = 0
    for number, (*_, size, _, _, _, kind) in enumerate(EVENT.iter_unpack(log.events()), 1):
        live += size if kind == ALLOC else -size if kind == FREE else 0
        if live > most:
            most, count = live, number
    events = EVENT.iter_unpack(log.events())
    there: dict[int, _Block] = {}
    for number, (_, address, size, _, trace, thread, kind) in enumerate(islice(events, count)):
        if kind == ALLOC:
            there[address] = _Block(address, size, trace, thread, number)
        else:
            there.pop(address, None)
    for _, address, *_ in events:  # the first that comes ends what was there
        if address in there:
            there[address].is_alive = False
    return [*there.values()]


def _phases(marks: Marks, ended: Sequence[Ended]) -> Callable[[int, int], Named]:
    """For a span between marks and a thread the innermost phase: one of that thread, else one of any."""
    begins, ends = {phase.begin: phase for phase in ended}, {phase.end: phase for phase in ended}
    around, now = list[list[Ended]](), list[Ended]()  # what goes on in each span, as it began
    for mark in range(len(marks.events)):
        now = [phase for phase in now if phase is not ends.get(mark)]
        now += [begins[mark]] if mark in begins else []
        around.append(now)

    def phase_of(span: int, thread: int) -> Named:
        own = [phase for phase in around[span] if marks.thread[phase.begin] == thread]
        return next((phase.named for phase in reversed(own or around[span])), ("", None, None))

    return phase_of


def _holders(addresses: set[int], device: str) -> dict[int, Leak]:
    """Who holds the storages that begin there."""
    spans = _C.storage_spans(storages_now())
    wanted = {identity for on, address, _, identity in spans if on == device and address in addresses}
    if not wanted:
        return {}
    allowed = {identity for *_, identity in spans} - wanted
    found = search(Scope(older=_C.watch_storages([]), allowed=allowed)).found
    return {entry.address: entry.leak for entry in found if entry.leak.storage in wanted}
