"""What a recording leaves behind when memory runs out: the phases, who holds the most, and the picture."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch

from zbpipe import _C
from zbpipe._formatting import in_words
from zbpipe.leaks._found import OWN_CODE
from zbpipe.leaks._search import Scope, search, storages_now
from zbpipe.memory._log import ENDED

logger = logging.getLogger("zbpipe")

_OF_THE_CPU = ("DefaultCPUAllocator: can't allocate memory", "not enough memory: you tried to allocate")
_HOLDERS = 10  # that are described


def reporter(folder: Path) -> Callable[[Any, BaseException | None], None]:
    """For a recording that begins: what to call with it and the exception that has ended it, if any."""
    return partial(_report, folder, _C.next_serial(), storages_now())


def _report(folder: Path, since: int, older: object, recording: Any, error: BaseException | None) -> None:
    """Writes the report if memory ran out. Logs what cannot be written, and never raises beside the program's error."""
    known = [*causes(error)]
    at = next((at for at, cause in enumerate(known) if is_out_of_memory(cause, recording.device)), None)
    if at is None:
        return
    raised, phases = known[at], [vars(cause)[ENDED] for cause in known[: at + 1] if ENDED in vars(cause)]
    head = f"out of memory on {recording.device} in {phases[-1] if phases else 'no phase'}"
    rank = os.environ.get("RANK")
    stem = folder / (f"rank{rank}" if rank else f"process{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(f"{stem}.txt", "w", encoding="utf-8") as file:
            file.write(f"{head}{_place_of(raised)}\n  {str(raised).partition(chr(10))[0]}\n")
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            file.write(f"process {os.getpid()} on {socket.gethostname()}, rank {rank or 'unknown'}, {when}\n")
            file.write(f"\n{recording}\n")
            file.flush()  # memory is short: the next part may fail
            file.write(f"\n{_holders(str(recording.device), since, older)}\n")
    except Exception as failed:
        logger.error("%s, and the report could not be written: %s", head, str(failed))
        return
    logger.error("%s; what lived and who held it: %s.txt", head, stem)
    for write, name in ((recording.plot, f"{stem}.png"), (recording.export, f"{stem}.json.gz")):
        try:
            write(name)
        except Exception as failed:
            logger.warning("%s was not written: %s", name, str(failed))  # a handler may keep what it is given


def _holders(device: str, since: int, older: object) -> str:
    before = {identity: size for on, _, size, identity in _C.storage_spans(older) if on == device}
    spans = _C.storage_spans(storages_now())
    came = {identity: size for on, _, size, identity in spans if on == device and identity not in before}
    largest = sorted(came, key=lambda identity: -came[identity])[:_HOLDERS]
    allowed = {span[3] for span in spans}.difference(largest)
    found = search(Scope(since=since, older=older, allowed=allowed)).found
    leaks = [_without_the_traceback(entry.leak) for entry in found if entry.leak.device == device]
    head = (
        f"storages of tensors: {in_words(sum(before.values()))} in {len(before)} from before the recording "
        f"(weights, say), {in_words(sum(came.values()))} in {len(came)} that came since; the largest of these:"
    )
    return "\n\n".join(map(str, [head, *leaks[:_HOLDERS]]))


def is_out_of_memory(error: BaseException, device: torch.device) -> bool:
    """Whether it says so of the device: Python's own MemoryError is of the CPU."""
    if device.type != "cpu":
        return isinstance(error, torch.OutOfMemoryError)
    with contextlib.suppress(Exception):  # a program's own class may fail to say anything
        if isinstance(error, RuntimeError):
            return any(words in str(error) for words in _OF_THE_CPU)
    return isinstance(error, MemoryError)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those from which it came: a schedule raises its own from a stage's."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _place_of(error: BaseException) -> str:
    """As " at train.py:12": the innermost line that is neither torch's nor ours."""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    return next((f" at {file}:{line}" for file, line in reversed(lines) if not file.startswith(OWN_CODE)), "")


def _without_the_traceback(leak: Any) -> Any:
    """A variable of a function that the exception has left is held by its traceback, in our hands: say the variable."""
    places = [i for i, holder in enumerate(leak.chain) if holder.kind == "traceback"]
    behind = leak.chain[places[-1] + 1 :] if places else []
    return replace(leak, chain=behind, in_cycle=0) if behind else leak
