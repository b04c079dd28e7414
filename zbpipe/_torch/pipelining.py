"""What is private in ``torch.distributed.pipelining``: its modules' names, its stages' methods and state."""

from __future__ import annotations

import importlib
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

PIPELINING = "torch.distributed.pipelining"
BACKWARD = f"{PIPELINING}._backward"
STAGE = f"{PIPELINING}.stage"
SCHEDULES = f"{PIPELINING}.schedules"
IMPORTERS = (STAGE, f"{PIPELINING}._IR")
GRADS_FOR_INPUTS = "_autograd_grad_for_inputs"
REPLACED = ("stage_backward", "stage_backward_input", "stage_backward_weight", GRADS_FOR_INPUTS)  # what stages call

# Methods and functions that are wrapped.
BATCH_P2P = "_batch_p2p"
COMPILE_CHECK = "_check_torch_compile_compatibility"
COMPUTE_OUTPUTS = "_compute_outputs"
PREPARE = ("_prepare_forward_infra", "_prepare_backward_infra")


def stage_module() -> ModuleType:
    return importlib.import_module(STAGE)


def schedules_module() -> ModuleType:
    return importlib.import_module(SCHEDULES)


def stage_base() -> Any:
    """The base class of all stages; None where this torch has no class of that name."""
    return getattr(stage_module(), "_PipelineStageBase", None)


def stage_classes() -> list[Any]:
    """The base class, and the classes of which torch makes stages."""
    module = stage_module()
    owners = (stage_base(), getattr(module, "PipelineStage", None), getattr(module, "_PipelineStage", None))
    return [owner for owner in owners if owner is not None]


def releases_by_itself() -> bool:
    """Whether torch frees receive buffers, sends and sent outputs, as it does from 2.15 on."""
    return hasattr(stage_base(), "release_fwd_send_outputs")


def take_outputs(stage: Any, microbatch: int) -> tuple[Any, ...]:
    """Takes a last stage's outputs out of its state."""
    if hasattr(stage, "fwd_cache"):
        outputs, *rest = stage.fwd_cache[microbatch]
        stage.fwd_cache[microbatch] = ((), *rest)
        return tuple(outputs)
    state = stage._forward_chunk_states[microbatch]
    outputs = tuple(state.live_outputs)
    state.live_outputs, state.output_grad_edges = [], ()
    return outputs


def backend_of(group: Any, device: Any) -> tuple[str, timedelta | None]:
    """The name and the timeout of a process group's backend for a device; "" and None if the group does not tell."""
    try:
        backend = group._get_backend(device)
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        return str(backend.name()), timeout if isinstance(timeout, timedelta) else None
    except (AttributeError, RuntimeError):
        return "", None


def stages_of(schedule: Any) -> list[Any] | None:
    """A schedule's stages on this rank; None for other objects."""
    if hasattr(schedule, "_stages"):
        return list(schedule._stages)
    return [schedule._stage] if hasattr(schedule, "_stage") else None


def has_backward(schedule: Any) -> bool:
    """Whether the schedule's current or last step trains; eval() calls step(), too."""
    return bool(getattr(schedule, "_has_backward", True))


def work_type() -> Any:
    """The class of collectives' works; None before an import of torch.distributed."""
    return getattr(sys.modules.get("torch._C._distributed_c10d"), "Work", None)
