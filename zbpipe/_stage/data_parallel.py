"""Drives data parallelism around I and W, where torch's stage drives it as if each were a whole backward.

Around each forward and backward torch's stage makes DistributedDataParallel and fully_shard accumulate over
microbatches and reduce once. For a backward in two parts that is not enough, or too early. While torch is patched,
these methods of its stages are wrapped:

- ``_compute_outputs``, the forward from which a stage learns its shapes before the first step. As any other forward it
  must not make DDP expect a backward: DDP would reduce the first microbatch's W alone.
- ``forward_maybe_with_nosync``. torch's stage takes the composable ``replicate`` of ``torch.distributed._composable``,
  which is DDP in hooks, for a plain module. With ``static_graph`` DDP would queue a reduction to the end of the first
  engine run, which is I, when there are no gradients yet.
- ``backward_maybe_with_nosync``. Before the last W, DDP looks for unused weights behind the outputs. They have no
  history then, but the groups know the used weights. fsdp.py says what fully_shard needs.
- ``backward_weight_one_chunk``. It refuses modules that cannot be split in stage 0, too, whose W is a whole backward.
  It tells W that the pass is a stage's own.

ddp.py and fsdp.py have the two kinds.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from zbpipe._stage import backward, ddp, fsdp, handover, scale
from zbpipe._torch import probe
from zbpipe._torch.ddp import is_ddp, replicate_state
from zbpipe._torch.fsdp import is_sharded

_Function = Callable[..., Any]
_checked: weakref.WeakSet[Any] = weakref.WeakSet()  # stages whose modules _refuse_what_cannot_be_split() looked through


def compute_outputs(original: _Function, self: Any, /, *args: Any, module: Any, **kwargs: Any) -> Any:
    _refuse_what_is_unknown(self)
    with ddp.accumulating(module):
        return original(self, *args, module=module, **kwargs)


def forward_maybe_with_nosync(original: _Function, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    _refuse_what_is_unknown(self)
    with ddp.accumulating(self.submod):
        return original(self, *args, **kwargs)


def backward_maybe_with_nosync(
    original: _Function, self: Any, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
) -> Any:
    if backward_type == "input":
        _refuse_what_cannot_be_split(self)
    if backward_type != "weight":
        backward.refuse_lost_gradients(
            self, bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
        )
    if is_ddp(self.submod):
        scale.refuse_reducer(self.submod.named_parameters(), f"stage {self.stage_index}", "DistributedDataParallel")
        if backward_type != "input":
            with ddp.contributing(self, backward_type, bwd_kwargs, last_backward) as (bwd_kwargs, last_backward):
                return original(self, backward_type, bwd_kwargs, last_backward=last_backward)
        with ddp.adding_nothing(self):
            return original(self, backward_type, bwd_kwargs, last_backward=last_backward)
    if shards := is_sharded(self.submod):
        scale.refuse_reducer(self.submod.named_parameters(), f"stage {self.stage_index}", "fully_shard")
    if backward_type == "full" or not shards:
        return original(self, backward_type, bwd_kwargs, last_backward=last_backward)
    with fsdp.around(self.submod, backward_type, bwd_kwargs.get("param_groups", ())):
        return original(self, backward_type, bwd_kwargs, last_backward=last_backward)


def backward_weight_one_chunk(original: _Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.is_first and self.dw_builder is None:
        _refuse_what_cannot_be_split(self)
    with handover.stages_pass() if self.dw_builder is None else contextlib.nullcontext():
        return original(self, *args, **kwargs)


def _refuse_what_is_unknown(stage: Any) -> None:
    """Refuses, in the first forward, a data parallel stage that this torch drives otherwise. Raises RuntimeError."""
    for need, is_kind in KINDS.items():
        if (refusal := probe.refusal(need)) and is_kind(stage.submod):
            raise RuntimeError(
                f"stage {stage.stage_index}'s module is a {type(stage.submod).__name__}, and with torch "
                f"{torch.__version__} {refusal}; use a torch that zbpipe knows, a newer zbpipe, or zbpipe.unpatch()."
            )


def _refuse_what_cannot_be_split(stage: Any) -> None:
    """Refuses a module of which only parts are data parallel, and FSDP's first version. Raises RuntimeError.

    Nobody drives such parts: they would reduce in I, or for some microbatches alone. FSDP's first version puts views
    into the graph, which go with the forward, in the place of its weights."""
    module = stage.submod
    if stage in _checked or is_sharded(module):
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, part in module.named_modules():
        where = f"stage {stage.stage_index}'s module is a {type(module).__name__}" + (
            f" whose part {name!r}" if name else ""
        )
        if isinstance(part, FullyShardedDataParallel):
            raise RuntimeError(
                f"{where}{', a FullyShardedDataParallel,' if name else ', which'} takes its weights away after each "
                "forward and backward, so that no weight pass can follow; apply fully_shard instead"
            )
        if part is not module and (is_sharded(part) or is_ddp(part)):
            raise RuntimeError(
                f"{where}, a {type(part).__name__}, reduces gradients by itself, before the weight pass; apply "
                "fully_shard, replicate or DistributedDataParallel to the stage's whole module, too"
            )
    _checked.add(stage)


KINDS: dict[str, Callable[[Any], bool]] = {
    "fully_shard": is_sharded,
    "DistributedDataParallel": is_ddp,
    "the composable replicate": lambda module: replicate_state(module) is not None,
}
