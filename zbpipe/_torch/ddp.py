"""What is private in DistributedDataParallel, and in the composable ``replicate`` that is made of it.

Note [What DDP's public names do not do]
Torch 2.15 has ``finalize_backward()``, for a DDP whose ``require_manual_backward_finalization`` is set: it waits for
reductions that have begun, and writes their results back. It begins none: without ``prepare_for_backward`` before the
last backward, or ``_delay_all_reduce`` after a static graph's first one, it raises. So both are called here in every
torch, as torch's own stage calls the first.
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
    """What ``torch.distributed._composable.replicate`` keeps of a module; None for other modules, and for those of
    ``replicate_with_fsdp``, which are fully_shard's."""
    key = getattr(sys.modules.get("torch.distributed._composable.contract"), "REGISTRY_KEY", None)
    if key is not None and key not in vars(module) and getattr(type(module), "__getattr__", None) is _GETATTR:
        return None  # a shorter way to it than asking the module, which makes an error of what it has not
    composable = sys.modules.get("torch.distributed._composable")  # without it no module has such a state
    registry = getattr(composable, "_get_registry", None)
    if registry is None or "replicate" not in (registry(module) or ()):
        return None
    return composable.replicate.state(module)  # type: ignore[union-attr]


def is_ddp(module: Any) -> bool:
    """Tell whether DDP reduces the gradients of `module`'s weights."""
    return isinstance(module, DistributedDataParallel) or replicate_state(module) is not None


def driver(module: Any) -> Any:
    """The DistributedDataParallel that reduces the gradients of `module`'s weights."""
    return module if isinstance(module, DistributedDataParallel) else replicate_state(module)._ddp


@contextlib.contextmanager
def without_sync(state: Any) -> Iterator[Any]:
    """Within it a forward of the module that has this state of replicate's tells DDP of no backward to come. Yields the
    DistributedDataParallel."""
    before, state._no_sync = state._no_sync, True
    if state._init_args:
        state.lazy_init()  # as its forward hook would
    try:
        yield state._ddp
    finally:
        state._no_sync = before


@contextlib.contextmanager
def without_delayed_reduction(ddp: Any) -> Iterator[None]:
    """In the first step of a static graph a forward adds a node that queues the reduction of all gradients to the end
    of the engine run in which it comes, which is I: not within this."""
    if not ddp.static_graph:
        yield
        return
    before, ddp._static_graph_delay_allreduce_enqueued = ddp._static_graph_delay_allreduce_enqueued, True
    try:
        yield
    finally:
        ddp._static_graph_delay_allreduce_enqueued = before


def counts_first_backward(ddp: Any) -> bool:
    """Whether the next backward is the one in which a static graph learns its counts."""
    return bool(ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued)


def reduce_all(ddp: Any, is_last: bool) -> None:
    """Reduce the gradients of a static graph's first backward, which is through. Whoever has set
    ``require_manual_backward_finalization`` ends a step's last reduction alone."""
    ddp.reducer._delay_all_reduce()
    ddp._static_graph_delay_allreduce_enqueued = True
    if not is_last and getattr(ddp, "require_manual_backward_finalization", False):
        ddp.finalize_backward()


def expect_backward(ddp: Any, outputs: Any) -> None:
    """Have DDP reduce in the backward to come, which begins at the tensors in `outputs`: where DDP looks for unused
    weights, those that these do not lead to are."""
    found = torch.nn.parallel.distributed._find_tensors(outputs)  # type: ignore[no-untyped-call]
    ddp.reducer.prepare_for_backward(list(found))


def bucket_bytes(models: Iterable[DistributedDataParallel]) -> Counter[int]:
    """The bytes of the buckets that the models' reducers hold, of which Python sees none."""
    found: Counter[int] = Counter()
    for model in models:
        try:
            logged = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        except Exception:  # half made, or half gone
            continue
        # Rebuilding makes the new ones before it lets go of the old.
        for name in ("bucket_sizes", "rebuilt_bucket_sizes"):
            found.update(int(size) for size in re.findall(r"\d+", str(logged.get(name, ""))))
    return found
