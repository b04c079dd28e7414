"""The input pass, the weight pass and the whole backward: what ``torch.distributed.pipelining._backward`` is for.

Names, signatures and results are those of the replaced functions (as of torch 2.15), so that nothing
that calls them notices.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zbpipe import _C
from zbpipe._policy import get_policy
from zbpipe._stage import handover, scale

ParamGroup = _C.ParamGroup
Grads = tuple[torch.Tensor | None, ...]

# While zbpipe.memory records, it puts here what runs the passes in the place of _C, and a whole backward as it is told.
observer: Any = None


def stage_backward_input(
    stage_outputs_or_loss: Sequence[torch.Tensor | GradientEdge | None],
    output_grads: Sequence[torch.Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[torch.Tensor] | None,
) -> tuple[Grads, list[ParamGroup]]:
    """The input pass (I): gradients of the stage's inputs, and what the weight pass needs.

    Args:
        stage_outputs_or_loss: the stage's outputs, or its loss. An entry may be a
            ``torch.autograd.graph.GradientEdge`` in place of a tensor whose memory is gone; None
            and tensors that require no gradient are passed over. All losses of one forward come in one call: a
            second one would find the graph consumed.
        output_grads: a gradient per output, of its shape, dtype and device; None for an output
            that got none (a scalar's is then 1, as everywhere in autograd), not for all. None in place of the
            list stands for ones.
        input_values: the stage's inputs. Nothing behind them is visited, but another output of the operation that
            made an input (of an unbind, a split) is no input unless it is listed; entries that are no tensor or
            require no gradient are allowed.
        weights: the leaves whose gradients W is to compute; None for every leaf that accumulates.
            Other leaves are left alone. A patched stage asks for every leaf, as an ordinary backward does, whatever
            its module lists.

    Returns:
        ``(dinputs, param_groups)``: per input its gradient, of its shape, dtype and device, or None, and the groups to
        give to :func:`stage_backward_weight`, in any order and any subsets. Each tensor input's ``.grad``
        is set, or added to. The weights' ``.grad`` is untouched. The output tensors are detached.

    Raises:
        TypeError, ValueError: an argument is refused; nothing has been changed.
        AssertionError: a GradientEdge came without an output gradient.
        RuntimeError: the backward itself failed; the original error is the cause.

    Source:
        ``torch.distributed.pipelining._backward.stage_backward_input`` (pytorch/pytorch PR 132691), the B of "Zero
        Bubble Pipeline Parallelism" (Qi et al., 2023).
    """
    run = (observer or _C).input_pass
    policy = handover.in_graph_of(get_policy())
    outputs: Any = stage_outputs_or_loss
    grads: Any = output_grads
    if handover.has_outputs() and any(_requires_grad(loss) for loss in outputs):
        outputs, grads = _with_outputs(outputs, grads)
    inner: AbstractContextManager[None] = nullcontext()
    if policy.main_grad and isinstance(weights, Iterable):
        weights = tuple(weights)
        inner = _inner_backwards_into_main_grad(handover.in_graph(weights) or ())
    stages = handover.take_stages_pass()
    served = handover.in_graph(weights) if stages is None else None
    inputs = input_values if stages is None else input_values[: stages.received]
    try:
        with inner:
            dinputs, groups = run(
                _listed("stage_outputs_or_loss", outputs),
                None if grads is None else _listed("output_grads", grads),
                _listed("input_values", inputs),
                None if served is None else _listed("weights", served),
                policy,
            )
    except _C.RunError as error:
        raise _failed("stage backward input", stage_outputs_or_loss, output_grads, input_values) from error.__cause__
    if stages is not None:
        dinputs = (*dinputs, *(None for _ in range(len(dinputs), len(input_values))))
    return dinputs, groups


def _with_outputs(losses: Sequence[Any], grads: Sequence[Any] | None) -> tuple[list[Any], list[Any]]:
    """The losses, and beside them the outputs that a stage wants detached with them."""
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
    """The weight pass (W): adds the weights' gradients, through their accumulators.

    Args:
        weights: the weights of the stage; all of the groups' weights must be among them. None for
            those of the groups, unchecked.
        param_groups: groups of one or of several calls of :func:`stage_backward_input`. Each can be
            given once. The microbatches' gradients for one weight are added in the order of the groups.
        retain_graph: keep what the groups hold, so that they can be given again.

    Returns:
        The current ``.grad`` of each of ``weights``, in their order: of the weight's shape and device, or None; empty
        for None.

    Raises:
        TypeError, ValueError: an argument is refused; nothing has been changed.
        RuntimeError: a group is spent, or what it holds was modified in place, or policy(main_grad=True)
            asks for what the patched torch would not scale; nothing has been changed.

    After any other error (a hook that raised, memory that ran out) the call can be repeated with the
    same groups: it goes on where it stopped, and adds nothing twice. What a call without retain_graph
    has begun is spent when it is complete, also by a repetition with retain_graph.

    Source:
        ``torch.distributed.pipelining._backward.stage_backward_weight`` (pytorch/pytorch PR 132691), the W of "Zero
        Bubble Pipeline Parallelism" (Qi et al., 2023).
    """
    run = (observer or _C).weight_pass
    policy = get_policy()
    if policy.main_grad:
        scale.check_main_grad()
    served = None if handover.take_stages_pass() else handover.in_graph(weights)
    groups = _listed("param_groups", param_groups)
    if served is None:
        run(groups, retain_graph, policy)
        return ()
    listed = _listed("weights", served)
    _check_listed(listed, groups)
    run(groups, retain_graph, policy)
    return tuple([weight.grad for weight in listed])  # a generator takes a fifth longer


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    """A copy, for hooks may change the caller's list while a pass runs."""
    if values is None:
        raise TypeError(f"{name} is None; expected a list, a tuple or an iterator")
    try:
        return tuple(values)
    except TypeError:
        if isinstance(values, Iterable):
            raise
        raise TypeError(f"{name} is a {type(values).__name__}; expected a list, a tuple or an iterator") from None


def _check_listed(weights: tuple[Any, ...], groups: tuple[Any, ...]) -> None:
    """Each group's weights are among those that the caller lists."""
    for i, weight in enumerate(weights):
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"weights[{i}] is a {type(weight).__name__}; expected a tensor")
    known = set(map(id, weights))
    for i, group in enumerate(groups):
        try:
            served = group.weights if isinstance(group, ParamGroup) else ()
        except RuntimeError:
            continue  # its W runs: _C refuses it, as it does what is no group
        for weight in served:
            if id(weight) not in known:
                dtype = str(weight.dtype).removeprefix("torch.")
                raise ValueError(
                    f"param_groups[{i}] holds a gradient for a parameter of {dtype} {list(weight.shape)} that is not "
                    f"among the {len(weights)} weights; pass the weights that stage_backward_input was given"
                )


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Iterable[Any],
    outputs_with_grads_idxs: list[int] | None = None,
) -> Grads:
    """The whole backward of a stage: accumulates into the weights, returns the inputs' gradients.

    Args:
        stage_output: the stage's output: tensors and GradientEdges in nested tuples, lists and
            dicts; other things are ignored.
        output_grads: gradients in the same structure; None for a part that got none.
        input_values: the stage's inputs.
        outputs_with_grads_idxs: which outputs and gradients to use; deprecated in torch, used by its
            traced pipelines alone.

    Returns:
        Per input its gradient, of its shape, dtype and device, or None. The inputs' ``.grad`` is None afterwards.

    Raises:
        AssertionError: a GradientEdge came without an output gradient.
        RuntimeError: structures that do not match, or a backward that failed; the original error
            is the cause.

    Source:
        ``torch.distributed.pipelining._backward.stage_backward``; edges in place of outputs: pytorch/pytorch 128910.
    """
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[i] for i in outputs_with_grads_idxs]
        output_grads = [output_grads[i] for i in outputs_with_grads_idxs]
    inputs = list(input_values)
    backward = _backward_into_main_grad if get_policy().main_grad else torch.autograd.backward
    try:
        roots, root_grads = _flatten(stage_output, output_grads)
        if recorder := observer:  # read once: a recording may end on another thread
            recorder.backward(backward, roots, root_grads)
        else:
            backward(roots, root_grads)
    except _EdgeWithoutGradient:
        raise
    except Exception as error:
        raise _failed("stage backward", stage_output, output_grads, inputs) from error
    return tuple(_take_grad(value) for value in inputs)


