"""What is private in fully_shard: the weights that it gathers, and the buffers for sums of their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def is_sharded(module: Any) -> bool:
    """Whether `module` itself is under fully_shard."""
    from torch.distributed.fsdp import FSDPModule  # which takes a second to import

    return isinstance(module, FSDPModule)


def groups(module: Any) -> Iterator[Any]:
    """The parameter groups of a module under fully_shard and of the modules in it. A group has ``is_unsharded``,
    ``unshard()``, ``wait_for_unshard()`` and ``reshard()``."""
    for state in module._get_fsdp_state()._state_ctx.all_states:
        found = getattr(state, "_fsdp_param_groups", None)
        if found is None:  # torch 2.11 has one group at most
            found = [state._fsdp_param_group] if state._fsdp_param_group else []
        yield from found


def has_gathered(group: Any) -> bool:
    """Whether the group's weights have been gathered before; they need not be now."""
    return all(getattr(param, "_unsharded_param", None) is not None for param in group.fsdp_params)


def gathered(module: Any) -> dict[torch.Tensor, torch.Tensor]:
    """The weights in the graph, by the shards that are the module's parameters, of all groups gathered before."""
    params = (param for group in groups(module) if has_gathered(group) for param in group.fsdp_params)
    return {param.sharded_param: param._unsharded_param for param in params}


def accumulate(module: Any) -> None:
    """Adds the gradients of a W to the buffers in which fully_shard sums them until it reduces.

    fully_shard has such buffers where its reduce dtype is not its compute dtype, and adds to them at the end of a
    backward: in I. From torch 2.15 on the weights in the graph sum their gradients in that dtype.
    """
    for group in filter(has_gathered, groups(module)):
        for param in group.fsdp_params:
            unsharded = param._unsharded_param
            if unsharded.grad is None or not hasattr(param, "to_accumulated_grad_if_needed"):
                continue
            if param.unsharded_accumulated_grad is None:
                param.to_accumulated_grad_if_needed()
            else:
                param.unsharded_accumulated_grad += unsharded.grad
                unsharded.grad = None
