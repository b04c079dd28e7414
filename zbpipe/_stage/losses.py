"""The last stage's backward: its loss, its outputs, and the gradients from which a stage learns shapes.

Note [Who detaches the last stage's outputs]

torch's stage detaches them in place after I. Nodes that W runs may have saved them, and could then not use them. These
are nodes of the loss, if nothing before the last stage's weights requires a gradient: then W begins at the loss. I
finds such outputs (detach_outputs in csrc/shim/input/scene.cpp) and leaves them to W, so it is given all outputs. An
output may also be a parameter (a prompt). torch's stage detaches and never trains it again; here it is left alone.
"""

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zbpipe._stage import handover
from zbpipe._torch import pipelining
from zbpipe._torch.autograd import takes_gradient

_told: weakref.WeakSet[Any] = weakref.WeakSet()  # stages of which a loss without history was said
_spent: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def beginning(stage: Any, microbatch: int, loss: torch.Tensor, full_backward: bool) -> Iterator[None]:
    """A context for the last stage's backward. Raises RuntimeError for a loss of an earlier step."""
    if not full_backward:
        _refuse_spent(stage, microbatch, loss)
    will_be_spent = loss.requires_grad and not full_backward
    outputs = pipelining.take_outputs(stage, microbatch)
    if not any(map(takes_gradient, (loss, *outputs))) and stage not in _told:
        _told.add(stage)
        logging.getLogger("zbpipe").warning(
            "stage %d: neither the loss of microbatch %d nor an output has a history, so that nothing learns from it; "
            "run the forward with gradients enabled",
            stage.stage_index,
            microbatch,
        )
    with handover.beside_the_loss(outputs):
        yield
    if will_be_spent:
        _spent[id(loss)] = loss


def require_tensor(loss: object, where: str) -> None:
    """Raises TypeError for a loss that is no tensor: torch would skip it, and train nothing."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"the schedule's loss function returned a {type(loss).__name__} {where}; expected a tensor: return the "
            "loss alone, and keep other results elsewhere"
        )


def _refuse_spent(stage: Any, microbatch: int, loss: torch.Tensor) -> None:
    """Raises RuntimeError for a loss that an I has detached: a second I would skip it, and all gradients would be 0.

    A schedule keeps the losses of a step that failed, and gives them to the next step."""
    if not loss.requires_grad and _spent.get(id(loss)) is loss:
        raise RuntimeError(
            f"the loss of stage {stage.stage_index}, microbatch {microbatch}, has had its backward, in a step that "
            "failed; make a new schedule, since this one keeps that step's losses"
        )


def grads_for_inputs(
    outputs: Sequence[torch.Tensor | GradientEdge],
    inputs: Sequence[Any],
    grad_outputs: Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad``, with None for inputs that are no tensor or require no gradient, or if no output does.

    A stage learns from it the shapes of its inputs' gradients. It takes None for "like the inputs", since the first
    microbatch's loss may be constant. An unused input gets None on every torch, as from 2.13 on.
    """
    for output in outputs:
        if not isinstance(output, GradientEdge):
            require_tensor(output, "in the backward from which stages learn the shapes of their gradients")
    wanted = [i for i in inputs if isinstance(i, torch.Tensor) and i.requires_grad]
    if not wanted or not any(map(takes_gradient, outputs)):
        return (None,) * len(inputs)
    ends: Any = outputs
    given = iter(torch.autograd.grad(ends, wanted, grad_outputs, retain_graph, allow_unused=True))
    return tuple(next(given) if isinstance(i, torch.Tensor) and i.requires_grad else None for i in inputs)
