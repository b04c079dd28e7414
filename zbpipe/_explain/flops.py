"""FLOPs of what W runs beside its products: nodes between these and the parameters, and backwards that are whole in W.

They are counted by running them once, on zeros, under a dispatch mode. torch's FlopCounterMode has the formulas, but
multiplies what a grouped convolution's weight costs by the number of groups, and takes operators without a formula for
free, attention on the CPU and grouped products among them. Here these two have one, and another one makes the sum
unknown, if its name says that it multiplies matrices or if it is not torch's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils.flop_counter import flop_registry

from zbpipe._torch import autograd, dispatch


@dataclass
class Computed:
    """What W runs for a group beside its products: ``flops``, without the nodes or operators that ``unknown`` names.
    ``on_the_way`` has per parameter's id the nodes on its way that multiply: name, FLOPs, None if unknown."""

    flops: int = 0
    unknown: list[str] = field(default_factory=list)
    on_the_way: dict[int, list[tuple[str, int | None]]] = field(default_factory=dict)


def count(edges: Sequence[GradientEdge], parameters: Mapping[int, torch.Tensor], *, apart: bool) -> Computed:
    """Runs what leads from ``edges`` to the parameters (by id). The graph can run again afterwards. ``on_the_way`` is
    filled if ``apart``."""
    found = Computed()
    nodes = list(_behind(edge.node for edge in edges))
    weights = [parameters[id(v)] for v in map(_variable, nodes) if id(v) in parameters]
    if not weights or all(node.name().rstrip("0123456789") in _FREE for node in nodes):
        return found
    if any(type(weight).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for weight in weights):
        return _unknown("nodes of a tensor subclass", weights)
    if foreign := sorted({node.name() for node in nodes if _is_foreign(node)}):
        return _unknown(", ".join(foreign), weights)
    counter = _Counter()
    try:
        with counter:
            torch.autograd.grad(edges, weights, [_zeros(edge) for edge in edges], retain_graph=True, allow_unused=True)
    except Exception as error:  # of a node that does not run on zeros, or not under a mode
        return _unknown(f"it raised a {type(error).__name__}: {error}", weights)
    found.flops = sum(flops for _, flops in counter.nodes.items())
    found.unknown = sorted({name for name, _ in counter.unknown})
    if apart:
        for node, flops in counter.nodes.items():
            if flops:
                _share(found, node, flops, parameters)
        for name, node in counter.unknown:
            for i in _parameters_behind([node], parameters):
                found.on_the_way.setdefault(i, []).append((name, None))
    return found


def _unknown(what: str, weights: Iterable[torch.Tensor]) -> Computed:
    return Computed(unknown=[what], on_the_way={id(weight): [(what, None)] for weight in weights})


