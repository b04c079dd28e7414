"""The methods by which a schedule drives a stage, in the order in which a microbatch meets them: what is done around
torch's own, so that nothing is held for longer than anything needs it.

zbpipe's groups hold little between I and W; torch's schedule holds much beside them. Here the methods let go of it: of
receive buffers (buffers.py) and of what has been sent (sends.py, outputs.py). The backward between them is
../backward.py. Each gets torch's method first.
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
