"""Threads that wait for gloo's sends: only a caller of ``wait`` learns from these works that they are done.

There is one thread per group and peer, and it does not outlive its group. When it has nothing to wait for, it stays for
a while. To start another one for the next send would take the schedule milliseconds where all cores compute.
"""

import atexit
import contextlib
import itertools
import os
import threading
import time
import weakref
from collections import deque
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Protocol

Line = tuple[int, int]  # group (its number) and peer


class Finishable(Protocol):
    work: Any
    patience: timedelta | None

    def finish(self, timeout: timedelta | None = None) -> None:
        """Waits, unless another caller does or has done so."""


class _Queue:
    """A thread and the sends that it waits for, in order."""

    def __init__(self, line: Line, name: str) -> None:
        self.left: deque[Finishable] = deque()
        self.now: Finishable | None = None
        self.calls: SimpleQueue[None] = SimpleQueue()  # one call per send, and one to end
        self.thread = threading.Thread(target=_finish_queue, args=(line, self), name=name, daemon=True)

    def put(self, send: Finishable) -> None:
        self.left.append(send)
        self.calls.put(None)

    def end(self) -> None:
        self.left.clear()
        self.calls.put(None)


_STAYS = 1.0  # seconds
_LONGER = 2  # times the schedule's patience; not for ever, see _give_up
_AT_ONCE = timedelta(milliseconds=-2)  # 0 and -1 mean the group's timeout
_TO_HEAR_OF_THE_END = 0.05  # seconds
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of groups; an id may be reused
_new_number = itertools.count().__next__
_queues: dict[Line, _Queue] = {}
_queues_lock = threading.RLock()  # the garbage collector may end a group in a thread that has the lock


def _begin_anew() -> None:
    """Resets a forked process, which has none of the threads."""
    global _queues_lock
    _queues_lock = threading.RLock()
    _queues.clear()


os.register_at_fork(after_in_child=_begin_anew)


def watch(group: Any, peer: int, send: Finishable) -> None:
    """Lets a thread wait for ``send``: one per group and peer, since sends to a peer are done in order."""
    with _queues_lock:
        line = _number_of(group), peer
        if is_new := line not in _queues:
            _queues[line] = _Queue(line, f"zbpipe-send-{peer}")
        queue = _queues[line]
        queue.put(send)
    try:
        if is_new:
            queue.thread.start()
    except RuntimeError:  # no thread can be started: the next send tries again
        with _queues_lock:
            _queues.pop(line, None)
        raise


def _finish_queue(line: Line, queue: _Queue) -> None:
    while True:
        with contextlib.suppress(Empty):
            queue.calls.get(timeout=_STAYS)
        with _queues_lock:
            if not queue.left:
                del _queues[line]
                return
            send = queue.now = queue.left.popleft()
        send.finish(_LONGER * send.patience if send.patience else None)
        queue.now = None
        del send


def _number_of(group: Any) -> int:
    """The group's number. When the group is gone, the threads that wait for its sends give up."""
    number = _numbers.get(group)
    if number is None:
        number = _numbers[group] = _new_number()
        weakref.finalize(group, _give_up, number).atexit = False
    return number


@atexit.register
def _give_up_all() -> None:
    """At exit: a thread that returned from gloo after the interpreter's end would abort the process."""
    for thread in _give_up():
        if thread.is_alive():
            thread.join(5)


def _give_up(group: int | None = None) -> list[threading.Thread]:
    """Ends the group's threads, or all. Those that still wait give up: a step failed, and the peer does not receive.

    A timeout of another wait on the same work wakes a thread, since gloo then declares the whole group broken. If that
    wait finds the send done instead, the thread never hears of it, and the next wait must break the group. So the waits
    begin late, and do not linger.
    """
    with _queues_lock:
        ending = [queue for line, queue in _queues.items() if group in (None, line[0])]
        for queue in ending:
            queue.end()
        waiting = [(queue.thread, queue.now) for queue in ending if queue.now is not None]
    if waiting:
        time.sleep(_TO_HEAR_OF_THE_END)
    for thread, send in waiting:
        with contextlib.suppress(RuntimeError, AttributeError):  # the send may be done, and its work gone
            while thread.is_alive() and send.work.wait(_AT_ONCE):
                pass
    return [queue.thread for queue in ending]
