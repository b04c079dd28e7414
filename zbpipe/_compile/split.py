"""Splits a traced backward graph into the input pass's half and the weight pass's half.

Note [The cut]
W must compute the products that give the deferred gradients, I all that the other gradients need. In between lies
what either could compute, and what I hands to W is the set of values along the cut. It is chosen by a minimum cut:
the fewest bytes; among those the one that leaves the most to W. So W reads the two matrices of each product, or what is
smaller and gives them by cheap steps that I does not need; and where a vector's gradient needs more than the vector, I
computes it. A parameter counts as any tensor, for W is given a copy: fully_shard frees what it has gathered after I.

Each node of the graph is of one of these classes:

    free    views, constants, arithmetic on sizes: a half that needs one computes it; not part of the cut, in which what
            reads a view reads what is viewed
    light   elementwise operations, reductions, casts: what only W needs may be computed by either; what I needs, by I,
            and if `recompute` says so by W once more
    heavy   everything else, products above all: what I needs by I, what only W needs by W, never twice
    pinned  what draws random numbers: by I
"""

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zbpipe._torch import dispatch

aten = torch.ops.aten

CONSTANTS = {
    "arange", "empty", "empty_strided", "eye", "full", "iota", "linspace", "new_empty", "new_empty_strided", "new_full",
    "new_ones", "new_zeros", "ones", "scalar_tensor", "zeros",
}  # fmt: skip
# Those that have no tag "pointwise"; and reductions, which have a tag in newer releases of torch only.
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


class CannotSplitError(Exception):
    """The graph cannot be split; the message says why, to be read after "is not split: "."""


@dataclass(frozen=True)
class Halves:
    """A backward graph in two. Values are numbered as the whole graph's inputs and outputs are."""

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
    """Split `backward`; see Note [The cut]. It is left as it is.

    Args:
        backward: a graph of aten operations without side effects, whose nodes have ``meta["val"]``.
        deferred: the outputs that W is to compute, by position. Those that I computes all the same, because that
            holds less, are among ``input_outputs`` of the result.
        everything: W computes all that I does not need, even where holding its result would be less.
        recompute: W may compute light operations once more that I computes too, where that holds less.

    Raises:
        CannotSplitError: the graph has side effects, or W would be left without a product.
    """
    graph = fx.Graph()
    results: Any = graph.graph_copy(backward.graph, {})
    graph.output(results)
    separate_fused_gradients(graph, list(results), deferred)
    outputs = list(next(iter(reversed(graph.nodes))).args[0])
    refuse_side_effects(graph)
    by_w = Cut(graph, outputs, deferred, everything, recompute).solve()
    weight_outputs = [i for i in sorted(deferred) if any(node in by_w for node in behind_free(outputs[i]))]
    if not any(classify(node) == HEAVY for node in above((outputs[i] for i in weight_outputs), within=by_w)):
        raise CannotSplitError("no gradient of a weight is a product of its own")
    return build(backward, graph, outputs, weight_outputs, by_w)


def classify(node: fx.Node) -> str:
    if node.op == "placeholder":
        return PINNED
    if node.op == "get_attr":
        return FREE
    if not has_tensor(node):  # a size: asking a tensor for it must not make W hold the tensor
        return LIGHT if any(has_tensor(source) for source in node.all_input_nodes) else FREE
    if node.target is operator.getitem:  # one of several results
        return FREE if is_view(node) else LIGHT
    target: Any = node.target
    if not dispatch.is_operator(target):  # a higher-order operator: cond, a Triton kernel
        return PINNED if "rng" in str(node.target) else HEAVY
    if torch.Tag.nondeterministic_seeded in target.tags:
        return PINNED
    name = base_name(node)
    if is_view(node) or (name in CONSTANTS and not any(has_tensor(source) for source in node.all_input_nodes)):
        return FREE
    tags = {str(tag).rsplit(".", 1)[-1] for tag in target.tags}
    return LIGHT if name in LIGHT_NAMES or name in CONSTANTS or tags & {"pointwise", "reduction"} else HEAVY


def behind_free(value: Any) -> list[fx.Node]:
    """What `value` is computed from, past free nodes: itself, if it is not free."""
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


