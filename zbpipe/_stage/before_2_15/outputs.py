"""Outputs for another stage, whose memory is freed after the send.

With ``release_outputs`` a stage keeps a ``GradientEdge`` in the place of each output. So the memory is freed with the
send, or with the next stage's input where that stage is on the same rank.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


class Outputs(list[Any]):
    """A stage's outputs on their way to the next one. Frames of the schedule hold the list, so it is emptied."""


# By stage and microbatch; empty lists once the next stage has the outputs.
_on_their_way: weakref.WeakKeyDictionary[Any, dict[int, Outputs]] = weakref.WeakKeyDictionary()


def released(stage: Any, microbatch: int) -> Outputs:
    """A forward's outputs, in the place of which the stage keeps what its backward needs."""
    stage_output, *rest = stage.fwd_cache[microbatch]
    stage.fwd_cache[microbatch] = (tuple(_edge(value, stage.has_backward) for value in stage_output), *rest)
    outputs = Outputs(stage_output)
    _on_their_way.setdefault(stage, {})[microbatch] = outputs
    return outputs


@contextlib.contextmanager
def in_place(stage: Any, microbatch: int) -> Iterator[Outputs | None]:
    """Within it the stage has the outputs on their way, to send them; they are None where it has kept its own. Raises
    RuntimeError if they are gone."""
    outputs = _on_their_way.get(stage, {}).get(microbatch)
    if outputs is None:
        yield None
        return
    entry = stage.fwd_cache[microbatch]
    if entry[0] and not outputs:
        raise RuntimeError(
            f"zbpipe released the outputs of stage {stage.stage_index}, microbatch {microbatch}, when they had been "
            "sent; send them once, or patch with release_outputs=False"
        )
    stage.fwd_cache[microbatch] = (tuple(outputs), *entry[1:])
    try:
        yield outputs
    finally:
        stage.fwd_cache[microbatch] = entry


def forget(stage: Any, microbatch: int | None = None) -> None:
    """Drops the outputs of a microbatch, or of all the stage's."""
    if microbatch is None:
        _on_their_way.pop(stage, None)
    else:
        _on_their_way.get(stage, {}).pop(microbatch, None)


def forget_all() -> None:
    _on_their_way.clear()


def _edge(value: Any, has_backward: bool) -> Any:
    """What the backward needs of an output. Others hold leaves anyhow; subclasses take gradients in their own ways."""
    if type(value) is not torch.Tensor:
        return value
    if not has_backward or not value.requires_grad:
        return None
    return value if value.is_leaf else get_gradient_edge(value)