def _backward_into_main_grad(roots: Sequence[Any], root_grads: Sequence[torch.Tensor | None]) -> None:
    """torch.autograd.backward, where only the weight pass adds to main_grad: it comes at once."""
    scale.check_main_grad()
    policy = get_policy()
    try:
        _, groups = _C.input_pass(tuple(roots), tuple(root_grads), (), None, policy)
    except _C.RunError as error:
        raise error.__cause__ or error from None
    _C.weight_pass(tuple(groups), False, policy)


@contextmanager
def _inner_backwards_into_main_grad(weights: Iterable[Any]) -> Iterator[None]:
    """What a backward within I (a reentrant checkpoint's) adds to ``.grad`` goes where W adds: to ``main_grad``."""
    given: dict[Any, torch.Tensor | None] = {}
    for weight in weights:
        place = getattr(weight, "main_grad", None)
        # Another one is refused by W.
        if isinstance(place, torch.Tensor) and place.shape == weight.shape:
            given.setdefault(weight, weight.grad)
            weight.grad = None
    try:
        yield
    finally:
        for weight, grad in given.items():
            if weight.grad is not None:
                with torch.no_grad():
                    weight.main_grad.add_(weight.grad)
                if hasattr(weight, "grad_added_to_main_grad"):
                    weight.grad_added_to_main_grad = True
            weight.grad = grad


