"""The helpers of ``torch.distributed.pipelining._backward``, under its names.

zbpipe's passes do not use them; torch's stages use some, and so does code that imported them. Names, signatures and
results are those of the replaced module (as of torch 2.15).
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node


def _get_grad_fn_or_grad_acc(t: torch.Tensor | GradientEdge) -> Node | None:
    """The node that gradients of ``t`` reach: its ``grad_fn``, its accumulator, its edge's node."""
    if isinstance(t, GradientEdge):
        return t.node
    if t.requires_grad and t.grad_fn is None:
        return torch.autograd.graph.get_gradient_edge(t).node
    return t.grad_fn


def construct_reverse_graph(roots: list[Node]) -> dict[Node, list[Node]]:
    """For every node that can be reached from ``roots``, the nodes with an edge to it."""
    queue = deque(dict.fromkeys(root for root in roots if root is not None))
    seen = set(queue)
    reverse_edges: dict[Node, list[Node]] = {}
    while queue:
        node = queue.popleft()
        for child, _ in node.next_functions:
            if child is None:
                continue
            reverse_edges.setdefault(child, []).append(node)
            if child not in seen:
                seen.add(child)
                queue.append(child)
    return _ReverseEdges(reverse_edges)


class _ReverseEdges(dict[Node, list[Node]]):
    """As a defaultdict, but asking for a node that has no edges adds none."""

    def __missing__(self, node: Node) -> list[Node]:
        return []


def reverse_closure(
    roots: list[Node], target_nodes: set[Node], reverse_edges_dict: dict[Node, list[Node]]
) -> tuple[set[Node], set[Node]]:
    """The nodes from which ``roots`` can be reached without passing ``target_nodes``.

    Returns:
        The closure, roots included, and the target nodes where it ended.
    """
    closure = {root for root in roots if root is not None}
    reached: set[Node] = set()
    queue = deque(closure)
    while queue:
        for node in reverse_edges_dict[queue.popleft()]:
            if node is None or node in closure:
                continue
            if node in target_nodes:
                reached.add(node)
            else:
                closure.add(node)
                queue.append(node)
    return closure, reached


def get_param_groups(
    inputs: list[Node], params: list[Node], reverse_edges_dict: dict[Node, list[Node]]
) -> list[dict[str, Any]]:
    """The parameter groups as dictionaries of sets: ``"params"`` and ``"intermediates"``.

    Parameters that reach a common split node, directly or through others, are in one group; those
    that reach none are in no group.
    """
    inputs_closure, _ = reverse_closure(inputs, set(), reverse_edges_dict)
    group_of: dict[Node, dict[str, Any]] = {}
    for param in params:
        _, intermediates = reverse_closure([param], inputs_closure, reverse_edges_dict)
        if not intermediates:
            continue
        group: dict[str, Any] = {"params": {param}, "intermediates": intermediates}
        for met in {id(g): g for n in intermediates if (g := group_of.get(n))}.values():
            group["params"] |= met["params"]
            group["intermediates"] |= met["intermediates"]
        group_of.update(dict.fromkeys(group["intermediates"], group))
    return list({id(group): group for group in group_of.values()}.values())


def _autograd_grad_for_inputs(
    outputs: Sequence[torch.Tensor | GradientEdge],
    inputs: Sequence[Any],
    grad_outputs: Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad`` with None for inputs that are no tensor or require no gradient, and where no output does.

    A stage learns from it what its inputs' gradients look like, and takes None for "like the inputs": the first
    microbatch's loss may be constant.
    """
    wanted = [i for i in inputs if isinstance(i, torch.Tensor) and i.requires_grad]
    if not wanted or not any(isinstance(o, GradientEdge) or o.requires_grad for o in outputs):
        return (None,) * len(inputs)
    grads = torch.autograd.grad(
        outputs=outputs,  # type: ignore[arg-type]
        inputs=wanted,
        grad_outputs=grad_outputs,
        retain_graph=retain_graph,
        allow_unused=allow_unused,
    )
    given = iter(grads)
    return tuple(next(given) if isinstance(i, torch.Tensor) and i.requires_grad else None for i in inputs)


def _null_coalesce_accumulate(lhs: Any, rhs: Any) -> Any:
    """``lhs + rhs``, where None stands for zero."""
    if lhs is None:
        return rhs
    if rhs is None:
        return lhs
    return torch.add(lhs, rhs)
