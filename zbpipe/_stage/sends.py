"""Lets go of what a pipeline stage and its schedule hold for longer than anything needs it.

zbpipe's groups hold little between I and W; torch's schedule (up to 2.14) holds much beside them. While torch is
patched, the methods below of ``_PipelineStageBase`` and the schedules' ``_batch_p2p`` are wrapped, so that

- after I a stage keeps the parameter groups: no outputs, output gradients or inputs, and no ``.grad`` of a received
  input. Stage 0, whose W is a whole backward, keeps what that needs;
- a received tensor belongs to the microbatch: memory is allocated when its receive is posted, and goes with the
  microbatch. In between a tensor on the meta device describes it;
- a send keeps its tensor until it is done, not until the end of the step;
- with ``release_outputs`` the stage keeps a ``GradientEdge`` in place of each output that another stage consumes, so
  that the output's memory goes with the send, or with the next stage's input where that is on the same rank.

torch 2.15 has the last three itself; of their methods only ``backward_one_chunk`` is wrapped there.

Beside them ``scale_grads`` is wrapped: where W adds to ``main_grad``, a schedule's division by the number of
microbatches is for that too. And the last stage's outputs are detached by the passes, not by torch's stage.

Note [Who detaches the last stage's outputs]

torch's stage detaches them in place when I is done. Nodes that W runs may have saved them, and could not use them any
more: the loss's own, where nothing before the last stage's weights requires a gradient, so that W begins at the loss.
I knows which ones those are (Split::detach_outputs), and leaves them to W; so it is given them beside the loss. And an
output may be a parameter (a prompt), which torch's stage, once it has detached it, trains no more: it is left alone.

Note [When a send is done]

Most backends' works tell (``is_completed``), and are asked when the schedule posts sends or receives, when it has
waited for a receive, and when a forward begins; never within a backward or W, of which a recording says what they
free: that must not depend on when a peer received. gloo's works tell only a caller of ``wait``, which blocks until
the peer receives; so a thread waits for them, one per group and peer, that lives while there are sends under way.
Whoever comes first claims the work and waits for it, the others wait for him: the schedule never waits behind a send
that it did not ask for. Memory is freed by the schedule's thread, when it passes here: a profiler sees no other. When
an output's gradient has been received, the output has arrived: what is left of its send is waited for then. That holds
within a step; sends of one that failed may never be received, so a later forward of the microbatch, or the stage's
next step, disowns them. After unpatch() nobody passes here, and a thread that waits frees what it waited for.
"""

import atexit
import contextlib
import functools
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from zbpipe._policy import get_policy
from zbpipe._stage import handover as stage_pass
from zbpipe._stage.ddp import is_ddp
from zbpipe._torch import pipelining, probe

_Function = Callable[..., Any]


class _Place(NamedTuple):
    """A method of the stages' base class, or the schedules' function: what it was and what it is since."""

    owner: Any
    name: str
    original: _Function
    replacement: _Function

    def __str__(self) -> str:
        if inspect.isclass(self.owner):
            return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.name}"
        return f"{self.owner.__name__}.{self.name}"


class _State:
    """``stages`` may have descriptions in place of receive buffers. ``outputs`` are not with the next stage yet, or
    were and are empty lists. ``sends`` are under way; ``lock`` is theirs."""

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.release_outputs = False
        self.stages: weakref.WeakSet[Any] = weakref.WeakSet()
        self.outputs: weakref.WeakKeyDictionary[Any, dict[int, _Outputs]] = weakref.WeakKeyDictionary()
        self.sends: weakref.WeakSet[_Send] = weakref.WeakSet()
        self.lock = threading.Lock()
        self.spent_losses: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def install(release_outputs: bool) -> list[str]:
    """Wrap the places. The caller holds patch()'s lock, has called nothing but uninstall() since the last time, and
    knows that the probe's need "stages" is met.

    Returns:
        The places' names.
    """
    _state.release_outputs = release_outputs
    for owner, name in _find():
        original = vars(owner)[name]
        _state.places.append(_Place(owner, name, original, _wrap(original, _WRAPPERS[name])))
    for place in _state.places:
        setattr(place.owner, place.name, place.replacement)
    if refusal := probe.refusal("the scale of main_grad"):
        stage_pass.main_grad_refusal = (
            f"policy(main_grad=True) cannot be used while torch {torch.__version__} is patched: with it {refusal}; use "
            "a torch that zbpipe knows, or a newer zbpipe."
        )
    return [str(place) for place in _state.places]


