"""Facts about a pass that a stage is about to call, beside the arguments that torch's stage gives."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zbpipe._policy import Policy
from zbpipe._torch import fsdp
from zbpipe._torch.autograd import is_view

_outputs: contextvars.ContextVar[list[torch.Tensor]] = contextvars.ContextVar("zbpipe_outputs_beside_the_loss")
_received: contextvars.ContextVar[int | None] = contextvars.ContextVar("zbpipe_received_by_a_stage")
_weights: contextvars.ContextVar[Mapping[torch.Tensor, torch.Tensor]] = contextvars.ContextVar("zbpipe_weights")


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def beside_the_loss(outputs: Sequence[object]) -> Iterator[None]:
    """A context for the last stage's I: I detaches these outputs beside the loss, or leaves them to its W.

    Outputs that no I of zbpipe's takes are detached at the end, as torch's stage would.
    """
    waiting = [output for output in outputs if isinstance(output, torch.Tensor)]
    with _set(_outputs, waiting):
        yield
    for output in waiting:
        if output.grad_fn is not None and not is_view(output):  # torch's stage does not detach views either
            output.detach_()


def has_outputs() -> bool:
    """Whether an I called now has outputs to detach beside its arguments."""
    return bool(_outputs.get(None))


def take_outputs() -> list[torch.Tensor]:
    """Takes those of the outputs that have a history, once."""
    waiting = _outputs.get()
    taken = [output for output in waiting if output.grad_fn is not None]
    waiting.clear()
    return taken


def stages_pass(received: int = 0) -> contextlib.AbstractContextManager[None]:
    """A context whose first pass is a stage's own.

    That pass serves all leaves of the graph, as an ordinary backward does. Some are not the stage's module's: those of
    a loss with weights, or of another stage. The first ``received`` input values are the stage's inputs. The others are
    the user's: nobody sends their gradients, so I goes through to the leaves behind them, whose ``.grad`` stays.
    """
    return _set(_received, received)


def take_stages_pass() -> int | None:
    """What the stage has ``received``, if the pass that calls this is its own; else None."""
    received = _received.get(None)
    if received is not None:
        _received.set(None)
    return received


def with_weights(in_graph: Mapping[torch.Tensor, torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """A context in which passes take the weights in the graph for the module's parameters, which may be shards."""
    return _set(_weights, in_graph)


def in_graph(weights: Iterable[torch.Tensor] | None) -> Iterable[torch.Tensor] | None:
    """A pass's weights, as they are in the graph."""
    known = _weights.get(None)
    if not known or weights is None:
        return weights
    return [known.get(weight, weight) for weight in weights]


def in_graph_of(policy: Policy) -> Policy:
    """The policy, with its excluded parameters as they are in the graph."""
    if not policy.exclude:
        return policy
    known = _weights.get(None) or fsdp.gathered()
    return dataclasses.replace(policy, exclude=tuple(known.get(weight, weight) for weight in policy.exclude))
