"""Threads that wait for sends whose works tell only a caller of ``wait`` that they are done: gloo's.

One per group and peer, that lives while there are sends under way.
"""

import atexit
import contextlib
import threading
from collections import deque
from datetime import timedelta
from typing import Any, Protocol

Line = tuple[int, int]  # group (its id) and peer


class Finishable(Protocol):
    work: Any

    def finish(self) -> None:
        """Wait, unless somebody else does so or has done so."""


_queues: dict[Line, deque[Finishable]] = {}
_waiting: dict[Line, tuple[threading.Thread, Finishable]] = {}
_queues_lock = threading.Lock()


def watch(line: Line, send: Finishable) -> None:
    """Have a thread wait for ``send``. One thread per group and peer, because its sends are done in order."""
    with _queues_lock:
        queue = _queues.get(line)
        if queue is not None:
            queue.append(send)
            return
        _queues[line] = deque([send])
    threading.Thread(target=_finish_queue, args=(line,), name=f"zbpipe-send-{line[1]}", daemon=True).start()


def _finish_queue(line: Line) -> None:
    while True:
        with _queues_lock:
            _waiting.pop(line, None)
            if not _queues[line]:
                del _queues[line]
                return
            send = _queues[line].popleft()
            _waiting[line] = threading.current_thread(), send
        send.finish()
        del send


@atexit.register
def _give_up() -> None:
    """Ends the threads that still wait when the program exits, because a step failed and the peer does not receive.

    A thread that came back from gloo into an interpreter that is gone would abort the process. To time out on the same
    work wakes it: gloo then declares the whole group broken.
    """
    with _queues_lock:
        for queue in _queues.values():
            queue.clear()
        waiting = list(_waiting.values())
    for thread, send in waiting:
        with contextlib.suppress(RuntimeError, AttributeError):  # it may be done, and the work gone
            send.work.wait(timedelta(milliseconds=1))
        thread.join(5)
