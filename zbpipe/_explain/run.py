"""zbpipe.explain: what the input pass of a stage would leave to the weight pass, before anyone trains."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from zbpipe._explain.copied import apart, copy_of
from zbpipe._explain.result import Explanation
from zbpipe._explain.uses import Uses, plan_of
from zbpipe._formatting import argument
from zbpipe._policy import Policy, get_policy
from zbpipe._stage.input_pass import input_pass
from zbpipe._tasks import tasks_of
from zbpipe._torch.autograd import is_dtensor, leaves_behind, placed, with_its_edge
from zbpipe._torch.ddp import is_ddp
from zbpipe._torch.dispatch import pytree
from zbpipe._torch.modules import is_under_fully_shard
from zbpipe.memory import Held, held
from zbpipe.passes import ParamGroup


def explain(
    module: torch.nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    first_stage: bool = False,
    output_grads: Sequence[torch.Tensor | None] | None = None,
) -> Explanation:
    """Tells what a split backward of ``module`` does for one microbatch.

    The plan says which parameters' gradients W computes, and which ones I computes and why. It has the bytes held from
    I to W, the products and their FLOPs. One forward and one input pass of a copy of the module run, on clones of the
    inputs. The copy shares the parameters' memory and nothing else. So no gradient is added and no parameter's hook is
    called. The module's buffers, attributes and hooks stay as they are, and so do random numbers and autocast's cache.
    While explain runs, the copies of the buffers, the attributes and the parameters' ``main_grad`` take memory. explain
    may be called between the microbatches of a step. The policy in effect decides, as in a training step. Gradients are
    recorded under ``no_grad`` and ``inference_mode``, too.

    explain does not undo what a forward writes to its parameters, whose memory the copy shares, to globals, or to
    objects that its functions refer to. A call may start ``torch.compile``'s compiler. With tensor
    parallel parameters or SyncBatchNorm a forward runs collectives: call explain on all ranks.

    Args:
        module: the stage, not wrapped in DDP or FSDP. The plan leaves out what these do.
        inputs: the positional arguments of one microbatch: a tensor, or a tuple or list of all arguments.
        kwargs: keyword arguments.
        first_stage: True if the inputs take no gradient; else every floating-point or complex tensor among them does.
        output_grads: a gradient or None per tensor in the module's output, with its shape, dtype and device; default:
            ones.

    Returns:
        The plan: per parameter its uses, bytes and FLOPs; see :class:`Explanation`. It holds no tensor.

    Raises:
        TypeError: an argument has the wrong type; or the module gave no tensor that requires a gradient.
        ValueError: output_grads do not fit the outputs.
        RuntimeError: a part of the module is replicated or sharded, and its collectives would wait for other ranks.
            Or a parameter or buffer is not initialized yet, or an inference tensor. Or the module cannot be copied, or
            the copy's forward reaches the module's own parameters. Or the forward failed with inputs on another device
            than the parameters. Or the input pass failed, as it would in training.
        Exception: what the module's forward raises.

    Example::

        print(zbpipe.explain(stage, x))

    Source:
        A product's FLOPs are those that ``torch.utils.flop_counter.FlopCounterMode`` counts.
    """
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    _check(module, kwargs, output_grads)
    policy = get_policy()
    with apart(module):
        copied = copy_of(module)
        twins = {id(own): twin for own, twin in zip(module.parameters(), copied.parameters(), strict=True)}
        excluded = tuple(twins.get(id(weight), weight) for weight in policy.exclude)
        found = Uses(policy, {id(parameter): name for name, parameter in copied.named_parameters()})
        given = pytree.tree_map_only(torch.Tensor, lambda t: _clone(t, not first_stage), (args, dict(kwargs or {})))
        holding = _try(module, copied, given, output_grads, dataclasses.replace(policy, exclude=excluded), found)
    if torch.is_autocast_cache_enabled() and found.is_within_autocast:
        found.notes["autocast's cache is left alone: here every use casts its weight by itself"] = None
    rows = {row.name: row for row in holding.parameters}
    plans = [plan_of(name, parameter, found, rows.get(name)) for name, parameter in module.named_parameters()]
    return Explanation(
        tuple(plans), holding.groups, holding.bytes, found.flops, not found.unknown, policy, tuple(found.notes)
    )


def _check(module: Any, kwargs: Any, output_grads: Any) -> None:
    """Refuses what cannot be explained, before anything runs."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"module is a {type(module).__name__}; expected a torch.nn.Module, as a pipeline stage's submod"
        )
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise TypeError(
            f"kwargs is {argument(kwargs)}; expected a dictionary of keyword arguments with strings as keys, or None"
        )
    if output_grads is not None and not isinstance(output_grads, (list, tuple)):
        raise TypeError(
            f"output_grads is a {type(output_grads).__name__}; expected a list with a tensor or None per output"
        )
    for i, grad in enumerate(output_grads or ()):
        if grad is not None and not isinstance(grad, torch.Tensor):
            raise TypeError(f"output_grads[{i}] is a {type(grad).__name__}; expected a tensor or None")
    for name, part in module.named_modules():
        if way := _data_parallel(part):
            where = f"its part {name!r}, a {type(part).__name__}," if name else "it"
            raise RuntimeError(
                f"module is a {type(module).__name__}, and {where} {way}, whose collectives would wait for other "
                "ranks: explain the module before it is wrapped, the .module of a DistributedDataParallel, or a copy"
            )
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise RuntimeError(
                f"{name} is a {type(tensor).__name__}, to be made by the first forward, which explain must not be: run "
                f"the {type(module).__name__} once before"
            )
        if tensor.is_inference():
            raise RuntimeError(
                f"{name} was made under torch.inference_mode(), and no gradient can reach it: make the "
                f"{type(module).__name__} outside of it"
            )