class _EdgeWithoutGradient(AssertionError):
    """Refused before anything ran, hence not wrapped as a failed backward."""


def _take_grad(value: Any) -> torch.Tensor | None:
    if not isinstance(value, torch.Tensor) or not (value.is_leaf or value.retains_grad):
        return None  # what a keyword argument was computed from has the gradient
    grad = value.grad
    # The gradient goes to the previous stage; kept here it would live until the step's end.
    value.grad = None
    return grad


def _flatten(output: Any, grad: Any) -> tuple[list[Any], list[torch.Tensor | None]]:
    """The tensors and edges of a nested output that take a gradient, in order, and the gradients."""
    roots: list[Any] = []
    root_grads: list[torch.Tensor | None] = []
    pending: list[tuple[Any, Any]] = [(output, grad)]
    while pending:
        output, grad = pending.pop()
        if isinstance(output, GradientEdge):
            if not isinstance(grad, torch.Tensor):
                raise _EdgeWithoutGradient(
                    f"a GradientEdge requires output gradients: it requires a gradient but got {type(grad)}"
                )
        elif isinstance(output, torch.Tensor):
            if not output.requires_grad and output.grad_fn is None:
                continue
            if not isinstance(grad, (torch.Tensor, type(None))):
                raise AssertionError(f"Expected Tensor or None gradient but got {type(grad)}")
        else:
            pending.extend(reversed(_children(output, grad)))
            continue
        roots.append(output)
        root_grads.append(grad)
    return roots, root_grads


def _children(output: Any, grad: Any) -> list[tuple[Any, Any]]:
    if isinstance(output, (tuple, list)):
        if grad is None:
            return [(edge, None) for edge in output if isinstance(edge, GradientEdge)]
        if not isinstance(grad, (tuple, list)):
            raise AssertionError(f"grad_value expected to have type {type(output)} but got {type(grad)}")
        if len(output) != len(grad):
            raise AssertionError(f"Expected len(output_val) == len(grad_val), got {len(output)} != {len(grad)}")
        return list(zip(output, grad, strict=True))
    if isinstance(output, dict):
        if grad is None:
            return []
        if not isinstance(grad, dict):
            raise AssertionError(f"Expected dict, got {type(grad)}")
        if output.keys() != grad.keys():
            raise AssertionError(f"Expected keys {set(output)}, got {set(grad)}")
        return [(value, grad[key]) for key, value in output.items()]
    return []


def _failed(what: str, outputs: Any, grads: Any, inputs: Any) -> RuntimeError:
    """torch's message for a failed backward, with the shapes of all that went in."""
    return RuntimeError(
        f"Failed to run {what}:\n"
        f"Stage output: {_text(outputs)}\n"
        f"Output gradient: {_text(grads)}\n"
        f"Input: {_text(inputs)}"
    )


def _text(value: Any) -> str:
    """What torch's ``pipelining._debug`` makes of it; importing that would take memory, which may have run out."""
    try:
        return str(_with_shapes(value))
    except Exception:  # of the caller's own objects: the backward's error is the one to be told of
        return f"a {type(value).__name__}"


def _with_shapes(value: Any) -> Any:
    """``value`` with a text in the place of each tensor, and of all else that is no tuple, list or dict."""
    if isinstance(value, torch.Tensor):
        return f"Tensor({value.shape}, grad={value.requires_grad}, dtype={value.dtype})"
    if isinstance(value, tuple):
        entries = [_with_shapes(entry) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    if isinstance(value, list):
        return [_with_shapes(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _with_shapes(entry) for key, entry in value.items()}
    return str(value)