def uninstall() -> tuple[list[str], list[str]]:
    """Restore the places. Stages have the receive buffers that torch expects them to have, each from when it is used.

    Returns:
        The names of the places restored, and of those that somebody else rebound meanwhile and that are left.
    """
    restored, rebound = [], []
    for place in _state.places:
        if vars(place.owner).get(place.name) is place.replacement:
            setattr(place.owner, place.name, place.original)
            restored.append(str(place))
        else:
            rebound.append(str(place))
    _state.places = []
    stage_pass.main_grad_refusal = None
    for stage in list(_state.stages):
        for recv_infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            _allocate_when_asked(recv_infos, stage.device)
    _state.stages.clear()
    _state.outputs.clear()
    _poll()
    for send in _sends():
        send.leave()
    with _state.lock:
        _state.sends.clear()
    return restored, rebound


def set_release_outputs(enabled: bool) -> None:
    """Takes effect with the next forward of each stage."""
    _state.release_outputs = enabled


def _find() -> list[tuple[Any, str]]:
    """The places that can be wrapped in this torch, as owner and name."""
    base = pipelining.stage_base()
    places = [(base, "backward_one_chunk")]
    if not probe.differences("the scale of main_grad"):
        places.append((base, "scale_grads"))
    if pipelining.releases_by_itself() or probe.differences("releases"):
        return places
    classes = pipelining.stage_classes()
    places += [(base, name) for name in _WRAPPERS if name in vars(base) and (base, name) not in places]
    places += [(owner, name) for owner in classes for name in pipelining.PREPARE if _is_defined(owner, name)]
    return [*dict.fromkeys(places), (pipelining.schedules_module(), pipelining.BATCH_P2P)]


def _is_defined(owner: Any, name: str) -> bool:
    function = vars(owner).get(name)
    return function is not None and not getattr(function, "__isabstractmethod__", False)


