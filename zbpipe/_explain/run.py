"""zbpipe.explain: what the input pass of a stage would leave to the weight pass, before anyone trains."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbpipe import _C
from zbpipe._explain.flops import FACTORS, Computed, count
from zbpipe._explain.trial import unchanged
from zbpipe._policy import Policy, get_policy
from zbpipe._text import megabytes, table
from zbpipe._torch import autograd
from zbpipe._torch.ddp import is_ddp
from zbpipe._torch.dispatch import pytree
from zbpipe._torch.modules import is_under_fully_shard
from zbpipe.memory._held import Held, held


@dataclass(frozen=True)
class Use:
    """One gradient of a parameter, as the backward computes it.

    ``node`` is the autograd node behind which the parameter is used. ``runs_in`` is "W" or "I": where the gradient is
    computed; W adds it in either case. ``why`` says why there. ``product`` has the shapes of the two matrices that W
    multiplies, such as "[16, 64] @ [64, 8]", or is empty. ``flops`` are floating-point operations in W, of products
    alone: 0 for what runs in I, None where they are not known, or not for this parameter apart ("?" in the table). A
    parameter from which a weight is computed has further uses: the products that W runs on the way back to it.
    """

    node: str
    runs_in: str
    why: str
    product: str
    flops: int | None


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter: its ``uses``, none if it gets no gradient, which ``note`` explains.

    ``bytes`` is what a microbatch holds for it from I to W, ``alone`` what it holds for no other parameter. ``note``
    also says what makes W go through libtorch's engine instead of adding directly: hooks, a computation between the
    parameter and its use.
    """

    name: str
    shape: tuple[int, ...]
    uses: tuple[Use, ...]
    bytes: int
    alone: int
    note: str

    @property
    def runs_in(self) -> str:
        """ "W", "I", "I and W", or "" for a parameter that gets no gradient."""
        return " and ".join(sorted({use.runs_in for use in self.uses}))

    @property
    def flops(self) -> int | None:
        """Of all its uses; None if those of one are not known."""
        counts = [use.flops for use in self.uses]
        return None if None in counts else sum(count for count in counts if count is not None)


@dataclass(frozen=True)
class Explanation:
    """What zbpipe.explain found, for one microbatch; ``print`` shows a table.

    ``parameters`` are in the module's order. ``groups`` is the number of parameter groups, ``bytes_held`` what they
    hold from I to W, each storage once; ``flops_in_w`` the FLOPs of W, products that serve several parameters once;
    all of them if ``flops_are_known``, else those that are known. ``notes`` say what is not counted.
    """

    parameters: tuple[ParameterPlan, ...]
    groups: int
    bytes_held: int
    flops_in_w: int
    flops_are_known: bool
    policy: Policy
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """All of it as dictionaries, lists, strings and numbers; a policy's function as its name."""
        data = dataclasses.asdict(self)
        for parameter, plan in zip(data["parameters"], self.parameters, strict=True):
            parameter.update(runs_in=plan.runs_in, flops=plan.flops)
        data["policy"] = {
            name: getattr(value, "__qualname__", repr(value)) if callable(value) else value
            for name, value in vars(self.policy).items()
        }
        return data

    def __str__(self) -> str:
        in_w = sum(1 for plan in self.parameters if "W" in plan.runs_in)
        lines = [
            f"W computes the gradients of {in_w} of {len(self.parameters)} parameters in {self.groups} groups: "
            f"{'' if self.flops_are_known else 'at least '}{self.flops_in_w / 1e6:.3f} MFLOP; "
            f"{megabytes(self.bytes_held)} MB are held per microbatch",
            *self.notes,
            "",
        ]
        rows = [row for plan in self.parameters for row in _rows(plan)]
        header = ("parameter", "shape", "in", "by", "why", "held, MB", "product", "MFLOP")
        return "\n".join([*lines, table(header, rows, left=5)])


def _rows(plan: ParameterPlan) -> Iterator[tuple[str, ...]]:
    uses: Sequence[Use | None] = plan.uses or (None,)
    for i, use in enumerate(uses):
        first = (plan.name, str(list(plan.shape))) if i == 0 else ("", "")
        size = megabytes(plan.bytes) if i == 0 else ""
        note = plan.note if i == 0 else ""
        if use is None:
            yield (*first, "-", "", note, size, "", "")
        else:
            why = "; ".join(filter(None, (use.why, note)))
            flops = "?" if use.flops is None else f"{use.flops / 1e6:.3f}" if use.flops else ""
            yield (*first, use.runs_in, use.node, why, size, use.product, flops)


