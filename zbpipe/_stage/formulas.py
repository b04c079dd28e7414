"""The formulas by which I and W compute gradients apart, tried on tiny graphs beside an ordinary backward.

The first table has an entry per type in csrc/shim/torch/separable.cpp, the second one per type in is_layout
(csrc/shim/group/facts.cpp). Numbers are small and whole, so that sums are exact in any order; norms are compared to a
tolerance.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from zbpipe import _C
from zbpipe._policy import Policy
from zbpipe._torch import autograd

_ONE, _TWO = (1, 2, 4), (3, 5, 6)


class Case(NamedTuple):
    """A tiny graph, made once for each choice of the leaves for I; W has the others. ``blamed`` is the node type that
    is at fault if it is not right. Each type has each choice in one of its cases."""

    blamed: str
    leaves: tuple[tuple[int, ...], ...]  # their shapes
    output: Callable[..., torch.Tensor]  # of the leaves
    choices: tuple[int, ...] = (1, 2)  # each has a bit per leaf that I computes
    dtype: torch.dtype = torch.float64  # which no library of kernels takes over
    is_rounded: bool = False


def _offsets() -> torch.Tensor:
    return torch.arange(1, 9, 3, dtype=torch.int32, device="cpu")  # of groups with 1, 3 and 3 rows


_SUM = ((2, 3, 2), (2, 3, 4), (2, 4, 2))

# What a node of each split type has saved: a formula that reads more is another one.
SAVED = {
    "AddmmBackward0": "mat1 mat2",
    "MmBackward0": "mat2 self",
    "BmmBackward0": "mat2 self",
    "BaddbmmBackward0": "batch1 batch2",
    "GroupedMmBackward0": "mat2 offs self",
    "LinearBackward0": "input weight",
    "ConvolutionBackward0": "input weight",
    "NativeLayerNormBackward0": "bias input result1 result2 weight",
    "FusedRmsNormBackward0": "input result1 weight",
    "NativeGroupNormBackward0": "input result1 result2 weight",
    "MulBackward0": "other self",
    "AddBackward0": "",
    "SubBackward0": "",
}

# A CPU computes no LinearBackward0 and no FusedRmsNormBackward0.
APART = (
    Case("AddmmBackward0", ((2,), (3, 4), (4, 2)), lambda b, x, w: b.addmm(x, w), _ONE),
    Case("AddmmBackward0", ((3, 2), (4, 3), (4, 2)), lambda b, x, w: b.addmm(x.t(), w, beta=2, alpha=3), _TWO),
    Case("MmBackward0", ((3, 4), (4, 2)), lambda x, w: x.mm(w)),
    # W lets the nodes of complex products compute.
    Case("MmBackward0", ((3, 4), (4, 2)), lambda x, w: x.mm(w), dtype=torch.complex128),
    Case("BmmBackward0", _SUM[1:], lambda x, w: x.bmm(w)),
    Case("BmmBackward0", _SUM[1:], lambda x, w: x.bmm(w), dtype=torch.complex128),
    Case("BaddbmmBackward0", _SUM, lambda b, x, w: b.baddbmm(x, w), _ONE),
    Case("BaddbmmBackward0", _SUM, lambda b, x, w: b.baddbmm(x, w, beta=2, alpha=3), _TWO),
    Case(
        "GroupedMmBackward0",
        ((7, 4), (3, 4, 8)),
        lambda x, w: autograd.grouped_mm(x, w, _offsets()),
        dtype=torch.float32,
    ),
    Case("GroupedMmBackward0", ((2, 3, 4), (2, 4, 8)), lambda x, w: autograd.grouped_mm(x, w), dtype=torch.float32),
    Case(
        "ConvolutionBackward0",
        ((2, 4, 5), (6, 2, 3), (6,)),
        lambda x, w, b: torch.conv1d(x, w, b, stride=2, padding=1, groups=2),
        _ONE,
    ),
    Case(
        "ConvolutionBackward0",
        ((1, 2, 3, 3), (2, 3, 2, 2), (3,)),
        lambda x, w, b: torch.conv_transpose2d(x, w, b, stride=2, output_padding=1, dilation=2),
        _TWO,
    ),
    Case("ConvolutionBackward0", ((1, 2, 4), (3, 2, 2)), lambda x, w: torch.conv1d(x, w)),
    Case(
        "NativeLayerNormBackward0",
        ((3, 4), (4,), (4,)),
        lambda x, w, b: torch.native_layer_norm(x, [4], w, b, 1e-5)[0],
        _ONE + _TWO,
        is_rounded=True,
    ),
    Case(
        "NativeGroupNormBackward0",
        ((2, 4, 3), (4,), (4,)),
        lambda x, w, b: torch.native_group_norm(x, w, b, 2, 4, 3, 2, 1e-5)[0],
        _ONE + _TWO,
        is_rounded=True,
    ),
    Case("MulBackward0", ((3, 4), (4,)), lambda x, w: x * w),
    Case("AddBackward0", ((3, 4), (4,)), lambda x, w: torch.add(x, w, alpha=2)),
    Case("SubBackward0", ((3, 4), (4,)), lambda x, w: torch.sub(x, w, alpha=2)),
)


def _way(blamed: str, shape: tuple[int, ...], way: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    """A matrix of 4 x 2 that comes from a weight by a node of this type."""
    return Case(blamed, ((3, 4), shape), lambda x, w: x.mm(way(w)), (1,))


WAYS = (
    _way("TBackward0", (2, 4), lambda w: w.t()),
    _way("TransposeBackward0", (2, 4), lambda w: w.transpose(0, -1)),
    _way("TransposeBackward0", (2, 1, 4), lambda w: w.transpose(0, 2).reshape(4, 2)),
    Case("TransposeBackward0", ((2, 3, 4), (2, 2, 4)), lambda x, w: x.bmm(w.transpose(-1, 1)), (1,)),
    _way("PermuteBackward0", (2, 4), lambda w: w.permute(1, -2)),
    _way("PermuteBackward0", (2, 4, 1), lambda w: w.permute(2, 1, 0).reshape(4, 2)),
    _way("ToCopyBackward0", (4, 2), lambda w: w.to(torch.float32).to(torch.float64)),
    _way("ViewBackward0", (2, 4), lambda w: w.view(4, 2)),
    _way("UnsafeViewBackward0", (2, 4), lambda w: autograd.unsafe_view(w, (4, 2))),
    _way("ReshapeAliasBackward0", (2, 4), lambda w: autograd.reshape_alias(w, (4, 2), (2, 1))),
    _way("UnsqueezeBackward0", (4,), lambda w: w.unsqueeze(1)),
    _way("SqueezeBackward0", (1, 4, 2), lambda w: w.squeeze()),
    _way("SqueezeBackward1", (1, 4, 2), lambda w: w.squeeze(0)),
    _way("SqueezeBackward2", (1, 4, 1, 2), lambda w: w.squeeze((0, 2))),
    _way("ExpandBackward0", (4, 1), lambda w: w.expand(4, 2)),
    _way("AliasBackward0", (4, 2), torch.ops.aten.alias),
    _way("CloneBackward0", (4, 2), lambda w: w.clone()),
)


def disagreeing() -> dict[str, str]:
    """The types that this torch computes otherwise than zbpipe, each with a clause that says how. All cases are split
    by one I and one W."""
    found = {
        node_type: f"has saved {' '.join(names) or 'nothing'} where zbpipe knows {known or 'nothing'}"
        for node_type, known in (SAVED | {case.blamed: "" for case in WAYS}).items()
        if (names := autograd.names_saved_by(node_type)) is not None and " ".join(names) != known
    }
    numbers = torch.arange(1, 97, dtype=torch.float64, device="cpu").remainder_(7).sub_(3)
    for blamed, how in _tried([*APART, *WAYS], numbers):  # the ways come last, and lead to products
        if blamed in SAVED or not found.keys() & {"MmBackward0", "BmmBackward0"}:
            found.setdefault(blamed, how)
    return found


def _tried(cases: list[Case], numbers: torch.Tensor) -> list[tuple[str, str]]:
    """What is wrong, or raises. One after the other only if that must be found out."""
    try:
        return list(_differing([graph for case in cases for graph in _graphs(case, numbers)]))
    except Exception as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate" in str(error):
            raise
        if len(cases) == 1:
            return [(cases[0].blamed, f"raises {error!r} where zbpipe's formula is tried")]
        found = [_tried([case], numbers) for case in cases]
        if all(found):
            raise  # it is not theirs
        return [each for one in found for each in one]


class _Graph(NamedTuple):
    case: Case
    choice: int
    leaves: list[torch.Tensor]
    output: torch.Tensor


def _graphs(case: Case, numbers: torch.Tensor) -> Iterator[_Graph]:
    """The case's; none if this torch does not compute it there."""
    numbers = numbers.to(case.dtype)
    with contextlib.suppress(NotImplementedError):
        for choice in case.choices:
            leaves = [numbers[: math.prod(shape)].view(shape).requires_grad_() for shape in case.leaves]
            yield _Graph(case, choice, leaves, case.output(*leaves))


