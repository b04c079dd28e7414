"""Wrappers of the methods by which a schedule drives a stage, in the order in which a microbatch meets them.

torch's schedule holds more than the groups do between I and W. The wrappers free it: receive buffers (buffers.py) and
what has been sent (sends.py, outputs.py). The backward between them is in ../backward.py. torch's method is each
wrapper's first argument.
"""

from collections.abc import Callable
from typing import Any

from zbpipe._stage import state
from zbpipe._stage.before_2_15 import buffers, outputs, sends
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
    # From now on the microbatch's entry in fwd_cache holds the inputs.
    buffers.describe(self, self.args_recv_info.get(fwd_chunk_id, ()))
    if not state.release_outputs or self.is_last or isinstance(output, outputs.Outputs):
        return output
    if is_ddp(self.submod):  # DDP looks for unused weights behind the outputs
        return output
    return outputs.released(self, fwd_chunk_id)


def get_fwd_send_ops(original: _Function, self: Any, fwd_chunk_id: int) -> Any:
    with outputs.in_place(self, fwd_chunk_id) as sent:
        return sends.marked(original(self, fwd_chunk_id), self, fwd_chunk_id, sent)


def get_bwd_recv_ops(original: _Function, self: Any, bwd_chunk_id: int) -> Any:
    buffers.allocate(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
    return sends.marked(original(self, bwd_chunk_id), self, bwd_chunk_id)


def set_local_bwd_input(original: _Function, self: Any, next_stage_bwd_outputs: Any, mb_index: int) -> Any:
    if isinstance(next_stage_bwd_outputs, tuple):
        for info, grad in zip(self.grad_recv_info.get(mb_index, ()), next_stage_bwd_outputs, strict=False):
            if grad is None and getattr(info, "buffer", None) is not None:  # torch keeps the buffer, or zeroes it
                buffers.allocate([info], self.device)
                info.buffer.zero_()
    return original(self, next_stage_bwd_outputs, mb_index)


def get_bwd_send_ops(original: _Function, self: Any, bwd_chunk_id: int) -> Any:
    return sends.marked(original(self, bwd_chunk_id), self, None)


def clear_runtime_states(original: _Function, self: Any) -> Any:
    outputs.forget(self)  # what is left here, or in flight, is of a step that failed
    sends.disown(self)
    return original(self)


def restore() -> None:
    """Leaves stages and schedules as torch's methods expect them; these wrappers are called no more."""
    buffers.give_back()
    outputs.forget_all()
    sends.leave()
