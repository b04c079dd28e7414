"""What a recording leaves behind when memory runs out: the phases, who holds the most, and the picture."""

from __future__ import annotations

import logging
import os
import socket
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from zbpipe import _C
from zbpipe._formatting import Unit, in_words, table
from zbpipe.memory._results import Phase

logger = logging.getLogger("zbpipe")

_OF_THE_CPU = ("DefaultCPUAllocator: can't allocate memory", "not enough memory: you tried to allocate")
_HOLDERS = 10  # that are described
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class Hook:
    """Writes the report of one recording into ``folder``."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()  # the program may change the working directory
        self._since = 0
        self._older: Any = None

    def begin(self) -> None:
        from zbpipe.leaks._search import storages_now

        self._since, self._older = _C.next_serial(), storages_now()

    def end(self, recording: Any, error: BaseException | None) -> None:
        """The recording is over, by ``error`` or without."""
        raised = next(filter(is_out_of_memory, causes(error)), None)
        if raised is not None:
            self._report(recording, raised, recording._phase_of(error))
        self._older = None

    def _report(self, recording: Any, error: BaseException, phase: str) -> None:
        """Never raises: what cannot be written is said, and the program's own error goes its way."""
        rank = os.environ.get("RANK")
        stem = self.folder / (f"process{os.getpid()}" if rank is None else f"rank{rank}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(f"{stem}.txt", "w", encoding="utf-8") as file:
                for text in self._parts(recording, error, phase):
                    file.write(text + "\n")
                    file.flush()  # memory is short: the next part may fail
        except Exception as failed:
            head = f"out of memory on {recording.device} in {phase}"
            logger.error("%s, and the report could not be written: %s", head, failed)
            return
        logger.error("out of memory on %s in %s; what lived and who held it: %s.txt", recording.device, phase, stem)
        for write, name in ((recording.plot, f"{stem}.png"), (recording.export, f"{stem}.json.gz")):
            try:
                write(name)
            except Exception as failed:
                logger.warning("%s was not written: %s", name, failed)

    def _parts(self, recording: Any, error: BaseException, phase: str) -> Iterator[str]:
        where = f" at {place}" if (place := _line_of(error)) else ""
        yield f"out of memory on {recording.device} in {phase}{where}\n  {str(error).partition(chr(10))[0]}"
        time_ = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        yield f"process {os.getpid()} on {socket.gethostname()}, rank {os.environ.get('RANK', 'unknown')}, {time_}"
        yield f"\n{recording}"
        yield f"\n{_by_phase(recording)}"
        yield f"\n{self._holders(recording)}"

    def _holders(self, recording: Any) -> str:
        from zbpipe.leaks._search import Scope, search, storages_now

        own = recording.device
        older = {span[3] for span in _C.storage_spans(self._older) if span[0] == str(own)}
        before = sum(span[2] for span in _C.storage_spans(self._older) if span[0] == str(own))
        spans = _C.storage_spans(storages_now())
        living = [span for span in spans if span[0] == str(own) and span[3] not in older]
        living.sort(key=lambda span: -span[2])
        largest = {span[3] for span in living[:_HOLDERS]}
        allowed = {span[3] for span in spans} - largest
        found = search(Scope(since=self._since, older=self._older, allowed=allowed)).found
        lines = [
            f"storages of tensors: {in_words(before)} in {len(older)} from before the recording (weights, say), "
            f"{in_words(sum(span[2] for span in living))} in {len(living)} that came since; the largest of these:"
        ]
        for entry in [entry for entry in found if entry.leak.device == str(own)][:_HOLDERS]:
            lines += ["", str(_without_the_traceback(entry.leak))]
        return "\n".join(lines)


def bytes_of_tensors(device: torch.device) -> int:
    """Of all tensors' storages on a device, each once; without an index of all devices of its type."""
    from zbpipe.leaks._search import storages_now

    places = ((torch.device(place), size) for place, _, size, _ in _C.storage_spans(storages_now()))
    return sum(size for place, size in places if place.type == device.type and device.index in (None, place.index))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocator has no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_THE_CPU)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those from which it came: a schedule raises its own from a stage's."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _line_of(error: BaseException | None) -> str:
    """The innermost line that is neither torch's nor ours."""
    found = ""
    at: TracebackType | None = None if error is None else error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        if not code.co_filename.startswith(_LIBRARIES):
            found = f"{code.co_filename}:{at.tb_lineno}"
        at = at.tb_next
    return found


def _without_the_traceback(leak: Any) -> Any:
    """A variable of a function that the exception has left is held by its traceback, in our hands: say the variable."""
    places = [i for i, holder in enumerate(leak.chain) if holder.kind == "traceback"]
    behind = leak.chain[places[-1] + 1 :] if places else []
    return replace(leak, chain=behind, in_cycle=0) if behind else leak


def _by_phase(recording: Any) -> str:
    try:
        events = recording._events("that")
    except RuntimeError as error:  # no log, or not the whole
        return f"in which phases the live bytes were handed out is not known: {error}"
    living: dict[int, tuple[int, int]] = {}
    for time_ns, address, size, _, _, older in events:
        if size > 0:
            living[address] = time_ns, size
        elif not older:
            del living[address]
    times, labels = _timeline(recording.phases)
    sums: dict[str, list[int]] = {}
    for time_ns, size in living.values():
        entry = sums.setdefault(labels[bisect_right(times, time_ns) - 1], [0, 0])
        entry[0] += size
        entry[1] += 1
    unit = Unit.of(max((size for size, _ in sums.values()), default=0))
    rows = [(label, unit(size), str(n)) for label, (size, n) in sorted(sums.items(), key=lambda e: -e[1][0])]
    return "what lives, by the phase in which it was handed out\n" + table(("phase", unit.name, "blocks"), rows)


def _timeline(phases: Sequence[Phase]) -> tuple[list[int], list[str]]:
    """Ascending times, and the label of the innermost phase from each on."""
    times, labels = [-1], ["between phases"]
    running: list[int] = []
    turns = [(p.begin_ns, 1, i) for i, p in enumerate(phases)] + [(p.end_ns, 0, i) for i, p in enumerate(phases)]
    for time_ns, begins, i in sorted(turns):
        (running.append if begins else running.remove)(i)
        times.append(time_ns)
        labels.append(phases[max(running)].label if running else "between phases")
    return times, labels
