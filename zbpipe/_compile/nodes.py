"""The classes of nodes in a traced graph:

free    a view, a constant, arithmetic on sizes. A half that needs it computes it. The cut leaves it out: there a reader
        of a view reads the viewed tensor
light   an elementwise operation, a reduction, a cast. I computes it if I needs it; with `recompute` W may compute it
        once more. Either may compute it if only W needs it
heavy   everything else, products above all. I computes it if I needs it, else W
pinned  a draw of random numbers. I computes it
"""

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from zbpipe._torch import dispatch

CONSTANTS = {
    "arange", "empty", "empty_strided", "eye", "full", "iota", "linspace", "new_empty", "new_empty_strided", "new_full",
    "new_ones", "new_zeros", "ones", "scalar_tensor", "zeros",
}  # fmt: skip
# Operators without the tag "pointwise", and reductions, which only newer releases of torch tag.
LIGHT_NAMES = {
    "_fused_rms_norm", "_fused_rms_norm_backward", "_log_softmax", "_log_softmax_backward_data", "_softmax",
    "_softmax_backward_data", "_to_copy", "all", "amax", "amin", "any", "cat", "clone", "constant_pad_nd",
    "convert_element_type", "empty_like", "flip", "full_like", "gelu_backward", "logsumexp", "max", "mean", "min",
    "native_dropout_backward", "native_group_norm", "native_group_norm_backward", "native_layer_norm",
    "native_layer_norm_backward", "ones_like", "prod", "repeat", "select_backward", "select_scatter",
    "sigmoid_backward", "silu_backward", "slice_backward", "slice_scatter", "std", "sum", "tanh_backward",
    "threshold_backward", "var", "var_mean", "where", "zeros_like",
}  # fmt: skip

FREE, LIGHT, HEAVY, PINNED = "free", "light", "heavy", "pinned"


def classify(node: fx.Node) -> str:
    if node.op == "placeholder":
        return PINNED
    if node.op == "get_attr":
        return FREE
    if not has_tensor(node):  # a size: W must not hold a tensor only to ask for its size
        return LIGHT if any(has_tensor(source) for source in node.all_input_nodes) else FREE
    if node.target is operator.getitem:  # one of several results
        return FREE if is_view(node) else LIGHT
    target: Any = node.target
    if not dispatch.is_operator(target):  # a higher-order operator: cond, a Triton kernel
        return PINNED if "rng" in str(node.target) else HEAVY
    if torch.Tag.nondeterministic_seeded in target.tags:
        return PINNED
    name = dispatch.operator_name(target)  # "mm" of aten.mm.default
    if is_view(node) or (name in CONSTANTS and not any(has_tensor(source) for source in node.all_input_nodes)):
        return FREE
    tags = {str(tag).rsplit(".", 1)[-1] for tag in target.tags}
    return LIGHT if name in LIGHT_NAMES or name in CONSTANTS or tags & {"pointwise", "reduction"} else HEAVY


def behind_free(value: Any) -> list[fx.Node]:
    """The nodes from which free nodes compute `value`; `value` itself, if it is not free."""
    found: dict[fx.Node, None] = {}
    stack, seen = [value] if isinstance(value, fx.Node) else [], set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if classify(node) == FREE:
                stack.extend(node.all_input_nodes)
            else:
                found[node] = None
    return list(found)


def is_view(node: fx.Node) -> bool:
    """True if holding the value would hold another one's memory."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    return dispatch.makes_view(node.target)


def has_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list, dict))


def byte_count(value: Any) -> int | None:
    """A tensor's bytes, at its traced size; 0 for a number; None for a value that I cannot hand to W."""
    if isinstance(value, torch.Tensor):
        count: Any = value.numel()
        size = count if isinstance(count, int) else count.node.hint  # which puts no guard on it
        return (8192 if size is None else int(size)) * value.element_size()
    return 0 if isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)) else None


def above(results: Iterable[Any], within: Collection[fx.Node] | None = None) -> set[fx.Node]:
    """`results` and all nodes that they are computed from; with `within`, only those and the free nodes between."""
    found: set[fx.Node] = set()
    stack = [result for result in results if isinstance(result, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in found and (within is None or node in within or classify(node) == FREE):
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def is_size(node: fx.Node) -> bool:
    """Whether it is a saved size. Both halves take all of them, for their own sizes may be written in these."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
