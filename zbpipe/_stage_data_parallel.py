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
import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from zbpipe._policy import get_policy

STAGE = "torch.distributed.pipelining.stage"

# Owner, parameters as inspect gives them, and whether a torch without it needs it not (there the forward that tells the
# shapes runs without gradients).
METHODS: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "_compute_outputs": ("PipelineStage", ("self", "args", "module", "kwargs"), True),
    "forward_maybe_with_nosync": ("_PipelineStageBase", ("self", "args", "kwargs"), False),
    "backward_maybe_with_nosync": (
        "_PipelineStageBase",
        ("self", "backward_type", "bwd_kwargs", "last_backward"),
        False,
    ),
    "backward_weight_one_chunk": ("_PipelineStageBase", ("self", "bwd_chunk_id", "last_backward"), False),
}

_Function = Callable[..., Any]
_places: list[tuple[type, str, _Function, _Function]] = []  # owner, name, original, replacement
_checked: weakref.WeakSet[Any] = weakref.WeakSet()  # stages whose modules _check_parts() has looked through


def install() -> tuple[list[str], str | None]:
    """Wrap the methods. The caller holds patch()'s lock, and has called nothing but uninstall() since the last time.

    Returns:
        The methods' names, and what there is to be said of a torch where they are left alone.
    """
    stage = importlib.import_module(STAGE)
    found: list[tuple[type, str, _Function]] = []
    differences = []
    for name, (owner_name, known, is_optional) in METHODS.items():
        owner = getattr(stage, owner_name, None)
        original = vars(owner or object).get(name)
        if owner is None or original is None:
            if not is_optional:
                differences.append(f"{name} is missing")
            continue
        parameters = tuple(inspect.signature(original).parameters)
        if parameters != known:
            differences.append(f"{name} takes ({', '.join(parameters)}) where zbpipe knows ({', '.join(known)})")
        found.append((owner, name, original))
    if differences:
        ways = "; ".join(differences)
        return [], f"data parallel stages are driven by torch alone, whose ways zbpipe does not know: {ways}"
    for owner, name, original in found:
        replacement = _wrap(original, _WRAPPERS[name])
        setattr(owner, name, replacement)
        _places.append((owner, name, original, replacement))
    return [_listed(owner, name) for owner, name, _, _ in _places], None


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
    return restored, rebound


def _listed(owner: type, name: str) -> str:
    return f"{owner.__module__}.{owner.__qualname__}.{name}"


def _wrap(original: _Function, wrapper: _Function) -> _Function:
    """``wrapper(original, ...)`` while torch is patched; somebody may hold on to it for longer."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs) if _places else original(*args, **kwargs)

    return replacement


def _compute_outputs(original: _Function, self: Any, *args: Any, module: Any, **kwargs: Any) -> Any:
    with _accumulating(module):
        return original(self, *args, module=module, **kwargs)


def _forward_maybe_with_nosync(original: _Function, self: Any, *args: Any, **kwargs: Any) -> Any:
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
        _with_unsharded_parameters(self.submod),
    ):
        result = original(self, backward_type, bwd_kwargs, last_backward=last_backward)
    if backward_type == "weight":
        _accumulate(self.submod)
    return result


def _backward_weight_one_chunk(original: _Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.is_first and self.dw_builder is None:
        _refuse_what_cannot_be_split(self)
    return original(self, *args, **kwargs)


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


def _replicate_state(module: Any) -> Any:
    """What ``torch.distributed._composable.replicate`` keeps of a module; None for other modules, and for those of
    ``replicate_with_fsdp``, which are fully_shard's."""
    composable = sys.modules.get("torch.distributed._composable")  # without it no module has such a state
    if composable is None or "replicate" not in (composable._get_registry(module) or ()):
        return None
    return composable.replicate.state(module)


def is_ddp(module: Any) -> bool:
    """Tell whether DDP reduces the gradients of `module`'s weights."""
    return isinstance(module, DistributedDataParallel) or _replicate_state(module) is not None


def _ddp(module: Any) -> Any:
    return module if isinstance(module, DistributedDataParallel) else _replicate_state(module)._ddp


@contextlib.contextmanager
def _accumulating(module: Any) -> Iterator[None]:
    """Within it a forward of `module` tells DDP nothing of a backward to come."""
    if isinstance(module, DistributedDataParallel):
        with module.no_sync(), _without_delayed_reduction(module):
            yield
    elif (state := _replicate_state(module)) is not None:
        before, state._no_sync = state._no_sync, True
        if state._init_args:
            state.lazy_init()  # as its forward hook would
        try:
            with _without_delayed_reduction(state._ddp):
                yield
        finally:
            state._no_sync = before
    else:
        yield


@contextlib.contextmanager
def _without_delayed_reduction(ddp: Any) -> Iterator[None]:
    """In the first step of a static graph a forward adds a node that queues the reduction of all gradients to the end
    of the engine run in which it comes, which is I; see Note [The first backward of a static graph]."""
    if not ddp.static_graph:
        yield
        return
    before, ddp._static_graph_delay_allreduce_enqueued = ddp._static_graph_delay_allreduce_enqueued, True
    try:
        yield
    finally:
        ddp._static_graph_delay_allreduce_enqueued = before


