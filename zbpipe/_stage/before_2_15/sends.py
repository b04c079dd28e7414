"""Sends, each of which keeps its tensor until it is done, and not until the end of the step.

Note [When a send is done]

Most backends' works answer ``is_completed``. They are asked when the schedule posts sends or receives, after it has
waited for a receive, and when a forward begins. They are never asked within a backward or W. A recording shows what
these free, and that must not depend on a peer's time of receipt.

gloo's works tell only a caller of ``wait``, which blocks until the peer receives. So a thread waits for them, one per
group and peer. The first to wait claims the work, and the others wait for the first. So the schedule never waits behind
a send that it did not ask for. The schedule's thread frees the memory when it comes here, so that a profiler sees it.

An output has arrived when its gradient has been received, so what is left of its send is waited for then. Sends of a
step that failed may never be received: a later forward of the microbatch, or the stage's next step, disowns them. After
unpatch() the schedule does not come here, and each waiting thread frees what it waited for.

Note [When nobody receives]

A wait for a gloo work keeps the group's connections open, and its timeout closes them for everybody. torch's schedule
waits only at the end of the step. The thread must not change that. So the thread waits for longer, and the schedule
waits for the thread with its own timeout. A Send keeps no operation, which would keep the group. If a failed program
drops the group, as destroy_process_group() does, the thread gives up (threads.py), the connections close, and the peers
hear of it.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zbpipe._stage.before_2_15.buffers import empty_like
from zbpipe._stage.before_2_15.outputs import Outputs
from zbpipe._stage.before_2_15.threads import watch
from zbpipe._stage.before_2_15.works import Transfer, wait_for
from zbpipe._torch import pipelining

_under_way: set["weakref.ref[Send]"] = set()  # a WeakSet's methods are Python; each use of this set is one C call


class Parcel(NamedTuple):
    """Whose tensor an operation carries. ``microbatch`` is that of an output or of an output's gradient, else None.
    ``outputs`` hold an output that is to be freed after its send."""

    stage: Any
    microbatch: int | None
    outputs: Outputs | None


def marked(ops: Any, stage: Any, microbatch: int | None, outputs: Outputs | None = None) -> Any:
    for op in ops:
        op.zbpipe_parcel = Parcel(stage, microbatch, outputs)
    return ops


def batch_p2p(original: Callable[..., Any], p2p_ops: list[Any], desc: str | None = None) -> Any:
    poll()
    works = original(p2p_ops, desc)
    if not works or isinstance(works[0], Transfer) or not all(hasattr(op, "zbpipe_parcel") for op in p2p_ops):
        return works  # nothing to wait for, or operations of other code
    if len(works) == len(p2p_ops):
        batches = [[op] for op in p2p_ops]
    elif len(works) == 1:  # the backend made one work of all operations
        batches = [p2p_ops]
    else:
        return works
    all_sent = all(_is_send(op) for op in p2p_ops)
    transfers: list[Transfer] = []
    for work, ops in zip(works, batches, strict=True):
        if not all(_is_send(op) for op in ops):
            transfers.append(Receive(work, ops))
            continue
        send = Send(work, ops)
        transfers.append(send)
        if all_sent:  # otherwise the schedule waits at once
            _under_way.add(weakref.ref(send, _under_way.discard))
            backend, patience = pipelining.backend_of(ops[0].group, ops[0].tensor.device)
            if backend == "gloo":  # whose works tell only who waits
                send.watched, send.patience = True, patience
                watch(ops[0].group, ops[0].peer, send)
    for op in p2p_ops:
        if op.zbpipe_parcel.outputs is not None:
            op.zbpipe_parcel.outputs.clear()  # the operations hold the tensors now
        del op.zbpipe_parcel
    return transfers


def _is_send(op: Any) -> bool:
    return op.op is dist.isend


class Receive(Transfer):
    """The work of a receive, or of sends and receives together. The operations keep the received tensors."""

    def __init__(self, work: Any, ops: Sequence[Any]) -> None:
        super().__init__(work)
        self.sent = [op for op in ops if _is_send(op)]
        self.gradients_of = {
            (op.zbpipe_parcel.stage, op.zbpipe_parcel.microbatch)
            for op in ops
            if not _is_send(op) and op.zbpipe_parcel.microbatch is not None
        }

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As the work's; then frees sends that are done, and those of outputs whose gradients have arrived."""
        result = bool(wait_for(self.work, timeout))
        sent, self.sent = self.sent, []
        _describe_sent(sent)
        gradients_of, self.gradients_of = self.gradients_of, set()
        for send in under_way() if gradients_of else ():
            if not gradients_of.isdisjoint(send.outputs_of):
                send.wait()
        poll()
        return result


