"""What is private in ``torch.distributed.pipelining``: its modules' names, its stages' methods and state."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

PIPELINING = "torch.distributed.pipelining"
BACKWARD = f"{PIPELINING}._backward"
IMPORTERS = (f"{PIPELINING}.stage", f"{PIPELINING}._IR")
PASSES = (
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
    "_get_grad_fn_or_grad_acc",
    "construct_reverse_graph",
    "reverse_closure",
    "get_param_groups",
    "_autograd_grad_for_inputs",
    "_null_coalesce_accumulate",
)

# Methods and functions that are wrapped.
BATCH_P2P = "_batch_p2p"
WAIT_P2P = "_wait_batch_p2p"
STEP = "_step_microbatches"
COMPILE_CHECK = "_check_torch_compile_compatibility"
COMPUTE_OUTPUTS = "_compute_outputs"
PREPARE = ("_prepare_forward_infra", "_prepare_backward_infra")


def stage_module() -> ModuleType:
    return importlib.import_module(f"{PIPELINING}.stage")


def schedules_module() -> ModuleType:
    return importlib.import_module(f"{PIPELINING}.schedules")


def stage_base() -> Any:
    """The class that all stages are of; None where this torch has none of that name."""
    return getattr(stage_module(), "_PipelineStageBase", None)


def stage_classes() -> list[Any]:
    """That class and those of it that torch makes stages of."""
    module = stage_module()
    owners = (stage_base(), getattr(module, "PipelineStage", None), getattr(module, "_PipelineStage", None))
    return [owner for owner in owners if owner is not None]


def releases_by_itself() -> bool:
    """Whether torch frees receive buffers, sends and sent outputs, as it does from 2.15 on."""
    return hasattr(stage_base(), "release_fwd_send_outputs")


def take_outputs(stage: Any, microbatch: int) -> tuple[Any, ...]:
    """What a last stage's forward returned, for which its state has nothing afterwards."""
    if hasattr(stage, "fwd_cache"):
        outputs, *rest = stage.fwd_cache[microbatch]
        stage.fwd_cache[microbatch] = ((), *rest)
        return tuple(outputs)
    state = stage._forward_chunk_states[microbatch]
    outputs = tuple(state.live_outputs)
    state.live_outputs, state.output_grad_edges = [], ()
    return outputs


def backend_name(group: Any, device: Any) -> str:
    """The name of what a process group sends tensors of a device with; "" if it does not tell."""
    try:
        return str(group._get_backend(device).name())
    except (AttributeError, RuntimeError):
        return ""


def timeout_of(group: Any, device: Any) -> timedelta | None:
    """For how long a process group waits for a tensor on a device; None if it does not tell."""
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def stages_of(schedule: Any) -> list[Any] | None:
    """A schedule's stages on this rank; None of what is no schedule."""
    if hasattr(schedule, "_stages"):
        return list(schedule._stages)
    return [schedule._stage] if hasattr(schedule, "_stage") else None


def runtime_class() -> Any:
    """The class of schedules that run an order of actions; None where this torch has none of that name."""
    return getattr(schedules_module(), "_PipelineScheduleRuntime", None)


def _actions_of(schedule: Any) -> Iterator[Any]:
    """What the schedule does on this rank, in order, the parts of an overlapped action one after the other."""
    for action in schedule.pipeline_order_with_comms[schedule.rank]:
        if action is not None:
            yield from getattr(action, "sub_actions", None) or (action,)


def additions_of(schedule: Any) -> dict[int, list[tuple[int, bool]]]:
    """By stage: the microbatches in the order in which they add to its weights, and whether in a weight pass."""
    kinds = schedules_module()
    found: dict[int, list[tuple[int, bool]]] = {}
    for action in _actions_of(schedule):
        if action.computation_type in (kinds.FULL_BACKWARD, kinds.BACKWARD_WEIGHT):
            is_weight_pass = action.computation_type == kinds.BACKWARD_WEIGHT
            found.setdefault(action.stage_index, []).append((action.microbatch_index, is_weight_pass))
    return found


def messages_of(schedule: Any) -> list[str | None]:
    """The messages that the schedule waits for, in order, each by the action that needs it: "2F3" needs stage 2's input
    of microbatch 3. None for a send among them (torch 2.15); those behind the last action are not told."""
    kinds = schedules_module()
    sends = [getattr(kinds, name, None) for name in ("WAIT_SEND_F", "WAIT_SEND_B")]
    stages = {stage.stage_index: stage for stage in schedule._stages}
    found: list[str | None] = []
    for action in _actions_of(schedule):
        if action.computation_type == kinds.FORWARD:
            comes, beside = not stages[action.stage_index].is_first, -1
        elif action.computation_type in (kinds.FULL_BACKWARD, kinds.BACKWARD_INPUT):
            comes, beside = not stages[action.stage_index].is_last, 1
        else:
            if action.computation_type in sends:
                found.append(None)
            continue
        if comes and action.stage_index + beside not in stages:
            found.append(str(action))
    return found


def has_backward(schedule: Any) -> bool:
    """Whether the schedule's step that runs or has run trains; eval() calls step() too."""
    return bool(getattr(schedule, "_has_backward", True))


def work_type() -> Any:
    """The class of the works of collectives; None where nothing has imported torch.distributed."""
    return getattr(sys.modules.get("torch._C._distributed_c10d"), "Work", None)
