"""fully_shard around I and W.

fully_shard may have the shards in the weights' place when I or W is asked for them, and have freed the weights that W
reads; and after each W the gradients have to go to its buffers of the reduce dtype, for its own hooks fired in I.
Nothing is reduced here: torch's schedule does it after the last W.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from zbpipe._stage import handover
from zbpipe._torch import fsdp


@contextlib.contextmanager
def around(module: Any, backward_type: str, param_groups: Any) -> Iterator[None]:
    """I or W of a stage under fully_shard runs within it."""
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
    """Within it the weights are there that were gathered before, for what W runs again and reads them."""
    groups = [group for group in fsdp.groups(module) if fsdp.has_gathered(group) and not group.is_unsharded]
    for group in groups:
        group.unshard()
        group.wait_for_unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()
