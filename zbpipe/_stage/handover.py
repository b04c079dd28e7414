"""Facts about a pass that a stage is about to call, beside the arguments that torch's stage gives."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from zbpipe._policy import Policy
from zbpipe._torch import fsdp
from zbpipe._torch.autograd import is_view

_outputs: contextvars.ContextVar[list[torch.Tensor]] = contextvars.ContextVar("zbpipe_outputs_beside_the_loss")
_pass: contextvars.ContextVar[StagesPass | None] = contextvars.ContextVar("zbpipe_pass_of_a_stage")
_weights: contextvars.ContextVar[Mapping[torch.Tensor, torch.Tensor]] = contextvars.ContextVar("zbpipe_weights")


class BesideTheLoss:
    """A context for the last stage's I: I detaches these outputs beside the loss, or leaves them to its W.

    Outputs that no I of zbpipe's takes are detached at the end, as torch's stage would.
    """

    def __init__(self, outputs: Sequence[object]) -> None:
        self._waiting = [output for output in outputs if isinstance(output, torch.Tensor)]

    def __enter__(self) -> None:
        self._token = _outputs.set(self._waiting)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        _outputs.reset(self._token)
        for output in self._waiting if kind is None else ():
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


class StagesPass:
    """A context whose first I or W is a stage's own.

    That pass serves all leaves of the graph, as an ordinary backward does. Some are not the stage's module's: those of
    a loss with weights, or of another stage. The first ``received`` of I's input values are the stage's inputs. The
    others are keyword arguments: nobody sends their gradients, so I goes through to the leaves behind them.
    """

    def __init__(self, received: int = 0) -> None:
        self.received = received

    def __enter__(self) -> None:
        self._token = _pass.set(self)

    def __exit__(self, *error: object) -> None:
        _pass.reset(self._token)


def take_stages_pass() -> StagesPass | None:
    """The context if the pass that calls this is a stage's own, else None."""
    found = _pass.get(None)
    if found is not None:
        _pass.set(None)
    return found


@contextlib.contextmanager
def with_weights(in_graph: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """A context in which passes take the weights in the graph for the module's parameters, which may be shards."""
    token = _weights.set(in_graph)
    try:
        yield
    finally:
        _weights.reset(token)


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
