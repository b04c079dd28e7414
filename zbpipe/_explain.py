"""zbpipe.explain: what the input pass of a stage would leave to the weight pass, before anyone trains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zbpipe import _C
from zbpipe._policy import Policy, get_policy
from zbpipe.memory._accounting import Held, held
from zbpipe.memory._format import megabytes, table


@dataclass(frozen=True)
class Use:
    """One gradient of a parameter, as the backward computes it.

    ``node`` is the autograd node behind which the parameter is used. ``runs_in`` is "W" or "I": where the gradient is
    computed; W adds it in either case. ``why`` says why there. ``product`` has the shapes of the two matrices that W
    multiplies, such as "[16, 64] @ [64, 8]", or is empty. ``flops`` are floating-point operations in W, of products
    alone: 0 for what runs in I, None where they are not known before it runs.
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
    hold from I to W, each storage once; ``flops_in_w`` the known FLOPs of W, products that serve several
    parameters once. ``notes`` say what is not counted.
    """

    parameters: tuple[ParameterPlan, ...]
    groups: int
    bytes_held: int
    flops_in_w: int
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
            f"{self.flops_in_w / 1e6:.3f} MFLOP; {megabytes(self.bytes_held)} MB are held per microbatch",
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

    It runs one forward and one input pass, on aliases of the parameters that share their memory and have no
    hooks, and on clones of the buffers and inputs: gradients, buffers and random numbers stay as they are. No weight
    pass runs. The policy in effect decides as in a training step.

    What it cannot keep away from: hooks of modules, and hooks that the forward puts on tensors, are called once more;
    counters that modules keep outside of their buffers count; a custom Function that in its backward changes
    something by itself (adds to a ``main_grad``, fills a queue) does so. ``torch.compile`` may compile again.

    Args:
        module: the stage. Unwrapped: what DDP and FSDP do with it is not a part of the plan.
        inputs: a tensor, or a tuple or list of all positional arguments, of a microbatch's shapes and dtypes.
        kwargs: keyword arguments.
        first_stage: the inputs come from nowhere and take no gradient; otherwise every floating-point or complex tensor
            among them does.
        output_grads: a gradient or None per tensor in the module's output; default: ones.

    Raises:
        TypeError: the module gave no tensor that requires a gradient.
        RuntimeError: the input pass failed, as it would in training.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    originals = {names[id(parameter)]: parameter for parameter in module.parameters()}
    aliases = {name: _alias(parameter) for name, parameter in originals.items()}
    stand_ins = {**aliases, **{name: buffer.clone() for name, buffer in module.named_buffers()}}
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    given = pytree.tree_map_only(torch.Tensor, lambda t: _clone(t, not first_stage), (args, dict(kwargs or {})))
    devices = sorted({p.device.index for p in originals.values() if p.device.type == "cuda"})
    policy = get_policy()
    choices = _on_originals(policy, {id(alias): originals[name] for name, alias in aliases.items()})

    def run(result: Any) -> tuple[Any, Any]:
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not any(output.requires_grad for output in outputs):
            raise TypeError(
                f"{type(module).__name__} gave {len(outputs)} tensors, none of which requires a gradient; "
                "there is no backward to explain"
            )
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        weights = [alias for alias in aliases.values() if alias.requires_grad]
        planned = _without_nodes(_C.explain(tuple(outputs), tuple(tensors), tuple(weights), *choices))
        grads = [torch.ones_like(out) for out in outputs] if output_grads is None else list(output_grads)
        return planned, _C.input_pass(outputs, grads, tensors, weights, *choices)[1]

    # The input pass within the call: what it computes again of checkpointed regions finds the aliases, too.
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        stand_ins = {f"module.{name}": tensor for name, tensor in stand_ins.items()}
        planned, groups = torch.func.functional_call(_Explained(module, run), stand_ins, *given)

    book = _Book(policy, {id(alias): name for name, alias in aliases.items()})
    for tasks, group in zip(planned, groups, strict=True):
        for task, account in zip(tasks, group.account(), strict=True):
            book.add(task, account)
    holding = held(groups, _Names(aliases))
    if book.has_roots:
        book.notes["what the graph itself has saved is not counted where W runs it: no stage input is behind it"] = None
    if holding.incomplete:
        book.notes[holding.incomplete] = None
    plans = [_plan(name, parameter, book, holding) for name, parameter in originals.items()]
    return Explanation(tuple(plans), len(groups), holding.bytes, book.flops, policy, tuple(book.notes))


class _Names(torch.nn.Module):
    """The aliases under the parameters' names, for memory.held()."""

    def __init__(self, aliases: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.aliases = aliases

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from self.aliases.items()


class _Explained(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, run: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module = module
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.module(*args, **kwargs))


def _alias(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The same memory without .grad, hooks and history; a main_grad is a new one."""
    alias = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(alias, name, torch.zeros_like(value) if name == "main_grad" and value is not None else value)
    return alias


def _clone(tensor: torch.Tensor, takes_grad: bool) -> torch.Tensor:
    clone = tensor.detach().clone()
    differentiable = clone.is_floating_point() or clone.is_complex()
    return clone.requires_grad_() if takes_grad and differentiable else clone


def _on_originals(policy: Policy, original_of: Mapping[int, torch.Tensor]) -> tuple[Any, Any]:
    """The policy's choices; its functions are asked about the module's own parameters, now, while it has them."""

    def asked(choice: Any) -> Any:
        if not callable(choice):
            return choice
        answers = {alias: choice(original) for alias, original in original_of.items() if original.requires_grad}
        return lambda alias: answers[id(alias)] if id(alias) in answers else choice(alias)

    return asked(policy._defer()), asked(policy._checkpoint())


_Edge = tuple[int, tuple[int, ...], "str | None", list[torch.Tensor]]


@dataclass(frozen=True)
class _Task:
    """A weight task as it is planned: _C.explain()'s, without the node."""

    name: str
    kind: str
    why: str
    edges: list[_Edge]
    transposed: bool  # of a convolution


def _without_nodes(groups: list[Any]) -> list[list[_Task]]:
    return [
        [
            _Task(name, kind, why, edges, bool(getattr(node, "_saved_transposed", False)))
            for node, name, kind, why, edges in tasks
        ]
        for tasks in groups
    ]


class _Book:
    """Collects the uses of each parameter."""

    def __init__(self, policy: Policy, name_of: Mapping[int, str]) -> None:
        self.policy = policy
        self.name_of = name_of
        self.uses: dict[str, list[Use]] = {}
        self.ways: dict[str, dict[str, None]] = {}
        self.flops = 0
        self.has_roots = False
        self.notes: dict[str, None] = {}

    def add(self, task: _Task, account: tuple[Any, str, list[Any]]) -> None:
        _, kind, tensors = account
        self.has_roots = self.has_roots or kind == "root"
        shapes: dict[str, list[tuple[int, ...]]] = {}
        done_in_i: set[int] = set()
        for role, _, _, shape, _, _, weights in tensors:
            shapes.setdefault(role, []).append(shape)
            if role in ("kept gradient", "light gradient"):
                done_in_i.update(id(weight) for weight in weights)
        for slot, shape, way, weights in task.edges:
            runs_in, why = self._place(task, kind)
            product, flops = _work(task, kind, slot, shape, shapes) if runs_in == "W" else ("", 0)
            self.flops += flops or 0
            for weight in weights:
                name = self.name_of.get(id(weight), "")
                here = (runs_in, why, product, flops)
                if kind == "handed over" and id(weight) in done_in_i:
                    here = ("I", f"{task.name} returns it there, beside what it hands over", "", 0)
                self.uses.setdefault(name, []).append(Use(task.name, *here))
                if way:
                    self.ways.setdefault(name, {})[way] = None

    def _place(self, task: _Task, kind: str) -> tuple[str, str]:
        if kind == "handed over":
            return "W", "handed over by zbpipe.defer"
        if kind == "root":
            return "W", "no stage input is behind it: W runs its whole backward"
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


def _work(
    task: _Task, kind: str, slot: int, shape: tuple[int, ...], shapes: Mapping[str, list[tuple[int, ...]]]
) -> tuple[str, int | None]:
    """What W multiplies for an edge of the task, and the FLOPs."""
    if kind in ("handed over", "root"):
        return "", None
    grad = next(iter(shapes.get("output gradient", ())), None)
    if len(shape) < 2 or grad is None:
        return "", 0
    size = math.prod(shape)
    factors = _FACTORS.get(task.name.removesuffix("0"))
    if factors is not None:
        if slot not in factors:
            return "", 0  # the added matrix
        is_left = slot == factors[0]
        inner = grad[-1] if is_left else grad[-2]
        batch = list(shape[:-2])
        left, right = ([*batch, shape[-2], inner], [*batch, inner, shape[-1]])
        return f"{left} @ {right}", 2 * inner * size
    if task.name.startswith("LinearBackward"):
        rows = math.prod(grad[:-1])
        return f"{[shape[0], rows]} @ {[rows, shape[1]]}", 2 * rows * size
    if task.name.startswith("ConvolutionBackward"):
        over = next((s for s in shapes.get("saved", ()) if len(s) == len(grad)), None) if task.transposed else grad
        return "convolution", None if over is None else 2 * size * math.prod(over) // over[1]
    if task.name.startswith("GroupedMmBackward"):
        return "grouped product", 2 * math.prod(shape[-2:]) * grad[0] if len(grad) == 2 and len(shape) == 3 else None
    return "", 0


# The edges of the two factors of products, by node.
_FACTORS = {"AddmmBackward": (1, 2), "MmBackward": (0, 1), "BmmBackward": (0, 1), "BaddbmmBackward": (1, 2)}


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
