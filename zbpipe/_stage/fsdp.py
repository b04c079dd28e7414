"""fully_shard around I and W, in patched schedules and in loops of one's own.

When I or W runs, fully_shard may have put the shards in the weights' place, and may have freed the weights that W
reads. Its hooks at the end of a backward run in I, when there are no gradients yet. So each W ends as a backward ends:
what it has added is reduced, if the module's flags say so, or goes to fully_shard's buffers of the reduce dtype.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from zbpipe._C import ParamGroup
from zbpipe._formatting import described
from zbpipe._stage import handover, scale
from zbpipe._torch import fsdp


@contextlib.contextmanager
def around(module: Any, backward_type: str, param_groups: Iterable[Any]) -> Iterator[None]:
    """A context for I or W of a stage under fully_shard. Other stages' weights, which W may serve, are left to them."""
    own = [fsdp.states_in(module)] if backward_type == "weight" else []
    with handover.with_weights(fsdp.gathered(module)), _around_weight_pass(own, param_groups):
        yield


def around_own(param_groups: Iterable[ParamGroup]) -> contextlib.AbstractContextManager[None]:
    """A context for W in a loop of one's own. Raises RuntimeError."""
    states = fsdp.states_of(weight for group in param_groups for weight in served_by(group))
    if not states:
        return contextlib.nullcontext()
    named = ((described(weight), weight) for group in param_groups for weight in served_by(group))
    scale.refuse_reducer(named, "these groups", "fully_shard")
    return _around_weight_pass(states, param_groups)


def served_by(group: ParamGroup) -> tuple[torch.Tensor, ...]:
    """The group's weights; none of one whose W is running, which _C refuses."""
    try:
        return group.weights
    except RuntimeError:
        return ()


@contextlib.contextmanager
def _around_weight_pass(modules: list[list[Any]], param_groups: Iterable[Any]) -> Iterator[None]:
    """``modules``: the states of each. Weights that were gathered before are gathered again, if W's nodes read them."""
    reads_weights = bool(modules) and any(getattr(group, "_reads_weights", False) for group in param_groups)
    freed = [group for states in modules if reads_weights for group in fsdp.freed_groups(states)]
    try:
        for group in freed:
            group.unshard()
            group.wait_for_unshard()
        yield
    finally:
        for group in freed:
            group.reshard()
    for states in modules:
        fsdp.end_backward(states)


def refuse_shards(weights: Sequence[torch.Tensor]) -> None:
    """Raises ValueError for a weight that is a shard: it is in no graph, so I and W would lose its gradient."""
    shards = fsdp.shards()
    for i in [i for i, weight in enumerate(weights) if id(weight) in shards]:
        raise ValueError(
            f"weights[{i}] of {list(weights[i].shape)} is a shard of fully_shard's, which is in no graph; pass "
            "weights=None to both passes, for all leaves of the graph"
        )