def _wrap(original: _Function, wrapper: _Function) -> _Function:
    """``wrapper(original, ...)`` while torch is patched; somebody may hold on to it for longer."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not _state.places:
            return original(*args, **kwargs)
        with stage_pass.within_stage():
            return wrapper(original, *args, **kwargs)

    return replacement


# A stage's methods, in the order in which a microbatch meets them.


def _prepare(original: _Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    for recv_infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
        _describe_buffers(self, recv_infos)
    return result


def _get_fwd_recv_ops(original: _Function, self: Any, fwd_chunk_id: int) -> Any:
    _allocate(self.args_recv_info[fwd_chunk_id], self.device)
    return _marked(original(self, fwd_chunk_id), self, None)


def _set_local_fwd_input(original: _Function, self: Any, prev_stage_outputs: Any, mb_index: int) -> Any:
    if not isinstance(prev_stage_outputs, _Outputs):
        return original(self, prev_stage_outputs, mb_index)
    result = original(self, tuple(prev_stage_outputs), mb_index)
    prev_stage_outputs.clear()
    return result


def _forward_one_chunk(original: _Function, self: Any, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
    _poll()
    _disown(self, fwd_chunk_id)
    output = original(self, fwd_chunk_id, *args, **kwargs)
    # The inputs are the microbatch's now: fwd_cache holds them.
    _describe_buffers(self, self.args_recv_info.get(fwd_chunk_id, ()))
    if not _state.release_outputs or self.is_last or isinstance(output, _Outputs):
        return output
    if is_ddp(self.submod):  # its reducer looks for unused weights from the outputs
        return output
    stage_output, *rest = self.fwd_cache[fwd_chunk_id]
    self.fwd_cache[fwd_chunk_id] = (tuple(_edge(value, self.has_backward) for value in stage_output), *rest)
    outputs = _Outputs(stage_output)
    _state.outputs.setdefault(self, {})[fwd_chunk_id] = outputs
    return outputs


def _get_fwd_send_ops(original: _Function, self: Any, fwd_chunk_id: int) -> Any:
    outputs = _state.outputs.get(self, {}).get(fwd_chunk_id)
    if outputs is None:
        return _marked(original(self, fwd_chunk_id), self, fwd_chunk_id)
    if self.fwd_cache[fwd_chunk_id][0] and not outputs:
        raise RuntimeError(
            f"zbpipe released the outputs of stage {self.stage_index}, microbatch {fwd_chunk_id}, when they had been "
            "sent: send them once, or patch with release_outputs=False."
        )
    entry = self.fwd_cache[fwd_chunk_id]
    self.fwd_cache[fwd_chunk_id] = (tuple(outputs), *entry[1:])
    try:
        ops = original(self, fwd_chunk_id)
    finally:
        self.fwd_cache[fwd_chunk_id] = entry
    return _marked(ops, self, fwd_chunk_id, outputs)


def _get_bwd_recv_ops(original: _Function, self: Any, bwd_chunk_id: int) -> Any:
    _allocate(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
    return _marked(original(self, bwd_chunk_id), self, bwd_chunk_id)


def _set_local_bwd_input(original: _Function, self: Any, next_stage_bwd_outputs: Any, mb_index: int) -> Any:
    if isinstance(next_stage_bwd_outputs, tuple):
        for info, grad in zip(self.grad_recv_info.get(mb_index, ()), next_stage_bwd_outputs, strict=False):
            if grad is None and getattr(info, "buffer", None) is not None:  # torch leaves the buffer, or zeroes it
                _allocate([info], self.device)
                info.buffer.zero_()
    return original(self, next_stage_bwd_outputs, mb_index)


def _backward_one_chunk(
    original: _Function,
    self: Any,
    bwd_chunk_id: int,
    loss: Any = None,
    full_backward: bool = True,
    last_backward: bool = False,
) -> Any:
    arguments = {"loss": loss, "full_backward": full_backward, "last_backward": last_backward}
    if not isinstance(loss, torch.Tensor) or not self.is_last or self.is_first:
        result = original(self, bwd_chunk_id, **arguments)
    else:
        if not full_backward:
            _refuse_spent_loss(self, bwd_chunk_id, loss)
        will_be_spent = loss.requires_grad and not full_backward
        with stage_pass.beside_the_loss(pipelining.take_outputs(self, bwd_chunk_id)):
            result = original(self, bwd_chunk_id, **arguments)
        if will_be_spent:
            _state.spent_losses[id(loss)] = loss
    _describe_buffers(self, self.grad_recv_info.get(bwd_chunk_id, ()))
    _state.outputs.get(self, {}).pop(bwd_chunk_id, None)
    _keep_groups_alone(self, bwd_chunk_id)
    return result


def _refuse_spent_loss(stage: Any, microbatch: int, loss: torch.Tensor) -> None:
    """A schedule keeps the losses of a step that failed, and gives them to the next one; I has detached them, and would
    pass over them: all gradients 0. Raises RuntimeError."""
    if not loss.requires_grad and _state.spent_losses.get(id(loss)) is loss:
        raise RuntimeError(
            f"the loss of stage {stage.stage_index}, microbatch {microbatch}, has had its backward: make a new "
            "schedule after a step that failed, whose losses this one keeps."
        )


def _get_bwd_send_ops(original: _Function, self: Any, bwd_chunk_id: int) -> Any:
    return _marked(original(self, bwd_chunk_id), self, None)


def _scale_grads(original: _Function, self: Any, grad_scale_factor: int) -> Any:
    result = original(self, grad_scale_factor)
    if grad_scale_factor != 1 and get_policy().main_grad:
        # A buffer may be several weights', and a weight's .grad, which torch has divided.
        divided = {id(weight.grad) for weight in self.submod.parameters()}
        for weight in self.submod.parameters():
            main_grad = getattr(weight, "main_grad", None)
            if main_grad is not None and id(main_grad) not in divided:
                divided.add(id(main_grad))
                main_grad.div_(grad_scale_factor)
    return result


def _clear_runtime_states(original: _Function, self: Any) -> Any:
    _state.outputs.pop(self, None)  # of a step that failed, as are sends that are left
    _disown(self)
    return original(self)


class _Outputs(list[Any]):
    """A stage's outputs on their way to the next one. A list, because frames of the schedule hold it: it is emptied."""


