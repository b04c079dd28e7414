"""What is private in DistributedDataParallel, and in the composable ``replicate`` that is made of it.

Note [What DDP's public names do not do]
torch 2.15 has ``finalize_backward()``, for a DDP with ``require_manual_backward_finalization``. It waits for reductions
that have begun, and writes their results back. It begins none, and raises without ``prepare_for_backward`` before the
last backward, or ``_delay_all_reduce`` after a static graph's first one. So zbpipe calls both in every torch; torch's
own stage calls the first.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

_GETATTR = torch.nn.Module.__getattr__


def replicate_state(module: Any) -> Any:
    """The state that ``torch.distributed._composable.replicate`` keeps for a module; None for other modules, and for
    those of ``replicate_with_fsdp``, which are fully_shard's."""
    key = getattr(sys.modules.get("torch.distributed._composable.contract"), "REGISTRY_KEY", None)
    if key is not None and key not in vars(module) and getattr(type(module), "__getattr__", None) is _GETATTR:
        return None  # cheaper than getattr, for which the module would build an AttributeError
    composable = sys.modules.get("torch.distributed._composable")  # without it no module has such a state
    registry = getattr(composable, "_get_registry", None)
    if registry is None or "replicate" not in (registry(module) or ()):
        return None
    return composable.replicate.state(module)  # type: ignore[union-attr]


def is_ddp(module: Any) -> bool:
    """Whether DDP reduces the gradients of `module`'s weights."""
    return isinstance(module, DistributedDataParallel) or replicate_state(module) is not None


def driver(module: Any) -> Any:
    """The DistributedDataParallel that reduces the gradients of `module`'s weights."""
    return module if isinstance(module, DistributedDataParallel) else replicate_state(module)._ddp


@contextlib.contextmanager
def without_sync(state: Any) -> Iterator[Any]:
    """A context in which a forward of replicate's module makes DDP expect no backward; it yields the DDP."""
    before, state._no_sync = state._no_sync, True
    try:
        if state._init_args:
            state.lazy_init()  # as its forward hook would
        yield state._ddp
    finally:
        state._no_sync = before


@contextlib.contextmanager
def without_delayed_reduction(ddp: Any) -> Iterator[None]:
    """A context in which a static graph's first forward does not queue its reduction to the end of an engine run: I."""
    if not ddp.static_graph:
        yield
        return
    before, ddp._static_graph_delay_allreduce_enqueued = ddp._static_graph_delay_allreduce_enqueued, True
    try:
        yield
    finally:
        ddp._static_graph_delay_allreduce_enqueued = before


def counts_first_backward(ddp: Any) -> bool:
    """Whether a static graph counts its hooks' calls in the next backward."""
    return bool(ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued)


def reduce_all(ddp: Any, is_last: bool) -> None:
    """Reduces the gradients of a static graph's first backward, after it. Code that sets
    ``require_manual_backward_finalization`` ends the step's last reduction itself."""
    ddp.reducer._delay_all_reduce()
    ddp._static_graph_delay_allreduce_enqueued = True
    if not is_last and getattr(ddp, "require_manual_backward_finalization", False):
        ddp.finalize_backward()


def expect_backward(ddp: Any, outputs: Any) -> None:
    """Makes DDP reduce in the next backward, which begins at the tensors in `outputs`. Where DDP looks for unused
    weights, these are the weights that no output leads to."""
    found = torch.nn.parallel.distributed._find_tensors(outputs)  # type: ignore[no-untyped-call]
    ddp.reducer.prepare_for_backward(list(found))


def bucket_bytes(models: Iterable[DistributedDataParallel]) -> Counter[int]:
    """The sizes of the buckets that the models' reducers hold, which Python does not see."""
    found: Counter[int] = Counter()
    for model in models:
        try:
            logged = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        except Exception:  # half made, or half gone
            continue
        # A rebuild makes the new buckets before it frees the old ones.
        for name in ("bucket_sizes", "rebuilt_bucket_sizes"):
            found.update(int(size) for size in re.findall(r"\d+", str(logged.get(name, ""))))
    return found
