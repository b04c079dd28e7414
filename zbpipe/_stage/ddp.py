"""Drives data parallelism around I and W, where torch's stage drives it as if each were a whole backward.

torch's stage makes DistributedDataParallel and fully_shard accumulate over microbatches and reduce once, by what it
does around each forward and backward. With a backward in two parts that is not enough, or comes at the wrong moment.
While torch is patched, these methods of its stages are wrapped:

- ``_compute_outputs``, the forward from which a stage learns its shapes before the first step: as every other forward,
  it must not make DDP expect a backward, or the first microbatch's W is reduced alone.
- ``forward_maybe_with_nosync``: the composable ``replicate`` of ``torch.distributed._composable`` is DDP in hooks, and
  torch's stage takes it for a plain module. With ``static_graph`` DDP would queue a reduction to the end of the first
  engine run, which is I: before there are gradients.
- ``backward_maybe_with_nosync``: before the last W, DDP looks for unused weights from the outputs, which have no
  history any more; the groups know which weights are used. fully_shard may have the shards in the weights' place when
  I or W is asked for them, and have freed the weights that W reads; and after each W the gradients have to go to its
  buffers of the reduce dtype, for its own hooks fired in I.
- ``backward_weight_one_chunk``: what cannot be split is refused in stage 0, too, whose W is a whole backward.

Nothing is reduced here: DDP's hooks do it in the last W, bucket by bucket, while W runs; for fully_shard torch's
schedule does it after the last W.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.nn.parallel import DistributedDataParallel

from zbpipe._policy import get_policy
from zbpipe._stage import handover as stage_pass
from zbpipe._torch import ddp, fsdp, pipelining, probe
from zbpipe._torch.autograd import version_of

_Function = Callable[..., Any]
_places: list[tuple[type, str, _Function, _Function]] = []  # owner, name, original, replacement
_checked: weakref.WeakSet[Any] = weakref.WeakSet()  # stages whose modules _check_parts() has looked through
_unknown: dict[str, str] = {}  # by need: why stages of that kind are refused with this torch


def install() -> list[str]:
    """Wrap the methods. The caller holds patch()'s lock, has called nothing but uninstall() since the last time, and
    knows that the probe's need "stages" is met.

    Returns:
        The methods' names.
    """
    _unknown.update({need: refusal for need in KINDS if (refusal := probe.refusal(need)) is not None})
    for owner in pipelining.stage_classes():
        for name, wrapper in _WRAPPERS.items():
            original = vars(owner).get(name)
            if original is not None:
                replacement = _wrap(original, wrapper)
                setattr(owner, name, replacement)
                _places.append((owner, name, original, replacement))
    return [_listed(owner, name) for owner, name, _, _ in _places]


def uninstall() -> tuple[list[str], list[str]]:
    """Restore the methods.

    Returns:
        The names of the methods restored, and of those that somebody else rebound meanwhile and that are left.
    """
    restored, rebound = [], []
    for owner, name, original, replacement in _places:
        if vars(owner).get(name) is replacement:
            setattr(owner, name, original)
            restored.append(_listed(owner, name))
        else:
            rebound.append(_listed(owner, name))
    _places.clear()
    _unknown.clear()
    return restored, rebound


def _listed(owner: type, name: str) -> str:
    return f"{owner.__module__}.{owner.__qualname__}.{name}"


def _wrap(original: _Function, wrapper: _Function) -> _Function:
    """``wrapper(original, ...)`` while torch is patched; somebody may hold on to it for longer."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not _places:
            return original(*args, **kwargs)
        with stage_pass.within_stage():
            return wrapper(original, *args, **kwargs)

    return replacement


def _compute_outputs(original: _Function, self: Any, *args: Any, module: Any, **kwargs: Any) -> Any:
    _refuse_what_is_unknown(self)
    with _accumulating(module):
        return original(self, *args, module=module, **kwargs)


