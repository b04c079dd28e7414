"""What a recording leaves behind when memory runs out: the phases, who holds the most, and the picture."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zbpipe import _C
from zbpipe._formatting import Unit, in_words, table
from zbpipe.memory._log import ALLOC, FREE, spans_of

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
        self._since, self._older = _C.next_serial(), _storages()

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
        head = f"out of memory on {recording.device} in {phase}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(f"{stem}.txt", "w", encoding="utf-8") as file:
                for text in self._parts(recording, error, head):
                    file.write(text + "\n")
                    file.flush()  # memory is short: the next part may fail
        except Exception as failed:
            logger.error("%s, and the report could not be written: %s", head, failed)
            return
        logger.error("%s; what lived and who held it: %s.txt", head, stem)
        for write, name in ((recording.plot, f"{stem}.png"), (recording.export, f"{stem}.json.gz")):
            try:
                write(name)
            except Exception as failed:
                logger.warning("%s was not written: %s", name, failed)

    def _parts(self, recording: Any, error: BaseException, head: str) -> Iterator[str]:
        yield f"{head}{_place_of(error)}\n  {str(error).partition(chr(10))[0]}"
        time_ = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        yield f"process {os.getpid()} on {socket.gethostname()}, rank {os.environ.get('RANK', 'unknown')}, {time_}"
        yield f"\n{recording}"
        yield f"\n{_by_phase(recording)}"
        yield f"\n{self._holders(str(recording.device))}"

    def _holders(self, device: str) -> str:
        from zbpipe.leaks._search import Scope, search

        before = {identity: size for on, _, size, identity in _C.storage_spans(self._older) if on == device}
        spans = _C.storage_spans(_storages())
        came = {identity: size for on, _, size, identity in spans if on == device and identity not in before}
        largest = sorted(came, key=lambda identity: -came[identity])[:_HOLDERS]
        allowed = {span[3] for span in spans}.difference(largest)
        found = search(Scope(since=self._since, older=self._older, allowed=allowed)).found
        leaks = [_without_the_traceback(entry.leak) for entry in found if entry.leak.device == device]
        head = (
            f"storages of tensors: {in_words(sum(before.values()))} in {len(before)} from before the recording "
            f"(weights, say), {in_words(sum(came.values()))} in {len(came)} that came since; the largest of these:"
        )
        return "\n\n".join(map(str, [head, *leaks[:_HOLDERS]]))


def _storages() -> object:
    from zbpipe.leaks._search import storages_now

    return storages_now()


def bytes_of_tensors(device: torch.device) -> int:
    """Of all tensors' storages on a device, each once; without an index of all devices of its type."""
    places = ((torch.device(place), size) for place, _, size, _ in _C.storage_spans(_storages()))
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


def _place_of(error: BaseException) -> str:
    """As " at train.py:12": the innermost line that is neither torch's nor ours."""
    found, at = "", error.__traceback__
    while at is not None:
        if not (file := at.tb_frame.f_code.co_filename).startswith(_LIBRARIES):
            found = f" at {file}:{at.tb_lineno}"
        at = at.tb_next
    return found


def _without_the_traceback(leak: Any) -> Any:
    """A variable of a function that the exception has left is held by its traceback, in our hands: say the variable."""
    places = [i for i, holder in enumerate(leak.chain) if holder.kind == "traceback"]
    behind = leak.chain[places[-1] + 1 :] if places else []
    return replace(leak, chain=behind, in_cycle=0) if behind else leak


def _by_phase(recording: Any) -> str:
    try:
        log = recording._whole_log("that")
    except RuntimeError as error:
        return f"in which phases the live bytes were handed out is not known: {error}"
    living: dict[int, tuple[str, int]] = {}  # by serial
    for running, events in spans_of(log, recording._phases_ended()):
        innermost = running[-1].label if running else "between phases"
        for _, _, size, serial, _, kind in events:
            if kind == ALLOC:
                living[serial] = innermost, size
            elif kind == FREE:
                del living[serial]
    sums: dict[str, list[int]] = {}
    for innermost, size in living.values():
        sums.setdefault(innermost, []).append(size)
    unit = Unit.of(max(map(sum, sums.values()), default=0))
    rows = sorted(sums.items(), key=lambda row: -sum(row[1]))
    shown = table(("phase", unit.name, "blocks"), [(phase, unit(sum(sizes)), str(len(sizes))) for phase, sizes in rows])
    return f"what lives, by the phase in which it was handed out\n{shown}"