def explain(
    module: torch.nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    first_stage: bool = False,
    output_grads: Sequence[torch.Tensor | None] | None = None,
) -> Explanation:
    """Tells what a split backward of ``module`` would do for one microbatch: which parameters' gradients W computes,
    which ones I computes and why, the bytes held in between, the products and their FLOPs.

    It runs one forward and one input pass of the module itself, on clones of the inputs, and what W would run between
    its products and the parameters, to count it; no gradient is added, no parameter's hook is called. Afterwards
    everything is as before: parameters, gradients, hooks, buffers, the modules' attributes with what lists and
    dictionaries in them contain, versions of tensors, random numbers, autocast's cache. That costs a copy of parameters
    and buffers in main memory for as long as it runs. It may be called between the microbatches of a step, too. The
    policy in effect decides as in a training step; gradients are recorded also under ``no_grad`` and
    ``inference_mode``.

    What it cannot keep away from: hooks of modules, and hooks that the forward puts on tensors, are called once more;
    what modules keep in globals or in objects of other classes; a custom Function that in its backward changes
    something elsewhere. ``torch.compile`` may compile. With tensor parallel parameters, or SyncBatchNorm, a forward
    runs collectives: call it on all ranks.

    Args:
        module: the stage. Unwrapped: what DDP and FSDP do with it is not a part of the plan.
        inputs: a tensor, or a tuple or list of all positional arguments, of a microbatch's shapes and dtypes.
        kwargs: keyword arguments.
        first_stage: the inputs come from nowhere and take no gradient; otherwise every floating-point or complex tensor
            among them does.
        output_grads: a gradient or None per tensor in the module's output, with its shape, dtype and device; default:
            ones.

    Raises:
        TypeError: an argument is not what is said here; or the module gave no tensor that requires a gradient.
        ValueError: output_grads do not fit the outputs.
        RuntimeError: a part of the module is replicated or sharded (its collectives would wait for other ranks); a
            parameter or buffer is not initialized yet or an inference tensor; the inputs are on another device than the
            parameters, and the forward failed; the input pass failed, as it would in training.
        Exception: what the module's forward raises.
    """
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    _check(module, kwargs, output_grads)
    policy = get_policy()
    choices = _asked(policy, module)
    book = _Book(policy, {id(parameter): name for name, parameter in module.named_parameters()})
    with unchanged(module):
        given = pytree.tree_map_only(torch.Tensor, lambda t: _clone(t, not first_stage), (args, dict(kwargs or {})))
        holding = _try(module, given, output_grads, choices, book)
    if torch.is_autocast_cache_enabled() and book.is_within_autocast:
        book.notes["autocast's cache is left alone: here every use casts its weight by itself"] = None
    plans = [_plan(name, parameter, book, holding) for name, parameter in module.named_parameters()]
    return Explanation(
        tuple(plans), holding.groups, holding.bytes, book.flops, not book.unknown, policy, tuple(book.notes)
    )


def _check(module: Any, kwargs: Any, output_grads: Any) -> None:
    """Refuses what cannot be explained, before anything runs."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"module is a {type(module).__name__}; expected a torch.nn.Module, as a pipeline stage's submod"
        )
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise TypeError(
            f"kwargs is {kwargs!r}; expected a dictionary of keyword arguments with strings as keys, or None"
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


def _asked(policy: Policy, module: torch.nn.Module) -> tuple[Any, Any]:
    """The policy's choices; its functions are asked now, while the parameters have their gradients and hooks."""

    def asked(choice: Any) -> Any:
        if not callable(choice):
            return choice
        answers = {id(parameter): choice(parameter) for parameter in module.parameters() if parameter.requires_grad}
        return lambda weight: answers[id(weight)] if id(weight) in answers else choice(weight)

    return asked(policy._defer()), asked(policy._checkpoint())


def _clone(tensor: torch.Tensor, takes_grad: bool) -> torch.Tensor:
    clone = tensor.detach().clone()
    differentiable = clone.is_floating_point() or clone.is_complex()
    return clone.requires_grad_() if takes_grad and differentiable else clone