class Send(Transfer):
    """The work of a send, which holds the tensor until it is done."""

    def __init__(self, work: Any, ops: Sequence[Any]) -> None:
        super().__init__(work)
        self.posted = [(weakref.ref(op), op.tensor) for op in ops]
        parcels = [op.zbpipe_parcel for op in ops]
        self.outputs_of = {(parcel.stage, parcel.microbatch) for parcel in parcels if parcel.microbatch is not None}
        self.lock = threading.Lock()
        self.claimed = False
        self.done = threading.Event()
        self.result_of_wait = True
        self.error: Exception | None = None
        self.watched = False
        self.patience: timedelta | None = None  # the group's timeout; the thread waits for longer
        self.is_polled = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the work is done; raises the work's error, whoever waited for it."""
        self.finish(timeout)
        timeout = timeout or self.patience
        if not self.done.wait(timeout.total_seconds() if timeout else None):
            with contextlib.suppress(AttributeError):  # the work is done meanwhile, and gone
                _time_out(self.work, timeout)
            self.done.set()  # by this wait, if not by the thread's
        self._let_go()
        if self.error is not None:
            raise self.error
        return self.result_of_wait

    def poll(self) -> None:
        """Drops the tensor if the work is done."""
        if not self.watched and not self.done.is_set() and self.is_completed():
            self.finish()
        if self.done.is_set():
            self._let_go()

    def finish(self, timeout: timedelta | None = None) -> None:
        """Waits for the work, unless another caller does or has done so."""
        with self.lock:
            claimed, self.claimed = self.claimed, True
        if claimed:
            return
        try:
            # No local name for the work: a thread that learns of its end may free it.
            self.result_of_wait = bool(wait_for(self.work, timeout))
        except Exception as error:
            self.error = error.with_traceback(None)  # its frames would keep this object
        finally:
            self.done.set()
        if not self.is_polled:
            self._let_go()

    def disown(self, stage: Any, microbatch: int | None) -> None:
        """No gradient will tell of this send, since its step failed. Without a microbatch, of any microbatch."""
        self.outputs_of = {
            of for of in self.outputs_of if of[0] is not stage or (microbatch is not None and of[1] != microbatch)
        }

    def leave(self) -> None:
        """Polling has ended: the thread that waits for the work drops the tensor."""
        self.outputs_of = set()
        self.is_polled = False
        if self.done.is_set():
            self._let_go()

    def _let_go(self) -> None:
        with self.lock:
            posted, self.posted, self.work = self.posted, [], None
        _describe_sent(filter(None, (op() for op, _ in posted)))
        _under_way.discard(weakref.ref(self))

    def answer_afterwards(self, question: str) -> Any:
        """As a work answers that is done and has no result."""
        error = self.error
        answers: dict[str, Any] = {"synchronize": None, "block_current_stream": None}
        answers |= {"is_completed": True, "is_success": error is None, "exception": error, "result": []}
        if question in answers:
            return answers[question]
        if question == "get_future":
            future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            if error is None:
                future.set_result([])
            else:
                future.set_exception(error)  # type: ignore[arg-type]
            return future
        raise RuntimeError(f"this send is done, and its work is gone; ask for its {question} before wait()")


def _time_out(work: Any, timeout: timedelta | None) -> None:
    """Raises the work's own error, as after a wait of ``timeout``."""
    try:
        work.wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        said, milliseconds = str(error), round(1000 * timeout.total_seconds()) if timeout else 1
        if "waiting 1ms" not in said:
            raise
        raise type(error)(said.replace("waiting 1ms", f"waiting {milliseconds}ms")) from None


def _describe_sent(ops: Iterable[Any]) -> None:
    for op in ops:
        op.tensor = empty_like(op.tensor, "meta")  # the schedule's frame may keep the operation until the step ends


def poll() -> None:
    """Frees sends that are done."""
    sends = under_way()
    if sends and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return  # a question would break the capture
    for send in sends:
        send.poll()


def under_way() -> list[Send]:
    return [send for ref in _under_way.copy() if (send := ref()) is not None] if _under_way else []


def disown(stage: Any, microbatch: int | None = None) -> None:
    for send in under_way():
        send.disown(stage, microbatch)


def leave() -> None:
    """Ends polling: frees sends that are done, and leaves the others to the threads that wait for them."""
    poll()
    for send in under_way():
        send.leave()
    _under_way.clear()
