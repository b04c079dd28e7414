"""Splits a traced backward graph into the input pass's half and the weight pass's half."""

import copy
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zbpipe._compile.cut import CannotSplitError, computed_by_w
from zbpipe._compile.nodes import HEAVY, above, behind_free, classify, is_size
from zbpipe._torch import dispatch

aten = torch.ops.aten


@dataclass(frozen=True)
class Halves:
    """The halves of a backward graph. Positions are those of the whole graph's inputs and outputs."""

    input_half: fx.GraphModule  # returns the gradients of `input_outputs`, then the values that it keeps for W
    weight_half: fx.GraphModule  # takes the inputs of `weight_inputs`, then those values; returns `weight_outputs`
    input_inputs: tuple[int, ...]
    input_outputs: tuple[int, ...]
    weight_inputs: tuple[int, ...]
    weight_outputs: tuple[int, ...]
    output_count: int
    kept_count: int  # values that the input half keeps for W


def split(
    backward: fx.GraphModule,
    deferred: Collection[int],
    *,
    everything: bool = False,
    recompute: bool = False,
) -> Halves:
    """Splits a copy of `backward`; see Note [The cut].

    Args:
        backward: a graph of aten operations without side effects, whose nodes have ``meta["val"]``.
        deferred: positions of the outputs that W may compute. I computes some of them where that holds less; they are
            then in ``input_outputs`` of the result.
        everything: W computes all that I does not need, even where its result has fewer bytes than W reads for it.
        recompute: W may repeat light operations of I where that holds less.

    Raises:
        CannotSplitError: the graph has side effects, or W would be left without a product.
    """
    graph = copy.deepcopy(backward.graph)
    outputs: Any = graph.output_node().args[0]
    separate_fused_gradients(graph, outputs, deferred)
    outputs = graph.output_node().args[0]
    refuse_side_effects(graph)
    by_w = computed_by_w(graph, outputs, deferred, everything, recompute)
    weight_outputs = [i for i in sorted(deferred) if any(node in by_w for node in behind_free(outputs[i]))]
    if not any(classify(node) == HEAVY for node in above((outputs[i] for i in weight_outputs), within=by_w)):
        raise CannotSplitError("no gradient of a weight is a product of its own")
    return build(backward, graph, outputs, weight_outputs, by_w)


def refuse_side_effects(graph: fx.Graph) -> None:
    for node in graph.nodes:
        target = node.target
        if dispatch.is_mutable(target):
            raise CannotSplitError(f"its backward changes a tensor in place ({target})")
        if dispatch.has_effects(target):
            raise CannotSplitError("its backward has ordered side effects")


def separate_fused_gradients(graph: fx.Graph, outputs: Sequence[Any], deferred: Collection[int]) -> None:
    """Gives each half a node of its own for a convolution's backward, which is one node for all gradients."""
    by_i = above(out for i, out in enumerate(outputs) if i not in deferred)
    for node in list(graph.nodes):
        if node.target is not aten.convolution_backward.default or node not in by_i:
            continue
        ours = [user for user in node.users if user not in by_i]
        if not ours or any(user.target is not operator.getitem for user in node.users):
            continue
        wanted = {int(user.args[1]) for user in ours}
        with graph.inserting_after(node):
            copied = graph.node_copy(node, lambda argument: argument)
        set_mask(copied, [k in wanted for k in range(3)])
        set_mask(node, [k in {int(user.args[1]) for user in node.users if user in by_i} for k in range(3)])
        for user in ours:
            user.replace_input_with(node, copied)


def set_mask(node: fx.Node, wanted: list[bool]) -> None:
    *rest, mask = node.args
    assert isinstance(mask, (list, tuple))
    node.args = (*rest, [bool(given) and want for given, want in zip(mask, wanted, strict=True)])


def build(
    backward: fx.GraphModule, graph: fx.Graph, outputs: Sequence[Any], weight_outputs: Sequence[int], by_w: set[fx.Node]
) -> Halves:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    weight_results = [outputs[i] for i in weight_outputs]
    by_w = above(weight_results, within=by_w)
    read = {source for node in by_w for source in node.all_input_nodes} - by_w
    kept = [node for node in graph.nodes if node in read and node.op != "placeholder"]
    input_outputs = [i for i in range(len(outputs)) if i not in weight_outputs]
    input_results = [*(outputs[i] for i in input_outputs), *kept]
    by_i = above(input_results)
    input_inputs = [i for i, node in enumerate(placeholders) if node in by_i or is_size(node)]
    weight_inputs = [i for i, node in enumerate(placeholders) if node in read or is_size(node)]
    return Halves(
        input_half=extract(backward, graph, [placeholders[i] for i in input_inputs], by_i, input_results),
        weight_half=extract(backward, graph, [*(placeholders[i] for i in weight_inputs), *kept], by_w, weight_results),
        input_inputs=tuple(input_inputs),
        input_outputs=tuple(input_outputs),
        weight_inputs=tuple(weight_inputs),
        weight_outputs=tuple(weight_outputs),
        output_count=len(outputs),
        kept_count=len(kept),
    )


def extract(
    backward: fx.GraphModule, graph: fx.Graph, inputs: Sequence[fx.Node], nodes: set[fx.Node], results: Sequence[Any]
) -> fx.GraphModule:
    """`nodes` of `graph`, from `inputs` to `results`, as a module of their own."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = part.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node in nodes and node not in copies:
            copies[node] = part.node_copy(node, lambda source: copies[source])
    part.output([copies[result] if isinstance(result, fx.Node) else result for result in results])
    part.lint()
    return fx.GraphModule(backward, part)