def _edge(value: Any, has_backward: bool) -> Any:
    """What backward needs of an output.

    A leaf (an input that is handed on, a weight) is held elsewhere anyhow. Other types than plain tensors take their
    gradients in ways of their own.
    """
    if type(value) is not torch.Tensor:
        return value
    if not has_backward or not value.requires_grad:
        return None
    return value if value.is_leaf else get_gradient_edge(value)


def _keep_groups_alone(stage: Any, microbatch: int) -> None:
    """After I: what W does not read goes. Stage 0 has no groups then, its W reads everything."""
    entry = stage.backward_state.get(microbatch)
    if entry is None or entry[1] is None:
        return
    input_values, param_groups = entry[:2]
    received = sum(_is_received(info) for info in stage.args_recv_info.get(microbatch, ()))
    for value in input_values[:received]:  # keyword arguments follow, and are the user's
        if isinstance(value, torch.Tensor):
            value.grad = None
    # The outputs are for DDP, which looks for tensors in them; after I they have no history and tell it nothing.
    stage.backward_state[microbatch] = ((), param_groups, (), None)


# Receive buffers. A description is a tensor on the meta device: it has the buffer's layout and no memory, and torch's
# code, which tells a missing gradient by None, goes on working.


def _is_received(info: Any) -> bool:
    return not getattr(info, "is_root_arg", not hasattr(info, "buffer"))


def _describe_buffers(stage: Any, recv_infos: Iterable[Any]) -> None:
    if not _state.places:  # unpatched meanwhile, from within the step
        return
    for info in recv_infos:
        buffer = getattr(info, "buffer", None)
        if type(buffer) is torch.Tensor and not buffer.is_meta:
            info.buffer = _description(buffer)
            _state.stages.add(stage)


def _description(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
    )


def _allocate(recv_infos: Iterable[Any], device: Any) -> None:
    for info in recv_infos:
        buffer = getattr(info, "buffer", None)
        if type(buffer) is torch.Tensor and buffer.is_meta:
            # Not empty_strided: a gradient handed over on the same rank may be expanded, and nothing can be written so.
            info.buffer = torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)


def _allocate_when_asked(recv_infos: Iterable[Any], device: Any) -> None:
    """Where torch looks for a buffer and nobody of zbpipe's is there to make it: not before it looks."""
    for info in recv_infos:
        buffer = getattr(info, "buffer", None)
        if type(buffer) is torch.Tensor and buffer.is_meta:
            info.zbpipe_device = device
            info.__class__ = _with_late_buffer(type(info))  # type: ignore[arg-type]


@functools.cache
def _with_late_buffer(kind: type) -> type:
    """A class of what has a description in the place of its buffer, until somebody asks for that, or gives one."""

    def become_plain(self: Any) -> Any:
        self.__class__ = kind
        return vars(self).pop("zbpipe_device")

    def get(self: Any) -> torch.Tensor:
        _allocate([self], become_plain(self))
        buffer: torch.Tensor = self.buffer
        return buffer

    def give(self: Any, buffer: Any) -> None:
        become_plain(self)
        self.buffer = buffer

    return type(kind.__name__, (kind,), {"buffer": property(get, give)})


# Sends and receives.


class _Parcel(NamedTuple):
    """Whose tensor an operation carries. ``microbatch`` is None unless it is an output that is sent (then ``outputs``
    are what holds it, if it is to be released), or the gradient that comes back for it."""

    stage: Any
    microbatch: int | None
    outputs: _Outputs | None


def _marked(ops: Any, stage: Any, microbatch: int | None, outputs: _Outputs | None = None) -> Any:
    for op in ops:
        op.zbpipe_parcel = _Parcel(stage, microbatch, outputs)
    return ops