def _try(
    module: torch.nn.Module, given: Any, output_grads: Sequence[torch.Tensor | None] | None, choices: Any, book: _Book
) -> Held:
    """Runs a forward and an input pass, and enters in the book what it would leave to W."""
    book.is_within_autocast = not torch.is_autocast_cache_enabled()
    result = _forward(module, *given)
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if not any(output.requires_grad for output in outputs):
        raise TypeError(
            f"{type(module).__name__} gave a {type(result).__name__} with {len(outputs)} tensors, none of which "
            "requires a gradient; there is no backward to explain"
        )
    inputs = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    weights = {id(parameter): parameter for parameter in module.parameters() if parameter.requires_grad}
    given_grads = _given_grads(module, outputs, output_grads)
    roots = tuple(output for output, _ in given_grads)
    planned = _C.explain(roots, tuple(inputs), tuple(weights.values()), *choices)
    computing = [_computing_edges(tasks, roots) for tasks in planned]
    tasks_of = [[_Task.of(task) for task in tasks] for tasks in planned]
    # Edges, for I detaches outputs, and the module may have given a tensor of an earlier forward.
    ends = [get_gradient_edge(output) for output in roots]
    ends_at = {edge.node for edge in ends}
    del planned, result, outputs, roots
    groups = _C.input_pass(ends, [grad for _, grad in given_grads], inputs, list(weights.values()), *choices)[1]

    for tasks, group in zip(tasks_of, groups, strict=True):
        for task, account in zip(tasks, group.account(), strict=True):
            book.add(task, account)
    for weight in weights.values():
        if weight.grad is not None:
            book.add_inner(weight)
    holding = held(groups, module)
    if any(_is_distributed(weight) for weight in weights.values()):
        book.notes["shapes and FLOPs are those of whole DTensors, of all ranks together"] = None
    if holding.incomplete:
        book.notes[holding.incomplete] = None
    for edges in computing:
        book.add_computed(count(edges, weights, apart=any(edge.node not in ends_at for edge in edges)))
    return holding


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
        if grad is None or not output.requires_grad:
            continue
        if (grad.shape, grad.dtype, grad.device) != (output.shape, output.dtype, output.device):
            raise ValueError(
                f"output_grads[{i}] is a {_described(grad)}; output {i} of {type(module).__name__} is a "
                f"{_described(output)}, and its gradient must be, too"
            )
        found.append((output, grad))
    if not found:
        raise ValueError(f"output_grads has no gradient for an output of {type(module).__name__} that requires one")
    return found


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


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