def _contribute(
    original: _Function, self: Any, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool
) -> Any:
    """A backward, or a W, that adds to the gradients which DDP reduces in the step's last one.

    Note [The first backward of a static graph]
    With static_graph DDP counts how often each weight's hook is called until it reduces for the first time, and waits
    for as many calls from then on. It has to count one backward, not all of a step: so the first one of all is reduced
    by itself, once it is through, as DDP does with no_sync outside of pipelines.
    """
    ddp = _ddp(self.submod)
    counts = ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued
    if counts:
        ddp.reducer.prepare_for_backward([])
    elif last_backward:
        if backward_type == "weight":
            groups, searches = bwd_kwargs["param_groups"], ddp.find_unused_parameters
            if not ddp.static_graph and not searches:
                _refuse_unused(self, groups)
            mentions = _mentions(groups) if searches and not ddp.static_graph else []
            bwd_kwargs = {**bwd_kwargs, "stage_output": mentions}
        if ddp is not self.submod:  # else torch's stage does it
            outputs = torch.nn.parallel.distributed._find_tensors(  # type: ignore[no-untyped-call]
                bwd_kwargs["stage_output"]
            )
            ddp.reducer.prepare_for_backward(list(outputs))
    result = original(self, backward_type, bwd_kwargs, last_backward=last_backward and not counts)
    if counts:
        ddp.reducer._delay_all_reduce()
        ddp._static_graph_delay_allreduce_enqueued = True
    return result


def _mentions(param_groups: Iterable[Any]) -> list[torch.Tensor]:
    """Tensors in whose graphs DDP finds the weights of the groups, and no others."""
    with torch.enable_grad():
        return [node.variable.view_as(node.variable) for group in param_groups for node in group["params"]]


def _refuse_unused(stage: Any, param_groups: Iterable[Any]) -> None:
    """Refuse a last W without weights that DDP waits for: it would reduce neither them nor what comes after them, and
    tell so in the next step, if there is one. Raises RuntimeError."""
    served = {id(node.variable) for group in param_groups for node in group["params"]}
    ddp = _ddp(stage.submod)
    awaited = {id(w) for name, w in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore}
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
    return None if grad is None else (id(grad), grad._version)


def _enumeration(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


# fully_shard.


def _is_sharded(module: Any) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


@contextlib.contextmanager
def _with_unsharded_parameters(module: Any) -> Iterator[None]:
    """Within it ``module.parameters()`` gives the weights that are in the graph.

    After a forward that reshards, the module's parameters are the shards until its backward gathers the weights; I is
    asked before that, W may be when another microbatch's forward has resharded again.
    """
    unsharded = {param.sharded_param: param._unsharded_param for param in _gathered_params(module)}
    parameters = [unsharded.get(parameter, parameter) for parameter in module.parameters()]
    vars(module)["parameters"] = lambda recurse=True: iter(parameters)
    try:
        yield
    finally:
        del vars(module)["parameters"]


@contextlib.contextmanager
def _gathered(module: Any) -> Iterator[None]:
    """Within it the weights are there that were gathered before, for what W runs again and reads them."""
    groups = [group for group in _groups(module) if _has_gathered(group) and not group.is_unsharded]
    for group in groups:
        group.unshard()
        group.wait_for_unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()


def _accumulate(module: Any) -> None:
    """Add the gradients of a W to the buffers in which fully_shard sums them up until it reduces.

    It has such where it reduces in another dtype than it computes in, and adds to them at a backward's end: in I. From
    torch 2.15 on the weights in the graph sum their gradients up themselves, in that dtype.
    """
    for param in _gathered_params(module):
        unsharded = param._unsharded_param
        if unsharded.grad is None or not hasattr(param, "to_accumulated_grad_if_needed"):
            continue
        if param.unsharded_accumulated_grad is None:
            param.to_accumulated_grad_if_needed()
        else:
            param.unsharded_accumulated_grad += unsharded.grad
            unsharded.grad = None


def _gathered_params(module: Any) -> Iterator[Any]:
    """What fully_shard keeps of each weight that it has gathered before, whether it is sharded now or not."""
    for group in filter(_has_gathered, _groups(module)):
        yield from group.fsdp_params


def _groups(module: Any) -> Iterator[Any]:
    for state in module._get_fsdp_state()._state_ctx.all_states:
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11 has one group at most
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        yield from groups


def _has_gathered(group: Any) -> bool:
    return all(getattr(param, "_unsharded_param", None) is not None for param in group.fsdp_params)


_WRAPPERS: dict[str, _Function] = {
    "_compute_outputs": _compute_outputs,
    "forward_maybe_with_nosync": _forward_maybe_with_nosync,
    "backward_maybe_with_nosync": _backward_maybe_with_nosync,
    "backward_weight_one_chunk": _backward_weight_one_chunk,
}
