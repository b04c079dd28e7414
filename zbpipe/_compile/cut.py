"""Where a traced backward graph is cut between I and W.

Note [The cut]
W must compute the products of the deferred gradients, and I all that the other gradients need. Either could compute the
operations in between. I hands W the values along the cut. A minimum cut has the fewest bytes, and of such cuts it is
the one that leaves the most to W. So W reads the two matrices of each product, or smaller values from which cheap
operations that I does not need compute them. I computes a vector's gradient where W would read more than a vector for
it. A parameter counts as any tensor, for W gets a copy: fully_shard frees gathered weights after I.

The classes of nodes are in nodes.py.
"""

import operator
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from zbpipe._compile.nodes import FREE, LIGHT, PINNED, above, behind_free, byte_count, classify


class CannotSplitError(Exception):
    """The graph cannot be split; the message says why, to be read after "is not split: "."""


def computed_by_w(
    graph: fx.Graph, outputs: Sequence[Any], deferred: Collection[int], everything: bool, recompute: bool
) -> set[fx.Node]:
    """The nodes that W computes, without free ones: a side of the minimum cut of a flow network of networkx.

    I is given or computes the nodes on the source's side; W computes those on the sink's side. A second node behind
    each has the cost of holding its value, which is paid once for all readers in W.
    """
    import networkx  # type: ignore[import-untyped]  # which torch needs, and imports late itself

    for_i = above(out for i, out in enumerate(outputs) if i not in deferred)
    results = {node for i in deferred for node in behind_free(outputs[i])}
    for_w = above(results)
    order = [node for node in graph.nodes if node in for_w and classify(node) != FREE]
    byte = 2 * len(order) + 1  # outweighs all preferences together
    flow = networkx.DiGraph()
    flow.add_nodes_from(["I", "W"])

    def connect(a: Any, b: Any, capacity: int | None = None) -> None:  # of None: without a limit
        flow.add_edge(a, b, **({} if capacity is None else {"capacity": capacity}))

    for node in order:
        kind = classify(node)
        if kind == PINNED:
            connect("I", node)
        elif node in for_i:
            connect("I", node, 1 if recompute and kind == LIGHT else None)
        elif node.target is not operator.getitem:  # which goes with what it is taken from
            connect(node, "W", 1 if not everything and kind == LIGHT else None)
        cost = byte_count(node.meta.get("val"))
        connect(node, ("holding", node), None if cost is None else cost * byte)
        for source in {source for read in node.all_input_nodes for source in behind_free(read)}:
            connect(("holding", source), node)
            if source not in for_i:
                connect(node, source)  # if I computes `node`, it computes `source`, too
    for node in results:
        connect(("holding", node), "W")
    try:
        _, (_, by_w) = networkx.minimum_cut(flow, "I", "W")
    except networkx.NetworkXUnbounded:
        raise CannotSplitError("random numbers are drawn between the products of its weights") from None
    return {node for node in order if node in by_w}