def _batch_p2p(original: _Function, p2p_ops: list[Any], desc: str | None = None) -> Any:
    _poll()
    works = original(p2p_ops, desc)
    if not works or isinstance(works[0], _Transfer) or not all(hasattr(op, "zbpipe_parcel") for op in p2p_ops):
        return works  # nothing to wait for, or operations of somebody else's
    if len(works) == len(p2p_ops):
        batches = [[op] for op in p2p_ops]
    elif len(works) == 1:  # the backend made one of them
        batches = [p2p_ops]
    else:
        return works
    all_sent = all(_is_send(op) for op in p2p_ops)
    transfers: list[_Transfer] = []
    for work, ops in zip(works, batches, strict=True):
        if not all(_is_send(op) for op in ops):
            transfers.append(_Receive(work, ops))
            continue
        send = _Send(work, ops)
        transfers.append(send)
        if all_sent:  # else the schedule waits at once
            with _state.lock:
                _state.sends.add(send)
            if _tells_only_who_waits(ops[0]):
                send.watched = True
                _watch((id(ops[0].group), ops[0].peer), send)
    for op in p2p_ops:
        if op.zbpipe_parcel.outputs is not None:
            op.zbpipe_parcel.outputs.clear()  # the operations hold them now
        del op.zbpipe_parcel
    return transfers


def _is_send(op: Any) -> bool:
    return op.op is dist.isend


def _tells_only_who_waits(op: Any) -> bool:
    return pipelining.backend_name(op.group, op.tensor.device) == "gloo"


_Work: Any = getattr(dist, "Work", object)  # a torch without torch.distributed can import this, and do nothing with it


class _Transfer(_Work):  # type: ignore[misc]
    """Stands for a work: what it is asked, beside ``wait``, it asks the work; see ``_asked`` below."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work

    def __getattr__(self, name: str) -> Any:
        """What works of this backend have and others have not."""
        if name == "work" or self.work is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return getattr(self.work, name)

    def _answer_afterwards(self, question: str) -> Any:
        raise NotImplementedError


class _Receive(_Transfer):
    """The work of a receive, or of sends and receives that the backend made one of. The operations keep what came."""

    def __init__(self, work: Any, ops: Sequence[Any]) -> None:
        super().__init__(work)
        self.sent = [op for op in ops if _is_send(op)]
        self.gradients_of = {
            (op.zbpipe_parcel.stage, op.zbpipe_parcel.microbatch)
            for op in ops
            if not _is_send(op) and op.zbpipe_parcel.microbatch is not None
        }

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As the work's; then lets go of sends, those of the outputs whose gradients have come among them."""
        result = bool(_wait(self.work, timeout))
        sent, self.sent = self.sent, []
        _describe_sent(sent)
        gradients_of, self.gradients_of = self.gradients_of, set()
        for send in _sends() if gradients_of else ():
            if not gradients_of.isdisjoint(send.outputs_of):
                send.wait()
        _poll()
        return result