def _differing(graphs: list[_Graph]) -> Iterator[tuple[str, str]]:
    outputs = [graph.output for graph in graphs]
    grads = [torch.ones_like(output).cumsum_(-1) for output in outputs]
    ordinary = iter(autograd.run_backward(outputs, grads, [leaf for graph in graphs for leaf in graph.leaves]))
    given: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for graph in graphs:
        for place, leaf in enumerate(graph.leaves):
            given[graph.choice >> place & 1].append(leaf)
    weights, values = given
    _C.weight_pass(split(outputs, grads, values, weights), False, Policy())
    for graph in graphs:
        for leaf in graph.leaves:
            if not _agree(leaf.grad, next(ordinary), graph.case.is_rounded):
                yield graph.case.blamed, "gives another gradient than zbpipe's formula"


def split(
    outputs: Iterable[torch.Tensor],
    grads: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor],
    weights: Iterable[torch.Tensor],
) -> tuple[_C.ParamGroup, ...]:
    """What an I that defers all leaves to W."""
    result = _C.input_pass(tuple(outputs), tuple(grads), tuple(inputs), tuple(weights), Policy(defer="all"))
    if isinstance(result, Exception):
        raise result
    return tuple(result[1])


def _agree(ours: torch.Tensor | None, theirs: torch.Tensor, is_rounded: bool) -> bool:
    if ours is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if is_rounded:
        pairs = zip(ours.flatten().tolist(), theirs.flatten().tolist(), strict=True)
        return all(math.isclose(one, other, abs_tol=1e-9) for one, other in pairs)
    return torch.equal(ours, theirs)
