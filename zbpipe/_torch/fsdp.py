"""What is private in fully_shard: the weights that it gathers, and the end of a backward."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_STATES = "torch.distributed._composable_state"


def is_sharded(module: Any) -> bool:
    """Whether `module` itself is under fully_shard."""
    from torch.distributed.fsdp import FSDPModule  # which takes a second to import

    return isinstance(module, FSDPModule)


def freed_groups(states: Iterable[Any]) -> list[Any]:
    """The groups of parameters whose weights have been gathered before, and are not there now. A group has
    ``unshard()``, ``wait_for_unshard()`` and ``reshard()``."""
    found = [group for state in states for group in _groups(state) if not group.is_unsharded]
    return [group for group in found if all(hasattr(param, "_unsharded_param") for param in group.fsdp_params)]


def states_in(module: Any) -> list[Any]:
    """The states of a module under fully_shard and of the modules in it, the outermost first."""
    return list(module._get_fsdp_state()._state_ctx.all_states)


def gathered(module: Any = None) -> dict[torch.Tensor, torch.Tensor]:
    """The weights in the graph, by the shards that are the module's parameters, of all that were gathered before. None:
    of all modules of the process."""
    params = [param for param, _ in _params(_all_states() if module is None else states_in(module))]
    return {param.sharded_param: param._unsharded_param for param in params if hasattr(param, "_unsharded_param")}


def shards() -> set[int]:
    """The ids of all shards of fully_shard's in the process."""
    return {id(param.sharded_param) for param, _ in _params(_all_states())}


def states_of(weights: Iterable[torch.Tensor]) -> list[list[Any]]:
    """The same, of each module whose gathered weights are among these."""
    params = [(param, state) for param, state in _params(_all_states()) if hasattr(param, "_unsharded_param")]
    if not params:
        return []
    states = {id(param._unsharded_param): state._state_ctx.all_states for param, state in params}
    return list({id(states[weight]): states[weight] for weight in map(id, weights) if weight in states}.values())


def end_backward(states: list[Any]) -> None:
    """Does what fully_shard does at the end of a backward: it reduces gradients, if its modules' flags say so. Within
    another backward it does so when that ends."""
    for root in states[:1]:  # none of a module that has never run
        end = functools.partial(_end, root)
        if torch._C._current_graph_task_id() == -1:
            end()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(end)


def _end(root: Any) -> None:
    context = root._state_ctx
    if getattr(context, "manual_backward_finalization_active", False) is None:  # torch 2.15, since the end before
        context.manual_backward_finalization_active = context.manual_backward_finalization
    root._root_post_backward_final_callback()


def _all_states() -> list[Any]:
    """The states of all modules of the process that are under fully_shard."""
    if (module := sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")) is None:
        return []
    found = [ref() for ref in list(sys.modules[_STATES]._module_state_mapping.values())]
    return [state for state in found if isinstance(state, module.FSDPState)]


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11 has one group at most


def _params(states: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    return ((param, state) for state in states for group in _groups(state) for param in group.fsdp_params)
