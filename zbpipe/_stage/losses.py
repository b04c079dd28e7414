"""The last stage's backward: its loss, the outputs beside that, and the gradients from which a stage learns shapes.

Note [Who detaches the last stage's outputs]

torch's stage detaches them in place when I is done. Nodes that W runs may have saved them, and could not use them any
more: the loss's own, where nothing before the last stage's weights requires a gradient, so that W begins at the loss.
I knows which ones those are (detach_outputs in csrc/shim/input/scene.cpp), and leaves them to W; so it is given them
beside the loss. And an output may be a parameter (a prompt), which torch's stage, once it has detached it, trains no
more: it is left alone.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zbpipe._stage import handover
from zbpipe._torch import pipelining

_spent: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def beginning(stage: Any, microbatch: int, loss: torch.Tensor, full_backward: bool) -> Iterator[None]:
    """The last stage's backward runs within it. Raises RuntimeError."""
    if not full_backward:
        _refuse_spent(stage, microbatch, loss)
    will_be_spent = loss.requires_grad and not full_backward
    with handover.BesideTheLoss(pipelining.take_outputs(stage, microbatch)):
        yield
    if will_be_spent:
        _spent[id(loss)] = loss


def require_tensor(loss: object, where: str) -> None:
    """Raises TypeError for a loss that no backward can begin at: torch's would pass over it, and train nothing."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"the schedule's loss function returned a {type(loss).__name__} {where}; expected a tensor, the loss: keep "
            "other results, as numbers to look at, outside of what it returns"
        )


def _refuse_spent(stage: Any, microbatch: int, loss: torch.Tensor) -> None:
    """A schedule keeps the losses of a step that failed, and gives them to the next one; I has detached them, and would
    pass over them: all gradients 0. Raises RuntimeError."""
    if not loss.requires_grad and _spent.get(id(loss)) is loss:
        raise RuntimeError(
            f"the loss of stage {stage.stage_index}, microbatch {microbatch}, has had its backward: make a new "
            "schedule after a step that failed, whose losses this one keeps."
        )


def grads_for_inputs(
    outputs: Sequence[torch.Tensor | GradientEdge],
    inputs: Sequence[Any],
    grad_outputs: Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad`` with None for inputs that are no tensor or require no gradient, and where no output does.

    A stage learns from it what its inputs' gradients look like, and takes None for "like the inputs": the first
    microbatch's loss may be constant. An input that the stage does not use gets None on every torch, as from 2.13 on.
    """
    for output in outputs:
        if not isinstance(output, GradientEdge):
            require_tensor(output, "in the backward from which stages learn the shapes of their gradients")
    wanted = [i for i in inputs if isinstance(i, torch.Tensor) and i.requires_grad]
    if not wanted or not any(isinstance(o, GradientEdge) or o.requires_grad for o in outputs):
        return (None,) * len(inputs)
    grads = torch.autograd.grad(
        outputs=outputs,  # type: ignore[arg-type]
        inputs=wanted,
        grad_outputs=grad_outputs,
        retain_graph=retain_graph,
        allow_unused=True,
    )
    given = iter(grads)
    return tuple(next(given) if isinstance(i, torch.Tensor) and i.requires_grad else None for i in inputs)
