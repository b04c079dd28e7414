"""The input pass, the weight pass and the whole backward, in the place of ``torch.distributed.pipelining._backward``.

Names, signatures and results are those of torch's functions (as of torch 2.15): no caller has to change.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbpipe import _C
from zbpipe._formatting import argument, described
from zbpipe._policy import get_policy
from zbpipe._stage import backward, fsdp, handover, inner, scale
from zbpipe._stage.input_pass import BackwardError, input_pass

ParamGroup = _C.ParamGroup
Grads = tuple[torch.Tensor | None, ...]

# Set by zbpipe.memory while it records: runs a pass, given "I", "W" or "B" (a whole backward), function and arguments.
# Read once a pass, for a recording may end on another thread.
observer: Callable[..., Any] | None = None


def stage_backward_input(
    stage_outputs_or_loss: Sequence[torch.Tensor | GradientEdge | None],
    output_grads: Sequence[torch.Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[torch.Tensor] | None,
) -> tuple[Grads, list[ParamGroup]]:
    """The input pass (I): computes the gradients of the stage's inputs, and keeps what the weight pass (W) needs.

    Args:
        stage_outputs_or_loss: the stage's outputs or losses: tensors of any shape, or a
            ``torch.autograd.graph.GradientEdge`` for a tensor whose memory is gone. None and tensors that require no
            gradient are skipped. Give all losses of one forward in one call: the call consumes the graph.
        output_grads: one gradient per output, of its shape, dtype and device. None means that an output has no
            gradient; for a scalar it means 1, as in autograd. None in place of the list means ones for all.
        input_values: the stage's inputs, at which I stops. Of an operation with several outputs (unbind, split), I
            stops only at the outputs that are listed. An entry that is no tensor, or requires no gradient, gets None.
        weights: the leaves whose gradients W computes; None for all leaves. Other leaves are left alone. A patched
            stage asks for all leaves, as an ordinary backward does, whatever its module lists.

    Returns:
        ``(dinputs, param_groups)``. ``dinputs`` has one entry per input: its gradient, of its shape, dtype and device,
        or None. ``param_groups`` go to :func:`stage_backward_weight`, in any order and any subsets. I also adds each
        gradient to its input's ``.grad``, leaves the weights' ``.grad`` alone, and detaches the outputs.

    Raises:
        TypeError, ValueError: an argument is refused. So are outputs of which none has a history, if gradients came for
            them, and an input or a weight requires one. Nothing has been changed.
        AssertionError: a GradientEdge has no output gradient.
        RuntimeError: the backward failed. The original error is the cause.

    Example::

        x = torch.randn(8, 4, requires_grad=True)  # from the previous stage
        output = stage(x)
        (dx,), groups = zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], stage.parameters())
        grads = zbpipe.stage_backward_weight(stage.parameters(), groups)  # later

    Source:
        ``torch.distributed.pipelining._backward.stage_backward_input`` (pytorch/pytorch PR 132691), the B of "Zero
        Bubble Pipeline Parallelism" (Qi et al., 2023).
    """
    run = input_pass if (seen := observer) is None else partial(seen, "I", input_pass)
    policy = handover.in_graph_of(get_policy())
    outputs: Any = stage_outputs_or_loss
    grads: Any = output_grads
    if handover.has_outputs() and any(_requires_grad(loss) for loss in outputs):
        outputs, grads = _with_outputs(outputs, grads)
    received = handover.take_stages_pass()
    served = handover.in_graph(weights) if received is None else None
    inputs = input_values if received is None else input_values[:received]
    given = (
        _listed("stage_outputs_or_loss", outputs),
        None if grads is None else _listed("output_grads", grads),
        _listed("input_values", inputs),
        None if served is None else _weights_of_input_pass(served, is_own=served is weights),
    )
    if received is None:
        backward.refuse_without_history(*given)
    try:
        with inner.backwards(policy):
            dinputs, groups = run(*given, policy)
    except BackwardError as error:
        raise _failed("stage backward input", stage_outputs_or_loss, output_grads, input_values) from error.__cause__
    if received is not None:
        dinputs = (*dinputs, *(None for _ in range(len(dinputs), len(input_values))))
    return dinputs, groups


def _with_outputs(losses: Sequence[Any], grads: Sequence[Any] | None) -> tuple[list[Any], list[Any]]:
    """The losses, and the outputs that a stage wants I to detach with them."""
    outputs = handover.take_outputs()
    if grads is None:
        grads = [torch.ones_like(loss) if _requires_grad(loss) else None for loss in losses]
    return [*losses, *outputs], [*grads, *(False for _ in outputs)]


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def stage_backward_weight(
    weights: Iterable[torch.Tensor] | None,
    param_groups: Iterable[ParamGroup],
    retain_graph: bool = False,
) -> Grads:
    """The weight pass (W): computes the weights' gradients, and adds them through the accumulators.

    Args:
        weights: the weights of the stage, which must include all weights of the groups. None for the groups' weights,
            unchecked.
        param_groups: groups of one or several calls of :func:`stage_backward_input`. Each group can be given once.
            W adds several gradients of one weight in the order of the groups.
        retain_graph: True keeps what the groups hold, and the groups can be given again.

    Returns:
        The current ``.grad`` of each of ``weights``, in their order: of the weight's shape and device, or None. An
        empty tuple if ``weights`` is None.

    Raises:
        TypeError, ValueError: an argument is refused. Nothing has been changed.
        RuntimeError: a group is spent. Or a tensor that it holds was modified in place. Or the policy has
            ``main_grad=True``, and the patched torch would not scale ``main_grad``. Nothing has been changed.

    After any other error (a hook raised, memory ran out) call W again with the same groups. The second call continues
    where the first one stopped, and adds nothing twice. A group that a call without ``retain_graph`` has begun is spent
    at its end, even if the second call has ``retain_graph=True``.

    Source:
        ``torch.distributed.pipelining._backward.stage_backward_weight`` (pytorch/pytorch PR 132691), the W of "Zero
        Bubble Pipeline Parallelism" (Qi et al., 2023).
    """
    run = _C.weight_pass if (seen := observer) is None else partial(seen, "W", _C.weight_pass)
    policy = get_policy()
    if policy.main_grad:
        scale.check_main_grad()
    received = handover.take_stages_pass()
    served = handover.in_graph(weights) if received is None else None
    groups = _listed_groups(param_groups)
    listed = None if served is None else _listed("weights", served)
    if listed is not None:
        _check_listed(listed, groups)
    is_own = received is None and served is weights
    with inner.backwards(policy), fsdp.around_own(groups) if is_own else nullcontext():
        run(groups, retain_graph, policy)
    return () if listed is None else tuple([weight.grad for weight in listed])  # a generator takes a fifth longer


def _weights_of_input_pass(weights: Iterable[torch.Tensor], is_own: bool) -> tuple[Any, ...]:
    listed = _listed("weights", weights)
    if is_own:
        fsdp.refuse_shards(listed)
    # An iterator that the call before has used up, maybe: I warns of a leaf in no graph, if the graph has others.
    return listed if listed or not isinstance(weights, Iterator) else (torch.empty(0, requires_grad=True),)


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    """A copy, for hooks may change the caller's list while a pass runs. Refuses a tensor, whose rows are others."""
    if not isinstance(values, Iterable) or isinstance(values, torch.Tensor):
        raise TypeError(f"{name} is {argument(values)}; expected a list, a tuple or an iterator")
    return tuple(values)


