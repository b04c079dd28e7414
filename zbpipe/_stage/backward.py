"""A stage's backward, in every torch: the facts that I needs, and what the stage keeps after I beside the groups."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from zbpipe._stage import handover, losses
from zbpipe._stage.before_2_15 import buffers, outputs


def backward_one_chunk(
    original: Callable[..., Any],
    self: Any,
    bwd_chunk_id: int,
    loss: Any = None,
    full_backward: bool = True,
    last_backward: bool = False,
) -> Any:
    begins = self.is_last and self.has_backward
    if begins:
        losses.require_tensor(loss, f"for microbatch {bwd_chunk_id} of stage {self.stage_index}")
    is_split = not (full_backward or self.is_first or self.dw_builder)
    with (
        handover.StagesPass(_received(self, bwd_chunk_id)) if is_split else contextlib.nullcontext(),
        losses.beginning(self, bwd_chunk_id, loss, full_backward)
        if begins and not self.is_first
        else contextlib.nullcontext(),
    ):
        result = original(self, bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)
    buffers.describe(self, self.grad_recv_info.get(bwd_chunk_id, ()))
    outputs.forget(self, bwd_chunk_id)
    _keep_groups_alone(self, bwd_chunk_id)
    return result


def _received(stage: Any, microbatch: int) -> int:
    """How many of a microbatch's input values the stage has received. The user's keyword arguments follow them."""
    infos = stage.args_recv_info.get(microbatch, ())
    return sum(not getattr(info, "is_root_arg", not hasattr(info, "buffer")) for info in infos)


def _keep_groups_alone(stage: Any, microbatch: int) -> None:
    """After I, drops what W does not read. Stage 0 has no groups: its W is a whole backward, and reads all."""
    entry = stage.backward_state.get(microbatch)
    if entry is None or entry[1] is None:
        return
    input_values, param_groups = entry[:2]
    for value in input_values[: _received(stage, microbatch)]:
        if isinstance(value, torch.Tensor):
            value.grad = None
    # DDP would look for weights behind the outputs, which have no history after I.
    stage.backward_state[microbatch] = ((), param_groups, (), None)
