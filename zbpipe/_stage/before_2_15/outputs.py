"""Outputs that another stage consumes, whose memory goes with the send.

With ``release_outputs`` a stage keeps a ``GradientEdge`` in place of each of them, so that the output's memory goes
with the send, or with the next stage's input where that is on the same rank.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


class Outputs(list[Any]):
    """A stage's outputs on their way to the next one. A list, because frames of the schedule hold it: it is emptied."""


# By stage and microbatch: not with the next stage yet, or were and are empty lists.
_on_their_way: weakref.WeakKeyDictionary[Any, dict[int, Outputs]] = weakref.WeakKeyDictionary()


def released(stage: Any, microbatch: int) -> Outputs:
    """What a forward returned, in whose place the stage keeps what backward needs of it."""
    stage_output, *rest = stage.fwd_cache[microbatch]
    stage.fwd_cache[microbatch] = (tuple(_edge(value, stage.has_backward) for value in stage_output), *rest)
    outputs = Outputs(stage_output)
    _on_their_way.setdefault(stage, {})[microbatch] = outputs
    return outputs


def of(stage: Any, microbatch: int) -> Outputs | None:
    """Those on their way; None where the stage has kept its own."""
    return _on_their_way.get(stage, {}).get(microbatch) if _on_their_way else None


@contextlib.contextmanager
def in_place(stage: Any, microbatch: int, outputs: Outputs) -> Iterator[None]:
    """Within it the stage has its outputs, to send them. Raises RuntimeError if they are gone."""
    entry = stage.fwd_cache[microbatch]
    if entry[0] and not outputs:
        raise RuntimeError(
            f"zbpipe released the outputs of stage {stage.stage_index}, microbatch {microbatch}, when they had been "
            "sent: send them once, or patch with release_outputs=False."
        )
    stage.fwd_cache[microbatch] = (tuple(outputs), *entry[1:])
    try:
        yield
    finally:
        stage.fwd_cache[microbatch] = entry


def forget(stage: Any, microbatch: int | None = None) -> None:
    """Those of a microbatch; without one, of all the stage's."""
    if not _on_their_way:
        return
    if microbatch is None:
        _on_their_way.pop(stage, None)
    else:
        _on_their_way.get(stage, {}).pop(microbatch, None)


def forget_all() -> None:
    _on_their_way.clear()


def _edge(value: Any, has_backward: bool) -> Any:
    """What backward needs of an output.

    A leaf (an input that is handed on, a weight) is held elsewhere anyhow. Other types than plain tensors take their
    gradients in ways of their own.
    """
    if type(value) is not torch.Tensor:
        return value
    if not has_backward or not value.requires_grad:
        return None
    return value if value.is_leaf else get_gradient_edge(value)