def _listed_groups(values: Iterable[Any]) -> tuple[ParamGroup, ...]:
    listed = _listed("param_groups", values)
    if not {ParamGroup}.issuperset(map(type, listed)):
        i = next(i for i, group in enumerate(listed) if type(group) is not ParamGroup)
        raise TypeError(
            f"param_groups[{i}] is {argument(listed[i])}; expected a ParamGroup, as zbpipe.stage_backward_input "
            "returns them"
        )
    if len(set(listed)) < len(listed):
        repeated = next(i for i, group in enumerate(listed) if group in listed[:i])
        raise ValueError(f"param_groups[{repeated}] is listed twice")
    return listed


def _check_listed(weights: tuple[Any, ...], groups: tuple[Any, ...]) -> None:
    """Refuses groups with a weight that the caller does not list."""
    for i, weight in enumerate(weights):
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"weights[{i}] is {argument(weight)}; expected a tensor")
    known = set(map(id, weights))
    more = "" if weights else ", in a list: an iterator serves one call"
    for i, group in enumerate(groups):
        for weight in fsdp.served_by(group):
            if id(weight) not in known:
                raise ValueError(
                    f"param_groups[{i}] holds a gradient for a parameter of {described(weight)} that is not "
                    f"among the {len(weights)} weights; pass the weights that stage_backward_input was given{more}"
                )


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Iterable[Any],
    outputs_with_grads_idxs: list[int] | None = None,
) -> Grads:
    """The whole backward of a stage: adds to the weights' ``.grad``, returns the inputs' gradients.

    Args:
        stage_output: the stage's output: tensors and GradientEdges in nested tuples, lists and dicts. Other objects
            are ignored.
        output_grads: the gradients, nested alike; None for a part without gradients.
        input_values: the stage's inputs.
        outputs_with_grads_idxs: positions of the outputs and gradients to use. Only torch's traced pipelines give it.

    Returns:
        One entry per input: its gradient, of its shape, dtype and device, or None. The inputs' ``.grad`` is None
        afterwards.

    Raises:
        TypeError: ``input_values`` is no list, tuple or iterator. Nothing has been changed.
        AssertionError: a GradientEdge has no output gradient.
        RuntimeError: the gradients are nested otherwise than the outputs, or the backward failed. The original error
            is the cause.

    Source:
        ``torch.distributed.pipelining._backward.stage_backward``; edges in place of outputs: pytorch/pytorch 128910.
    """
    received = handover.take_stages_pass()
    inputs = list(_listed("input_values", input_values))
    backward = _backward_into_main_grad if get_policy().main_grad else torch.autograd.backward
    try:
        if outputs_with_grads_idxs is not None:
            stage_output = [stage_output[i] for i in outputs_with_grads_idxs]
            output_grads = [output_grads[i] for i in outputs_with_grads_idxs]
        ends = list(_flatten(stage_output, output_grads))
        roots, root_grads = [root for root, _ in ends], [grad for _, grad in ends]
        if seen := observer:
            seen("B", backward, roots, root_grads)
        else:
            backward(roots, root_grads)
    except _EdgeWithoutGradient:
        raise
    except Exception as error:
        raise _failed("stage backward", stage_output, output_grads, inputs) from (
            error.__cause__ if isinstance(error, BackwardError) else error
        )
    taken = inputs[:received]  # all of them, but in a stage's own pass
    return (*map(_take_grad, taken), *(None for _ in inputs[len(taken) :]))


