"""A stage's backward, in every torch: the facts that I needs, and what the stage keeps after I beside the groups."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zbpipe._stage import handover, idle, losses
from zbpipe._stage.before_2_15 import buffers, outputs
from zbpipe._torch.autograd import takes_gradient


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
        handover.stages_pass(_received(self, bwd_chunk_id)),
        losses.beginning(self, bwd_chunk_id, loss, full_backward)
        if begins and not self.is_first
        else contextlib.nullcontext(),
        idle.looking_at_first(self, bwd_chunk_id) if is_split else contextlib.nullcontext(),
    ):
        result = original(self, bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)
    buffers.describe(self, self.grad_recv_info.get(bwd_chunk_id, ()))
    outputs.forget(self, bwd_chunk_id)
    _keep_groups_alone(self, bwd_chunk_id)
    return result


def refuse_lost_gradients(stage: Any, outputs: Any, grads: Any, inputs: Iterable[Any]) -> None:
    """Raises ValueError for a stage's outputs that have no history, though it learns as do those before it. Likewise
    for outputs that require a gradient, if torch has none for any of them. Not for the last stage: a loss may be
    constant, or computed otherwise."""
    if stage.is_last:
        return
    given = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    lost = [output for output in given if takes_gradient(output)]
    if given and not lost and _learns(stage, inputs):
        raise _without_history(f"the outputs of stage {stage.stage_index}")
    if lost and grads and all(grad is None for grad in grads):
        raise ValueError(
            f"output_grads holds no gradient for any of the {len(lost)} outputs of stage {stage.stage_index} that "
            "require one. torch's stages learn in their first step which outputs take a gradient; after parameters "
            "were frozen or thawed make new stages and a new schedule"
        )


def _learns(stage: Any, inputs: Iterable[Any]) -> bool:
    trained = [parameter.requires_grad for parameter in stage.submod.parameters()]
    return any(map(takes_gradient, inputs)) and (any(trained) or not trained)


def refuse_without_history(
    outputs: Iterable[Any], grads: Iterable[Any] | None, inputs: Iterable[Any], weights: Iterable[Any] | None
) -> None:
    """Raises ValueError for outputs of which none has a history, where gradients came and a leaf requires one. A loss,
    for which none comes, may be constant."""
    if grads is None or any(map(takes_gradient, outputs)) or not any(isinstance(g, torch.Tensor) for g in grads):
        return
    if not all(isinstance(output, (torch.Tensor, type(None))) for output in outputs):
        return  # refused by C
    if any(map(takes_gradient, inputs)) or any(map(takes_gradient, weights or ())):
        raise _without_history("stage_outputs_or_loss")


def _without_history(what: str) -> ValueError:
    return ValueError(
        f"{what}: none has a history, so that no gradient would reach the stage's inputs and weights, nor the stages "
        "before it. Run the forward with gradients enabled, and hand on no detached tensors. If neither this stage nor "
        "one before it is to learn, call requires_grad_(False) on their modules"
    )


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
