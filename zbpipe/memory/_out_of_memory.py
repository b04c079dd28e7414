"""What a recording leaves behind when memory runs out: the phases, who holds the most, and the picture.

On the CPU an allocation that fails is an exception, which is seen when it leaves the recording. CUDA's allocator tells
an observer at the very moment, before the exception is made: also where the program catches that and goes on.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from zbpipe import _C
from zbpipe._formatting import Unit, in_words, table
from zbpipe._torch import allocator
from zbpipe.memory._snapshot import Labels

logger = logging.getLogger("zbpipe")

_OF_THE_CPU = ("DefaultCPUAllocator: can't allocate memory", "not enough memory: you tried to allocate")
_HOLDERS = 10  # that are described
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class Hook:
    """Writes the report of one recording into ``folder``."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()  # the program may change the working directory
        self.count = 0
        self._since = 0
        self._older: Any = None

    def begin(self, recording: Any) -> None:
        from zbpipe.leaks._search import storages_now

        self._since, self._older = _C.next_serial(), storages_now()
        if recording.device.type == "cuda":
            _observed.join(self, recording)

    def leave(self) -> None:
        """The recording is over, or has not begun."""
        _observed.leave(self)
        self._older = None

    def end(self, recording: Any, error: BaseException | None) -> None:
        """The recording is over, by ``error`` or without."""
        for raised in causes(error):
            # What CUDA's observer has told of is told once.
            if is_out_of_memory(raised) and not (self.count and recording.device.type == "cuda"):
                self.report(recording, str(raised).partition("\n")[0], recording._phase_of(error), raised)
                break
        self.leave()

    def report(self, recording: Any, what: str, phase: str, error: BaseException | None) -> None:
        """Never raises: what cannot be written is said, and the program's own error goes its way."""
        self.count += 1
        rank = os.environ.get("RANK")
        stem = self.folder / (f"process{os.getpid()}" if rank is None else f"rank{rank}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(f"{stem}.txt", "w", encoding="utf-8") as file:
                for text in self._parts(recording, what, phase, error):
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

    def _parts(self, recording: Any, what: str, phase: str, error: BaseException | None) -> Iterator[str]:
        time_ = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        where = f" at {place}" if (place := _line_of(error)) else ""
        yield f"out of memory on {recording.device} in {phase}{where}\n  {what}"
        yield f"process {os.getpid()} on {socket.gethostname()}, rank {os.environ.get('RANK', 'unknown')}, {time_}"
        if self.count > 1:
            yield f"(report {self.count} of this recording, in the files of the one before)"
        yield f"\n{recording}"
        yield f"\n{self._by_phase(recording)}"
        yield f"\n{self._holders(recording)}"

    def _by_phase(self, recording: Any) -> str:
        try:
            events = recording.own_events()
        except RuntimeError as error:  # no log, or not the whole
            return f"in which phases the live bytes were handed out is not known: {error}"
        labels, living = Labels(recording.phases), dict[int, tuple[int, str]]()
        for time_ns, address, size, _ in events:
            if size > 0:
                living[address] = size, labels(time_ns)
            else:
                living.pop(address, None)
        sums: dict[str, list[int]] = {}
        for size, label in living.values():
            entry = sums.setdefault(label, [0, 0])
            entry[0] += size
            entry[1] += 1
        unit = Unit.of(max((size for size, _ in sums.values()), default=0))
        rows = [(label, unit(size), str(n)) for label, (size, n) in sorted(sums.items(), key=lambda e: -e[1][0])]
        return "what lives, by the phase in which it was handed out\n" + table(("phase", unit.name, "blocks"), rows)

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


def is_out_of_memory(error: BaseException | None) -> bool:
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


class _Observed:
    """The recordings that CUDA's observer tells. torch takes an observer for good: there is one, from the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_attached = False
        self._hooks: tuple[tuple[Hook, weakref.ref[Any]], ...] = ()

    def join(self, hook: Hook, recording: Any) -> None:
        with self._lock:
            if not self._is_attached:
                allocator.on_out_of_memory(self._tell)
                self._is_attached = True
            self._hooks = (*self._hooks, (hook, weakref.ref(recording)))

    def leave(self, hook: Hook) -> None:
        with self._lock:
            self._hooks = tuple(entry for entry in self._hooks if entry[0] is not hook)

    def _tell(self, device: int, asked: int, total: int, free: int) -> None:
        """On the thread whose allocation has failed; torch holds no lock of the allocator's."""
        for hook, reference in self._hooks:
            recording = reference()
            if recording is None or recording.device.index != device:
                continue
            what = f"{asked} bytes were asked for; of the device's {total} bytes {free} are free"
            try:
                so_far = recording._so_far()
            except Exception as failed:
                head = f"out of memory on {recording.device} ({what})"
                logger.error("%s, and the history could not be read: %s", head, failed)
                continue
            hook.report(so_far, what, recording._phase_of(None), None)


_observed = _Observed()