class _Send(_Transfer):
    """The work of a send; holds the tensor until it is done and no longer."""

    def __init__(self, work: Any, ops: Sequence[Any]) -> None:
        super().__init__(work)
        self.ops = list(ops)
        parcels = [op.zbpipe_parcel for op in ops]
        self.outputs_of = {(parcel.stage, parcel.microbatch) for parcel in parcels if parcel.microbatch is not None}
        self.lock = threading.Lock()
        self.claimed = False
        self.done = threading.Event()
        self.result_of_wait = True
        self.error: Exception | None = None
        self.watched = False
        self.is_polled = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the work is done; raises what it raised, whoever waited for it."""
        self.finish(timeout)
        if not self.done.wait(timeout.total_seconds() if timeout else None):
            with contextlib.suppress(AttributeError):  # done meanwhile, and gone
                self.work.wait(timedelta(milliseconds=1))  # the timeout is the work's to raise
            self.done.wait()
        self._let_go()
        if self.error is not None:
            raise self.error
        return self.result_of_wait

    def poll(self) -> None:
        """Let go if the work is done."""
        if not self.watched and not self.done.is_set() and self.is_completed():
            self.finish()
        if self.done.is_set():
            self._let_go()

    def finish(self, timeout: timedelta | None = None) -> None:
        """Wait, unless somebody else does so or has done so."""
        with self.lock:
            claimed, self.claimed = self.claimed, True
        if claimed:
            return
        try:
            # No local name for the work: who hears that it is done may free it.
            self.result_of_wait = bool(_wait(self.work, timeout))
        except Exception as error:
            self.error = error
        finally:
            self.done.set()
        if not self.is_polled:
            self._let_go()

    def disown(self, stage: Any, microbatch: int | None) -> None:
        """No gradient is going to tell of this send: it is of a step that failed. Without a microbatch, of any."""
        self.outputs_of = {
            of for of in self.outputs_of if of[0] is not stage or (microbatch is not None and of[1] != microbatch)
        }

    def leave(self) -> None:
        """Nobody polls any more: whoever waits for the work lets go."""
        self.outputs_of = set()
        self.is_polled = False
        if self.done.is_set():
            self._let_go()

    def _let_go(self) -> None:
        with self.lock:
            ops, self.ops, self.work = self.ops, [], None
        _describe_sent(ops)
        with _state.lock:
            _state.sends.discard(self)

    def _answer_afterwards(self, question: str) -> Any:
        """As a work that is done answers, which has nothing more to show."""
        if question == "is_completed":
            return True
        if question == "is_success":
            return self.error is None
        if question == "exception":
            return self.error
        if question == "result":
            return []
        if question == "get_future":
            future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            if self.error is None:
                future.set_result([])
            else:
                future.set_exception(self.error)  # type: ignore[arg-type]
            return future
        if question in ("synchronize", "block_current_stream"):
            return None
        raise RuntimeError(f"this send is done, and its work gone: ask for its {question} before it is waited for.")


def _wait(work: Any, timeout: timedelta | None) -> Any:
    return work.wait(timeout) if timeout else work.wait()  # to most works a timeout of 0 is none


def _describe_sent(ops: Iterable[Any]) -> None:
    for op in ops:
        op.tensor = _description(op.tensor)  # the schedule's frame may hold the operation until the step ends


def _asked(question: str) -> _Function:
    def ask(self: _Transfer, *args: Any, **kwargs: Any) -> Any:
        work = self.work
        return self._answer_afterwards(question) if work is None else getattr(work, question)(*args, **kwargs)

    ask.__name__ = question
    return ask


for _question in dir(_Work):
    if not _question.startswith(("__", "_pybind11")) and _question not in ("wait", "unbox"):
        setattr(_Transfer, _question, _asked(_question))


def _poll() -> None:
    """Let go of sends that are done."""
    sends = _sends()
    if sends and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return  # to ask would break the capture
    for send in sends:
        send.poll()


def _sends() -> list[_Send]:
    with _state.lock:
        return list(_state.sends)


def _disown(stage: Any, microbatch: int | None = None) -> None:
    for send in _sends():
        send.disown(stage, microbatch)


_Line = tuple[int, int]  # group (its id) and peer

_queues: dict[_Line, deque[_Send]] = {}
_waiting: dict[_Line, tuple[threading.Thread, _Send]] = {}
_queues_lock = threading.Lock()


def _watch(line: _Line, send: _Send) -> None:
    """Have a thread wait for ``send``. One thread per group and peer, because its sends are done in order."""
    with _queues_lock:
        queue = _queues.get(line)
        if queue is not None:
            queue.append(send)
            return
        _queues[line] = deque([send])
    threading.Thread(target=_finish_queue, args=(line,), name=f"zbpipe-send-{line[1]}", daemon=True).start()


def _finish_queue(line: _Line) -> None:
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


_state = _State()

_WRAPPERS: dict[str, _Function] = {
    **dict.fromkeys(pipelining.PREPARE, _prepare),
    "forward_one_chunk": _forward_one_chunk,
    "backward_one_chunk": _backward_one_chunk,
    "get_fwd_recv_ops": _get_fwd_recv_ops,
    "get_bwd_recv_ops": _get_bwd_recv_ops,
    "get_fwd_send_ops": _get_fwd_send_ops,
    "get_bwd_send_ops": _get_bwd_send_ops,
    "set_local_fwd_input": _set_local_fwd_input,
    "set_local_bwd_input": _set_local_bwd_input,
    "scale_grads": _scale_grads,
    "clear_runtime_states": _clear_runtime_states,
    pipelining.BATCH_P2P: _batch_p2p,
}