def _forward_maybe_with_nosync(original: _Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_what_is_unknown(self)
    with _accumulating(self.submod):
        return original(self, *args, **kwargs)


def _backward_maybe_with_nosync(
    original: _Function, self: Any, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
) -> Any:
    if backward_type == "input":
        _refuse_what_cannot_be_split(self)
    if is_ddp(self.submod):
        _refuse_main_grad(self)
        if backward_type != "input":
            return _contribute(original, self, backward_type, bwd_kwargs, last_backward)
        with _adding_nothing(self):
            return original(self, backward_type, bwd_kwargs, last_backward=last_backward)
    if backward_type == "full" or not _is_sharded(self.submod):
        return original(self, backward_type, bwd_kwargs, last_backward=last_backward)
    reads_weights = backward_type == "weight" and any(group.reads_weights for group in bwd_kwargs["param_groups"])
    with (
        _gathered(self.submod) if reads_weights else contextlib.nullcontext(),
        stage_pass.with_weights(fsdp.gathered(self.submod)),
    ):
        result = original(self, backward_type, bwd_kwargs, last_backward=last_backward)
    if backward_type == "weight":
        fsdp.accumulate(self.submod)
    return result


def _backward_weight_one_chunk(original: _Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.is_first and self.dw_builder is None:
        _refuse_what_cannot_be_split(self)
    return original(self, *args, **kwargs)


def _refuse_what_is_unknown(stage: Any) -> None:
    """Refuse a data parallel stage where torch's ways of driving such differ from those that zbpipe knows. All ranks
    have them, and come here in their first forward. Raises RuntimeError."""
    for need, refusal in _unknown.items():
        if KINDS[need](stage.submod):
            raise RuntimeError(
                f"stage {stage.stage_index}'s module is a {type(stage.submod).__name__}, and with torch "
                f"{torch.__version__} {refusal}; use a torch that zbpipe knows, a newer zbpipe, or zbpipe.unpatch()."
            )


def _refuse_what_cannot_be_split(stage: Any) -> None:
    """Refuse a module of which only parts are data parallel: nobody would drive them, and they would reduce in I, or
    for some microbatches alone; and FSDP's first version, whose weights are not in the graph but views of them that go
    with the forward. Raises RuntimeError."""
    module = stage.submod
    if stage in _checked or _is_sharded(module):
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, part in module.named_modules():
        where = f"stage {stage.stage_index}'s module is a {type(module).__name__}" + (
            f" whose part {name!r}" if name else ""
        )
        if isinstance(part, FullyShardedDataParallel):
            raise RuntimeError(
                f"{where}{', a FullyShardedDataParallel,' if name else ', which'} takes its weights away after each "
                "forward and backward, so that no weight pass can follow: apply fully_shard instead."
            )
        if part is not module and (_is_sharded(part) or is_ddp(part)):
            raise RuntimeError(
                f"{where}, a {type(part).__name__}, reduces gradients by itself, which would come before the weight "
                "pass: apply fully_shard, replicate or DistributedDataParallel to the stage's whole module too."
            )
    _checked.add(stage)


# DistributedDataParallel, as a wrapper, or as the composable replicate that keeps it in its state.


def is_ddp(module: Any) -> bool:
    """Tell whether DDP reduces the gradients of `module`'s weights."""
    return isinstance(module, DistributedDataParallel) or ddp.replicate_state(module) is not None


@contextlib.contextmanager
def _accumulating(module: Any) -> Iterator[None]:
    """Within it a forward of `module` tells DDP nothing of a backward to come."""
    if isinstance(module, DistributedDataParallel):
        with module.no_sync(), ddp.without_delayed_reduction(module):
            yield
    elif (state := ddp.replicate_state(module)) is not None:
        with ddp.without_sync(state) as driver, ddp.without_delayed_reduction(driver):
            yield
    else:
        yield


def _contribute(
    original: _Function, self: Any, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool
) -> Any:
    """A backward, or a W, that adds to the gradients which DDP reduces in the step's last one.

    Note [The first backward of a static graph]
    With static_graph DDP counts how often each weight's hook is called until it reduces for the first time, and waits
    for as many calls from then on. It has to count one backward, not all of a step: so the first one of all is reduced
    by itself, once it is through, as DDP does with no_sync outside of pipelines.
    """
    driver = ddp.driver(self.submod)
    counts = ddp.counts_first_backward(driver)
    if counts:
        ddp.expect_backward(driver, [])
    elif last_backward:
        if backward_type == "weight":
            groups, searches = bwd_kwargs["param_groups"], driver.find_unused_parameters
            if not driver.static_graph and not searches:
                _refuse_unused(self, groups)
            mentions = _mentions(groups) if searches and not driver.static_graph else []
            bwd_kwargs = {**bwd_kwargs, "stage_output": mentions}
        if driver is not self.submod:  # else torch's stage does it
            ddp.expect_backward(driver, _with_tensors_for_edges(bwd_kwargs["stage_output"]))
    result = original(self, backward_type, bwd_kwargs, last_backward=last_backward and not counts)
    if counts:
        ddp.reduce_all(driver, last_backward)
    return result


def _mentions(param_groups: Iterable[Any]) -> list[torch.Tensor]:
    """Tensors in whose graphs DDP finds the weights of the groups, and no others."""
    with torch.enable_grad():
        return [node.variable.view_as(node.variable) for group in param_groups for node in group["params"]]


def _with_tensors_for_edges(outputs: Any) -> Any:
    """A stage's outputs, for DDP to look for unused weights from: torch 2.15 keeps edges of those that it has sent, and
    DDP looks at tensors. Others that lead to the same weights stand for them."""
    if not isinstance(outputs, (tuple, list)):
        return outputs
    pending: list[Any] = [output.node for output in outputs if isinstance(output, GradientEdge)]
    seen = set(pending)
    leaves = []
    while pending:
        node = pending.pop()
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            leaves.append(leaf)
        further = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= further
        pending += further
    with torch.enable_grad():
        return [
            *(output for output in outputs if not isinstance(output, GradientEdge)),
            *(x.view_as(x) for x in leaves),
        ]


def _refuse_unused(stage: Any, param_groups: Iterable[Any]) -> None:
    """Refuse a last W without weights that DDP waits for: it would reduce neither them nor what comes after them, and
    tell so in the next step, if there is one. Raises RuntimeError."""
    served = {id(node.variable) for group in param_groups for node in group["params"]}
    driver = ddp.driver(stage.submod)
    awaited = {id(w) for name, w in driver.module.named_parameters() if name not in driver.parameters_to_ignore}
    missing = [
        name
        for name, weight in stage.submod.named_parameters()
        if weight.requires_grad and id(weight) in awaited and id(weight) not in served
    ]
    if missing:
        raise RuntimeError(
            f"the step's last microbatch does not use {_enumeration(missing)} of stage {stage.stage_index}, and "
            "DistributedDataParallel waits for their gradients: make it with find_unused_parameters=True."
        )


def _refuse_main_grad(stage: Any) -> None:
    """Raises RuntimeError where W would add to what DDP does not reduce."""
    if get_policy().main_grad:
        names = [name for name, w in stage.submod.named_parameters() if getattr(w, "main_grad", None) is not None]
        if names:
            raise RuntimeError(
                f"policy(main_grad=True) adds to the main_grad of {_enumeration(names)} of stage {stage.stage_index}, "
                "and DistributedDataParallel reduces .grad alone: use one of the two."
            )


@contextlib.contextmanager
def _adding_nothing(stage: Any) -> Iterator[None]:
    """An I within it adds to no gradient; DDP, which waits for W, would not hear of it. Raises RuntimeError."""
    weights = dict(stage.submod.named_parameters())
    before = [_mark(weight.grad) for weight in weights.values()]
    yield
    added = [name for (name, weight), mark in zip(weights.items(), before, strict=True) if _mark(weight.grad) != mark]
    if added:
        raise RuntimeError(
            f"the input pass of stage {stage.stage_index} has added to the gradients of {_enumeration(added)}, in a "
            "backward within it, as checkpoint(use_reentrant=True) runs, and DistributedDataParallel would reduce "
            "neither them nor what comes after them: checkpoint with use_reentrant=False, or apply fully_shard."
        )


def _mark(grad: torch.Tensor | None) -> tuple[int, int] | None:
    return None if grad is None else (id(grad), version_of(grad))


def _enumeration(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


# fully_shard.


def _is_sharded(module: Any) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


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


KINDS: dict[str, Callable[[Any], bool]] = {
    "fully_shard": _is_sharded,
    "DistributedDataParallel": is_ddp,
    "the composable replicate": lambda module: ddp.replicate_state(module) is not None,
}
_WRAPPERS: dict[str, _Function] = {
    pipelining.COMPUTE_OUTPUTS: _compute_outputs,
    "forward_maybe_with_nosync": _forward_maybe_with_nosync,
    "backward_maybe_with_nosync": _backward_maybe_with_nosync,
    "backward_weight_one_chunk": _backward_weight_one_chunk,
}