def _backward_into_main_grad(roots: Sequence[Any], root_grads: Sequence[torch.Tensor | None]) -> None:
    """torch.autograd.backward into ``main_grad``: I, and W at once, since only W adds there."""
    scale.check_main_grad()
    policy = get_policy()
    with inner.backwards(policy):
        ends = list(map(_edge, roots, root_grads))
        _, groups = input_pass(tuple(edge for edge, _ in ends), tuple(grad for _, grad in ends), (), None, policy)
        with fsdp.around_own(groups):
            _C.weight_pass(tuple(groups), False, policy)


def _edge(root: Any, grad: torch.Tensor | None) -> tuple[Any, torch.Tensor | None]:
    """A root as I takes it without detaching it, which would hide a second backward. What I refuses stays a tensor."""
    if grad is None and root.numel() == 1 and root.is_floating_point():
        grad = torch.ones_like(root)
    return root if grad is None or isinstance(root, GradientEdge) else get_gradient_edge(root), grad


class _EdgeWithoutGradient(AssertionError):
    """Refused before anything ran, hence not wrapped as a failed backward."""


def _take_grad(value: Any) -> torch.Tensor | None:
    if not isinstance(value, torch.Tensor) or not (value.is_leaf or value.retains_grad):
        return None  # a computed keyword argument: the gradient is at its leaves
    grad = value.grad
    # The previous stage gets the gradient; a second reference here would keep it until the step's end.
    value.grad = None
    return grad


def _flatten(output: Any, grad: Any) -> Iterator[tuple[Any, torch.Tensor | None]]:
    """The tensors and edges of a nested output that take a gradient, in order, each with its gradient."""
    if isinstance(output, GradientEdge):
        if not isinstance(grad, torch.Tensor):
            raise _EdgeWithoutGradient(
                f"a GradientEdge requires output gradients: it requires a gradient but got {type(grad)}"
            )
        yield output, grad
    elif isinstance(output, torch.Tensor):
        if output.requires_grad or output.grad_fn is not None:
            if not isinstance(grad, (torch.Tensor, type(None))):
                raise AssertionError(f"Expected Tensor or None gradient but got {type(grad)}")
            yield output, grad
    elif isinstance(output, (tuple, list)):
        if grad is None:
            output = [edge for edge in output if isinstance(edge, GradientEdge)]
            grad = [None] * len(output)
        if not isinstance(grad, (tuple, list)):
            raise AssertionError(f"grad_value expected to have type {type(output)} but got {type(grad)}")
        if len(output) != len(grad):
            raise AssertionError(f"Expected len(output_val) == len(grad_val), got {len(output)} != {len(grad)}")
        for value, its_grad in zip(output, grad, strict=True):
            yield from _flatten(value, its_grad)
    elif isinstance(output, dict) and grad is not None:
        if not isinstance(grad, dict):
            raise AssertionError(f"Expected dict, got {type(grad)}")
        if output.keys() != grad.keys():
            raise AssertionError(f"Expected keys {set(output)}, got {set(grad)}")
        for key, value in output.items():
            yield from _flatten(value, grad[key])


def _failed(what: str, outputs: Any, grads: Any, inputs: Any) -> RuntimeError:
    """torch's message for a failed backward, with the shapes of all arguments."""
    return RuntimeError(
        f"Failed to run {what}:\n"
        f"Stage output: {_text(outputs)}\n"
        f"Output gradient: {_text(grads)}\n"
        f"Input: {_text(inputs)}"
    )


def _text(value: Any) -> str:
    """As torch's ``pipelining._debug`` writes it; an import of that takes memory, which may have run out."""
    try:
        return str(torch.fx.node.map_aggregate(value, _shape_or_text))
    except Exception:  # of the caller's own object; the backward's error matters more
        return f"a {type(value).__name__}"


def _shape_or_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"Tensor({value.shape}, grad={value.requires_grad}, dtype={value.dtype})"
    return str(value)