def _data_parallel(part: torch.nn.Module) -> str:
    """By what the module's forward or backward starts collectives over replicas or shards; "" if by nothing."""
    if is_ddp(part):
        return "is replicated by DistributedDataParallel or replicate"
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it no module is sharded
    if fsdp is not None and isinstance(part, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)):
        return "is sharded by fully_shard or FSDP"
    return "belongs to a module that fully_shard has wrapped" if is_under_fully_shard(part) else ""


def _clone(tensor: torch.Tensor, takes_grad: bool) -> torch.Tensor:
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().clone().requires_grad_(takes_grad and differentiable)


def _try(
    module: torch.nn.Module,
    copied: torch.nn.Module,
    given: Any,
    output_grads: Sequence[torch.Tensor | None] | None,
    policy: Policy,
    found: Uses,
) -> Held:
    """Runs a forward and an input pass, and adds what it would leave to W."""
    found.is_within_autocast = not torch.is_autocast_cache_enabled()
    result = _forward(copied, *given)
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if not any(map(_takes_gradient, outputs)):
        raise TypeError(
            f"{type(module).__name__} gave a {type(result).__name__} with {len(outputs)} tensors, none of which "
            "requires a gradient; there is no backward to explain"
        )
    inputs = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    weights = [parameter for parameter in copied.parameters() if parameter.requires_grad]
    given_grads = _given_grads(module, outputs, output_grads)
    # Edges, for I detaches outputs, and the module may have given a tensor of an earlier forward.
    ends = [get_gradient_edge(output) for output, _ in given_grads]
    grads = [grad for _, grad in given_grads]
    del result, outputs, given_grads
    listed = (*weights, *module.parameters())
    served = {id(tensor) for tensor in (*inputs, *listed)}
    if others := sum(id(leaf) not in served for leaf in leaves_behind(ends)):
        more = f"{others} more lea{'f' if others == 1 else 'ves'} of the graph"
        found.notes[f"{more}, not among the module's parameters, which a patched stage's I and W serve, too"] = None
    groups = input_pass(tuple(ends), tuple(grads), tuple(inputs), listed, policy)[1]
    for group in groups:
        group._is_awaited = False
    _check_reached(module, groups)
    for task in itertools.chain.from_iterable(map(tasks_of, groups)):
        if task[1] != "outside":
            found.add(task)
    for weight in weights:
        if weight.grad is not None:
            found.add_inner(weight)
    holding = held(groups, copied)
    if any(map(is_dtensor, weights)):
        found.notes["shapes and FLOPs are those of whole DTensors, of all ranks together"] = None
    if holding.incomplete:
        found.notes[holding.incomplete] = None
    return holding


def _check_reached(module: torch.nn.Module, groups: Sequence[ParamGroup]) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for weight in (weight for group in groups for weight in group.weights):
        if id(weight) in names:
            raise RuntimeError(
                f"explain runs a copy of {type(module).__name__}, and its forward reaches {names[id(weight)]!r} of "
                "the module itself, by a function that refers to it or by what an earlier forward has kept: let the "
                "forward take all by its self, and explain the module before its first forward"
            )


def _given_grads(
    module: torch.nn.Module, outputs: Sequence[torch.Tensor], output_grads: Sequence[torch.Tensor | None] | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The outputs at which the backward begins, with their gradients."""
    grads = [torch.ones_like(output) for output in outputs] if output_grads is None else list(output_grads)
    if len(grads) != len(outputs):
        raise ValueError(
            f"output_grads has {len(grads)} entries; expected one for each of the {len(outputs)} tensors that "
            f"{type(module).__name__} gave"
        )
    found = []
    for i, (output, grad) in enumerate(zip(outputs, grads, strict=True)):
        if grad is None or not _takes_gradient(output):
            continue
        if (grad.shape, grad.dtype, grad.device) != (output.shape, output.dtype, output.device):
            raise ValueError(
                f"output_grads[{i}] is a {placed(grad)}; output {i} of {type(module).__name__} is a "
                f"{placed(output)}, and its gradient must be, too"
            )
        found.append((output, grad))
    if not found:
        raise ValueError(f"output_grads has no gradient for an output of {type(module).__name__} that requires one")
    return found


def _takes_gradient(output: torch.Tensor) -> bool:
    return output.requires_grad and with_its_edge(output) is not None


def _forward(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    try:
        return module(*args, **kwargs)
    except Exception as error:
        given = _devices(pytree.tree_leaves((args, kwargs)))
        own = _devices(module.parameters())
        if given and own and not set(given) & set(own):
            raise RuntimeError(
                f"the inputs are on {', '.join(given)} and the parameters of {type(module).__name__} on "
                f"{', '.join(own)}, and its forward fails: move the inputs to the parameters' device"
            ) from error
        raise


def _devices(objects: Iterable[Any]) -> list[str]:
    return sorted({str(tensor.device) for tensor in objects if isinstance(tensor, torch.Tensor)})