def base_name(node: fx.Node) -> str:
    """Of an OpOverload: "mm" of aten.mm.default."""
    return dispatch.operator_name(node.target)


def is_view(node: fx.Node) -> bool:
    """True if holding the value would hold another one's memory."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    return dispatch.makes_view(node.target)


def has_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def byte_count(value: Any) -> int | None:
    """The bytes of a tensor (of its size when it was traced, if that is symbolic); 0 of a number, None of what cannot
    be handed over."""
    if isinstance(value, torch.Tensor):
        return number(value.numel()) * value.element_size()
    return 0 if isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)) else None


def number(size: int | torch.SymInt) -> int:
    """A size without a guard on it."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 8192 if hint is None else int(hint)


def refuse_side_effects(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise CannotSplitError(f"its backward has the node {node.format_node()}")
        target = node.target
        if dispatch.is_mutable(target):
            raise CannotSplitError(f"its backward changes a tensor in place ({target})")
        if dispatch.has_effects(target):
            raise CannotSplitError("its backward has ordered side effects")


def above(results: Iterable[Any], within: Collection[fx.Node] | None = None) -> set[fx.Node]:
    """`results` and all that they are computed from; `within`: only those of these nodes and free ones between them."""
    found: set[fx.Node] = set()
    stack = [result for result in results if isinstance(result, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in found and (within is None or node in within or classify(node) == FREE):
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def separate_fused_gradients(graph: fx.Graph, outputs: list[Any], deferred: Collection[int]) -> None:
    """A convolution's backward gives all its gradients in one node: give each half a node of its own."""
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


class Cut:
    """The minimum cut, over all nodes that W's results need but the free ones, as a flow network of networkx.

    A node on the source's side is given to I or computed by it, one on the sink's side is computed by W. Between a node
    and those that read it stands another one, so that holding it is paid once however many nodes of W read it.
    """

    def __init__(
        self,
        graph: fx.Graph,
        outputs: Sequence[Any],
        deferred: Collection[int],
        everything: bool,
        recompute: bool,
    ) -> None:
        self.for_i = above(out for i, out in enumerate(outputs) if i not in deferred)
        self.results = {node for i in deferred for node in behind_free(outputs[i])}
        for_w = above(self.results)
        self.order = [node for node in graph.nodes if node in for_w and classify(node) != FREE]
        self.everything = everything
        self.recompute = recompute

    def solve(self) -> set[fx.Node]:
        """The nodes that W computes, but for free ones."""
        import networkx  # type: ignore[import-untyped]  # which torch needs, and imports late itself

        flow = networkx.DiGraph()
        flow.add_nodes_from(["I", "W"])
        byte = 2 * len(self.order) + 1  # outweighs all preferences together
        for node in self.order:
            self.place(flow, node)
            cost = byte_count(node.meta.get("val"))
            connect(flow, node, ("holding", node), None if cost is None else cost * byte)
            for source in {source for read in node.all_input_nodes for source in behind_free(read)}:
                connect(flow, ("holding", source), node)
                if source not in self.for_i:
                    connect(flow, node, source)  # if it is I that computes the one, then the other too
        for node in self.results:
            connect(flow, ("holding", node), "W")
        try:
            _, (_, by_w) = networkx.minimum_cut(flow, "I", "W")
        except networkx.NetworkXUnbounded:
            raise CannotSplitError("random numbers are drawn between the products of its weights") from None
        return {node for node in self.order if node in by_w}

    def place(self, flow: Any, node: fx.Node) -> None:
        """Says who may compute `node`, and which of the two is preferred."""
        kind = classify(node)
        if kind == PINNED:
            connect(flow, "I", node)
        elif node in self.for_i:
            connect(flow, "I", node, 1 if self.recompute and kind == LIGHT else None)
        elif node.target is not operator.getitem:  # which goes with what it is taken from
            connect(flow, node, "W", 1 if not self.everything and kind == LIGHT else None)


def connect(flow: Any, a: Any, b: Any, capacity: int | None = None) -> None:
    """None: without limit, as networkx has it."""
    flow.add_edge(a, b, **({} if capacity is None else {"capacity": capacity}))


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


def is_size(node: fx.Node) -> bool:
    """A size that was saved: both halves take it, for their sizes may be written in it."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


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
