"""Threads that wait for works that tell only a caller of ``wait`` that they are done: gloo's.

For sends one per group and peer, that lives while there are sends under way and while the group does; for receives in
whose wait a schedule computes, one each (zbpipe/_waits.py).
"""

import atexit
import contextlib
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

Line = tuple[int, int]  # group (its number) and peer, or _RECEIVES and a number of its own


class Finishable(Protocol):
    work: Any
    patience: timedelta | None

    def finish(self, timeout: timedelta | None = None) -> None:
        """Wait, unless somebody else does so or has done so."""


_RECEIVES = -1  # no group's number
_LONGER = 2  # times the schedule's patience; not for ever: see _give_up
_AT_ONCE = timedelta(milliseconds=-2)  # 0 and -1 are the group's timeout
_TO_HEAR_OF_THE_END = 0.05  # seconds
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # not ids, which are given again
_new_number = itertools.count().__next__
_queues: dict[Line, deque[Finishable]] = {}
_waiting: dict[Line, tuple[threading.Thread, Finishable]] = {}
_queues_lock = threading.RLock()  # a group may go, collected as garbage, while this thread has it


def watch(group: Any, peer: int, send: Finishable) -> None:
    """Have a thread wait for ``send``. One thread per group and peer, because its sends are done in order."""
    with _queues_lock:
        line = _number_of(group), peer
        queue = _queues.get(line)
        if queue is not None:
            queue.append(send)
            return
        _queues[line] = deque([send])
    _start(line, f"zbpipe-send-{peer}")


def watch_receive(receive: Finishable) -> None:
    """Have a thread wait for ``receive``, for as long as its group does. A thread of its own: one that nobody waits for
    any more, since a step failed, must not keep the next from being heard of."""
    line = _RECEIVES, _new_number()
    with _queues_lock:
        _queues[line] = deque([receive])
    _start(line, "zbpipe-receive")


def _start(line: Line, name: str) -> None:
    threading.Thread(target=_finish_queue, args=(line,), name=name, daemon=True).start()


def _finish_queue(line: Line) -> None:
    while True:
        with _queues_lock:
            _waiting.pop(line, None)
            if not _queues[line]:
                del _queues[line]
                return
            send = _queues[line].popleft()
            _waiting[line] = threading.current_thread(), send
        send.finish(_LONGER * send.patience if send.patience else None)
        del send


def _number_of(group: Any) -> int:
    number = _numbers.get(group)
    if number is None:
        number = _numbers[group] = _new_number()
        weakref.finalize(group, _give_up_group, number).atexit = False
    return number


def _give_up_group(number: int) -> None:
    _give_up(lambda line: line[0] == number)


@atexit.register
def _give_up_all() -> None:
    """When the program exits: a thread that came back from gloo into an interpreter that is gone would abort it."""
    for thread in _give_up(lambda line: True):
        thread.join(5)


def _give_up(is_meant: Callable[[Line], bool]) -> list[threading.Thread]:
    """End the threads that still wait, because a step failed and the peer does not receive.

    To time out on the same work wakes a thread: gloo then declares the whole group broken. A wait that finds the send
    done has taken that from the thread, and another one breaks the group; so it does not linger, and comes late.
    """
    with _queues_lock:
        for line, queue in _queues.items():
            if is_meant(line):
                queue.clear()
        waiting = [waits for line, waits in _waiting.items() if is_meant(line)]
    if waiting:
        time.sleep(_TO_HEAR_OF_THE_END)
    for thread, send in waiting:
        with contextlib.suppress(RuntimeError, AttributeError):  # it may be done, and the work gone
            while thread.is_alive() and send.work.wait(_AT_ONCE):
                pass
    return [thread for thread, _ in waiting]