def _share(found: Computed, node: Node | None, flops: int, parameters: Mapping[int, torch.Tensor]) -> None:
    """The gradients of a product's two factors cost the same; of other nodes nothing is known apart."""
    if node is None:
        return
    edges = [follower for follower, _ in node.next_functions]
    slots = FACTORS.get(node.name().removesuffix("0"))
    shared = [[edges[slot]] for slot in slots] if slots else [edges]
    behind = [_parameters_behind(part, parameters) for part in shared]
    computed = [ids for ids in behind if ids]
    for ids in computed:
        for i in ids:
            found.on_the_way.setdefault(i, []).append((node.name(), flops // len(computed)))


FACTORS = {
    "AddmmBackward": (1, 2),
    "MmBackward": (0, 1),
    "BmmBackward": (0, 1),
    "BaddbmmBackward": (1, 2),
    "LinearBackward": (0, 1),
    "ConvolutionBackward": (0, 1),
    "GroupedMmBackward": (0, 1),
}
"""The edges of a product's two factors, by its node's name without the 0 at its end."""

# These multiply no matrices, whatever their shapes are; they need not run.
_FREE = {
    *("torch::autograd::AccumulateGrad", "TBackward", "ToCopyBackward", "TransposeBackward", "PermuteBackward"),
    *("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "UnsqueezeBackward", "SqueezeBackward"),
    *("ExpandBackward", "AliasBackward", "CloneBackward", "AddBackward", "SubBackward", "MulBackward"),
}


def _behind(nodes: Iterable[Node | None]) -> Iterator[Node]:
    """The nodes and all that follow them, each once."""
    seen: set[Node] = set()
    pending = [node for node in nodes if node is not None]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending.extend(follower for follower, _ in node.next_functions if follower is not None)


def _parameters_behind(nodes: Iterable[Node | None], parameters: Mapping[int, torch.Tensor]) -> set[int]:
    return {id(v) for v in map(_variable, _behind(nodes)) if id(v) in parameters}


def _variable(node: Node) -> torch.Tensor | None:
    return node.variable if node.name() == "torch::autograd::AccumulateGrad" else None  # type: ignore[attr-defined]


def _is_foreign(node: Node) -> bool:
    """Its kernels need not be torch's: a Function in Python or C++, a compiled backward."""
    return issubclass(type(node), torch.autograd.function.BackwardCFunction) or "CppNode" in node.name()


def _zeros(edge: GradientEdge) -> torch.Tensor:
    return autograd.zeros_for(edge.node, edge.output_nr)


class _Counter(dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: dict[Node | None, int] = {}
        self.unknown: set[tuple[str, Node | None]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = dispatch.packet_of(func)
        if packet in _QUESTIONS:
            return NotImplemented  # the subclass answers
        formula = _FORMULAS.get(packet) or flop_registry.get(packet)
        if formula is None:
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        result = func(*args, **kwargs)
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=result)
            if packet is torch.ops.aten.convolution_backward:
                flops -= _counted_too_often(*args, **kwargs)
            node = autograd.running_node()
            self.nodes[node] = self.nodes.get(node, 0) + flops
        elif _may_multiply(func):
            self.unknown.add((str(packet), autograd.running_node()))
        return result


def _grouped_mm_flops(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """Two matrices of which the offsets cut rows, columns or the inner dimension, or batches of matrices."""
    batch = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return int(2 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1])


_aten = torch.ops.aten
_FORMULAS = {
    dispatch.GROUPED_MM: _grouped_mm_flops,
    dispatch.ATTENTION_ON_CPU: flop_registry[dispatch.ATTENTION],
    dispatch.ATTENTION_BACKWARD_ON_CPU: flop_registry[dispatch.ATTENTION_BACKWARD],
}
# Of tensors whose subclass says what their shapes are.
_QUESTIONS = {
    *(_aten.size, _aten.sym_size, _aten.stride, _aten.sym_stride, _aten.numel, _aten.sym_numel, _aten.dim),
    *(_aten.storage_offset, _aten.sym_storage_offset, _aten.is_contiguous, _aten.sym_is_contiguous),
    *(_aten.is_strides_like_format, _aten.is_non_overlapping_and_dense, torch.ops.prim.layout, torch.ops.prim.device),
}


def _counted_too_often(grad: Any, x: Any, weight: Any, *rest: Any) -> int:
    """By torch's formula, of the gradient of a grouped convolution's weight."""
    _, _, _, _, transposed, _, groups, output_mask = rest
    over = (x if transposed else grad).shape
    return 2 * weight.numel() * over[0] * math.prod(over[2:]) * (groups - 1) if output_mask[1] else 0


def _may_multiply(func: Any) -> bool:
    if func.namespace not in ("aten", "prim", "prims", "c10d", "_c10d_functional"):
        return True
    name = dispatch.operator_name(func)
    return _PRODUCT.search(name) is not None and not name.startswith(("upsample", "_upsample", "_thnn_fused"))


_PRODUCT = re.compile(
    r"(^|_)(\w*mm|\w*mv|v?dot|ger|addr|inner|kron|matmul|linear|bilinear|trilinear|conv\w*|linalg|rnn|lstm|gru"
    r"|attention|cdist|solve|cholesky|inverse|svd|eigh?|qr|lu|det|slogdet)(_|$|\d)"
)


class Task(Protocol):
    """A weight task, as the C part plans it."""

    @property
    def name(self) -> str: ...

    @property
    def transposed(self) -> bool: ...


def of_product(
    task: Task, kind: str, slot: int, shape: tuple[int, ...], shapes: Mapping[str, list[tuple[int, ...]]]
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