def _is_distributed(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # without it no tensor is
    return module is not None and isinstance(tensor, module.DTensor)


def _computing_edges(tasks: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """Where W's engine run begins, but for what it only adds: between the tasks and the weights, or at outputs."""
    edges: dict[Any, GradientEdge] = {}
    for node, _, kind, _, faces in tasks:
        if kind == "root":
            places = [(output.grad_fn, output.output_nr) for output in outputs if output.grad_fn is node]
        else:
            places = [node.next_functions[slot] for slot, _, way, _ in faces if way is not None]
        edges.update((place, GradientEdge(*place)) for place in places)
    return list(edges.values())


_Edge = tuple[int, tuple[int, ...], "str | None", list[torch.Tensor]]


@dataclass(frozen=True)
class _Task:
    """A weight task as it is planned: _C.explain()'s, without the node."""

    name: str
    kind: str
    why: str
    edges: list[_Edge]
    transposed: bool  # of a convolution

    @classmethod
    def of(cls, planned: Any) -> _Task:
        node, name, kind, why, edges = planned
        return cls(name, kind, why, edges, autograd.is_transposed(node))


class _Book:
    """Collects the uses of each parameter."""

    def __init__(self, policy: Policy, name_of: Mapping[int, str]) -> None:
        self.policy = policy
        self.name_of = name_of
        self.uses: dict[str, list[Use]] = {}
        self.ways: dict[str, dict[str, None]] = {}
        self.flops = 0
        self.unknown = False  # whether there are FLOPs that `flops` lacks
        self.is_within_autocast = False
        self.notes: dict[str, None] = {}

    def add(self, task: _Task, account: tuple[Any, str, list[Any]]) -> None:
        _, kind, tensors = account
        if kind == "root":
            self.notes[
                "what the graph itself has saved is not counted where W runs it: no stage input is behind it"
            ] = None
        shapes: dict[str, list[tuple[int, ...]]] = {}
        done_in_i: set[int] = set()
        for role, _, _, shape, _, _, weights in tensors:
            shapes.setdefault(role, []).append(shape)
            if role in ("kept gradient", "light gradient"):
                done_in_i.update(id(weight) for weight in weights)
        if kind == "product" and "matrix" not in shapes:
            self.notes["the FLOPs of what W computes again of checkpointed regions are not counted"] = None
            self.unknown = True
        for slot, shape, way, weights in task.edges:
            runs_in, why = self._place(task, kind)
            product, flops = _work(task, kind, slot, shape, shapes) if runs_in == "W" else ("", 0)
            self.flops += flops or 0
            self.unknown = self.unknown or (flops is None and kind != "root")
            for weight in weights:
                name = self.name_of.get(id(weight), "")
                here = (runs_in, why, product, flops)
                if kind == "handed over" and id(weight) in done_in_i:
                    here = ("I", f"{task.name} returns it there, beside what it hands over", "", 0)
                self.uses.setdefault(name, []).append(Use(task.name, *here))
                if way:
                    self.ways.setdefault(name, {})[way] = None

    def add_inner(self, weight: torch.Tensor) -> None:
        """For one that has got its gradient within I."""
        why = "it is added within I, by a backward in the backward, as that of a reentrant checkpoint"
        self.uses.setdefault(self.name_of[id(weight)], []).append(Use("", "I", why, "", 0))

    def add_computed(self, computed: Computed) -> None:
        self.flops += computed.flops
        if computed.unknown:
            self.unknown = True
            names = ", ".join(computed.unknown)
            self.notes[f"FLOPs of what W runs beside its products are not known: {names}"] = None
        for i, nodes in computed.on_the_way.items():
            name = self.name_of[i]
            if all(use.why != _ROOT for use in self.uses.get(name, ())):
                for node, flops in nodes:
                    why = "on the way from its use to the parameter"
                    self.uses.setdefault(name, []).append(Use(node, "W", why, "", flops))

    def _place(self, task: _Task, kind: str) -> tuple[str, str]:
        if kind == "handed over":
            return "W", "handed over by zbpipe.defer"
        if kind == "root":
            return "W", _ROOT
        if kind == "deferred" and task.kind == "product":
            return "W", "the node is run again: its matrices are of a subclass, sparse, complex or conjugated"
        if kind in ("product", "deferred"):
            return "W", "" if kind == "product" else "the node is run again for its weights"
        return "I", self._why_whole(task)

    def _why_whole(self, task: _Task) -> str:
        defer = self.policy.defer
        if task.why == "function":
            compiled = task.name.startswith("CompiledFunction")
            return f"{'compiled' if compiled else 'custom Function without zbpipe.defer'}: runs whole in I"
        return {
            "post hook": "a hook on its node is owed all of its gradients at once",
            "policy": f"policy defer={defer!r}" if isinstance(defer, str) else "the policy's defer function says so",
            "unknown": "the node is not known to compute its weights' gradients apart",
            "packed": "the policy leaves what is checkpointed or packed to I (checkpoint)",
            "light": "a vector: policy defer='matrices'",
        }[task.why]


_ROOT = "no stage input is behind it: W runs its whole backward"


def _work(
    task: _Task, kind: str, slot: int, shape: tuple[int, ...], shapes: Mapping[str, list[tuple[int, ...]]]
) -> tuple[str, int | None]:
    """What W multiplies for an edge of the task, and the FLOPs."""
    if kind in ("handed over", "root"):
        return "", None
    grad = next(iter(shapes.get("output gradient", ())), None)
    if len(shape) < 2 or grad is None:
        return "", 0
    if not grad or min(*grad, *shape) < 0:
        return "", None  # nested, or of sizes that are not numbers
    size = math.prod(shape)
    if task.name.startswith("LinearBackward"):
        rows = math.prod(grad[:-1])
        return f"{[shape[0], rows]} @ {[rows, shape[1]]}", 2 * rows * size
    if task.name.startswith("ConvolutionBackward"):
        over = next((s for s in shapes.get("saved", ()) if len(s) == len(grad)), None) if task.transposed else grad
        return "convolution", None if over is None else 2 * size * math.prod(over) // over[1]
    if task.name.startswith("GroupedMmBackward"):
        return "grouped product", 2 * math.prod(shape[-2:]) * grad[0] if len(grad) == 2 and len(shape) == 3 else None
    factors = FACTORS.get(task.name.removesuffix("0"))
    if factors is not None:
        if slot not in factors:
            return "", 0  # the added matrix
        is_left = slot == factors[0]
        inner = grad[-1] if is_left else grad[-2]
        batch = list(shape[:-2])
        left, right = ([*batch, shape[-2], inner], [*batch, inner, shape[-1]])
        return f"{left} @ {right}", 2 * inner * size
    return "", 0


def _plan(name: str, parameter: torch.nn.Parameter, book: _Book, holding: Held) -> ParameterPlan:
    row = next((row for row in holding.parameters if row.name == name), None)
    uses = tuple(book.uses.get(name, ()))
    notes = list(book.ways.get(name, ()))
    if not parameter.requires_grad:
        notes.append("frozen")
    elif not uses:
        notes.append("no gradient reaches it")
    elif _C.is_watched(parameter):
        notes.append("hooks watch it")
    return ParameterPlan(
        name=name,
        shape=tuple(parameter.shape),
        uses=uses,
        bytes=row.bytes if row else 0,
        alone=row.alone if row else 0,
        note="; ".join(notes),
    )


__all__ = ["Explanation", "ParameterPlan", "Use", "explain"]
