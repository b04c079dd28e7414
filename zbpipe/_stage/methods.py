"""The methods by which a schedule drives a stage, in the order in which a microbatch meets them: what is done around
torch's own, so that nothing is held for longer than anything needs it.

zbpipe's groups hold little between I and W; torch's schedule (up to 2.14) holds much beside them. Here the methods let
go of it: of receive buffers (buffers.py), of what has been sent (sends.py, outputs.py), and, in every torch, of what a
stage keeps after I beside the groups. torch 2.15 does the others itself; of these methods only ``backward_one_chunk``
is wrapped there. Which are is said in zbpipe/_patch/table.py.

Each gets torch's method first.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from zbpipe._stage import buffers, handover, losses, outputs, sends, state
from zbpipe._torch.ddp import is_ddp

_Function = Callable[..., Any]


def prepare(original: _Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    buffers.describe(self, buffers.of(self))
    return result


def get_fwd_recv_ops(original: _Function, self: Any, fwd_chunk_id: int) -> Any:
    buffers.allocate(self.args_recv_info[fwd_chunk_id], self.device)
    return sends.marked(original(self, fwd_chunk_id), self, None)


def set_local_fwd_input(original: _Function, self: Any, prev_stage_outputs: Any, mb_index: int) -> Any:
    if not isinstance(prev_stage_outputs, outputs.Outputs):
        return original(self, prev_stage_outputs, mb_index)
    result = original(self, tuple(prev_stage_outputs), mb_index)
    prev_stage_outputs.clear()
    return result


def forward_one_chunk(original: _Function, self: Any, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
    sends.poll()
    sends.disown(self, fwd_chunk_id)
    output = original(self, fwd_chunk_id, *args, **kwargs)
    # The inputs are the microbatch's now: fwd_cache holds them.
    buffers.describe(self, self.args_recv_info.get(fwd_chunk_id, ()))
    if not state.release_outputs or self.is_last or isinstance(output, outputs.Outputs):
        return output
    if is_ddp(self.submod):  # its reducer looks for unused weights from the outputs
        return output
    return outputs.released(self, fwd_chunk_id)


def get_fwd_send_ops(original: _Function, self: Any, fwd_chunk_id: int) -> Any:
    sent = outputs.of(self, fwd_chunk_id)
    if sent is None:
        return sends.marked(original(self, fwd_chunk_id), self, fwd_chunk_id)
    with outputs.in_place(self, fwd_chunk_id, sent):
        ops = original(self, fwd_chunk_id)
    return sends.marked(ops, self, fwd_chunk_id, sent)


def get_bwd_recv_ops(original: _Function, self: Any, bwd_chunk_id: int) -> Any:
    buffers.allocate(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
    return sends.marked(original(self, bwd_chunk_id), self, bwd_chunk_id)


def set_local_bwd_input(original: _Function, self: Any, next_stage_bwd_outputs: Any, mb_index: int) -> Any:
    if isinstance(next_stage_bwd_outputs, tuple):
        for info, grad in zip(self.grad_recv_info.get(mb_index, ()), next_stage_bwd_outputs, strict=False):
            if grad is None and getattr(info, "buffer", None) is not None:  # torch leaves the buffer, or zeroes it
                buffers.allocate([info], self.device)
                info.buffer.zero_()
    return original(self, next_stage_bwd_outputs, mb_index)


def backward_one_chunk(
    original: _Function,
    self: Any,
    bwd_chunk_id: int,
    loss: Any = None,
    full_backward: bool = True,
    last_backward: bool = False,
) -> Any:
    backward = original
    if self.is_last and self.has_backward:
        losses.require_tensor(loss, f"for microbatch {bwd_chunk_id} of stage {self.stage_index}")
        if not self.is_first:
            backward = functools.partial(losses.backward, original)
    is_split = not (full_backward or self.is_first or self.dw_builder)
    with handover.StagesPass(_received(self, bwd_chunk_id)) if is_split else contextlib.nullcontext():
        result = backward(self, bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)
    buffers.describe(self, self.grad_recv_info.get(bwd_chunk_id, ()))
    outputs.forget(self, bwd_chunk_id)
    _keep_groups_alone(self, bwd_chunk_id)
    return result


def _received(stage: Any, microbatch: int) -> int:
    """How many of a microbatch's input values the stage has received. Keyword arguments follow, and are the user's."""
    return sum(buffers.is_received(info) for info in stage.args_recv_info.get(microbatch, ()))


def _keep_groups_alone(stage: Any, microbatch: int) -> None:
    """After I: what W does not read goes. Stage 0 has no groups then, its W reads everything."""
    entry = stage.backward_state.get(microbatch)
    if entry is None or entry[1] is None:
        return
    input_values, param_groups = entry[:2]
    for value in input_values[: _received(stage, microbatch)]:
        if isinstance(value, torch.Tensor):
            value.grad = None
    # The outputs are for DDP, which looks for tensors in them; after I they have no history and tell it nothing.
    stage.backward_state[microbatch] = ((), param_groups, (), None)


def get_bwd_send_ops(original: _Function, self: Any, bwd_chunk_id: int) -> Any:
    return sends.marked(original(self, bwd_chunk_id), self, None)


def clear_runtime_states(original: _Function, self: Any) -> Any:
    outputs.forget(self)  # of a step that failed, as are sends that are left
    sends.disown(self)
    return original(self)


def restore() -> None:
    """Leave stages and schedules as torch's methods expect them; nobody calls these here any more."""
    buffers.give_back()
    outputs.forget_all()
    sends.leave()
