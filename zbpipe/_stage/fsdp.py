"""fully_shard around I and W.

When I or W runs, fully_shard may have put the shards in the weights' place, and may have freed the weights that W
reads. After each W the gradients must go to its buffers of the reduce dtype, since its own hooks ran in I. Nothing is
reduced here: torch's schedule reduces after the last W.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from zbpipe._stage import handover
from zbpipe._torch import fsdp


@contextlib.contextmanager
def around(module: Any, backward_type: str, param_groups: Any) -> Iterator[None]:
    """A context for I or W of a stage under fully_shard."""
    reads_weights = backward_type == "weight" and any(group._reads_weights for group in param_groups)
    with (
        _gathered(module) if reads_weights else contextlib.nullcontext(),
        handover.with_weights(fsdp.gathered(module)),
    ):
        yield
    if backward_type == "weight":
        fsdp.accumulate(module)


@contextlib.contextmanager
def _gathered(module: Any) -> Iterator[None]:
    """A context in which all weights are gathered that were gathered before: nodes that W runs read them."""
    groups = [group for group in fsdp.groups(module) if fsdp.has_gathered(group) and not group.is_unsharded]
    for group in groups:
        group.unshard()
        group.wait_for_unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()
