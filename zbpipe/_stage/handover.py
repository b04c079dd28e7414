"""What a stage says of the pass that it is about to call, beside what torch's stage hands over."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from zbpipe._policy import Policy
from zbpipe._torch.autograd import is_view

_outputs: contextvars.ContextVar[list[torch.Tensor]] = contextvars.ContextVar("zbpipe_outputs_beside_the_loss")
_pass: contextvars.ContextVar[StagesPass | None] = contextvars.ContextVar("zbpipe_pass_of_a_stage")
_weights: contextvars.ContextVar[Mapping[torch.Tensor, torch.Tensor]] = contextvars.ContextVar("zbpipe_weights")


class BesideTheLoss:
    """An I within it is the last stage's, which has these outputs: it detaches them, or leaves them to its W.

    Where no I of zbpipe's takes them, they are detached here, as torch's stage would.
    """

    def __init__(self, outputs: Sequence[object]) -> None:
        self._waiting = [output for output in outputs if isinstance(output, torch.Tensor)]

    def __enter__(self) -> None:
        self._token = _outputs.set(self._waiting)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        _outputs.reset(self._token)
        for output in self._waiting if kind is None else ():
            if output.grad_fn is not None and not is_view(output):  # views keep theirs in torch's stage as well
                output.detach_()


def has_outputs() -> bool:
    """Tell whether an I called now has outputs to detach beside what it is given."""
    return bool(_outputs.get(None))


def take_outputs() -> list[torch.Tensor]:
    """Those outputs, as far as they have a history. They are taken once."""
    waiting = _outputs.get()
    taken = [output for output in waiting if output.grad_fn is not None]
    waiting.clear()
    return taken


class StagesPass:
    """The first I or W called within it is a stage's own.

    It serves every leaf of the graph that accumulates, as an ordinary backward does: also those that the stage's module
    does not list, of a loss with weights, or borrowed from another stage. Of I's input values the first ``received``
    are the stage's inputs. The others came by keyword, are nobody's to send a gradient for, and are passed through to
    the leaves behind them.
    """

    def __init__(self, received: int = 0) -> None:
        self.received = received

    def __enter__(self) -> None:
        self._token = _pass.set(self)

    def __exit__(self, *error: object) -> None:
        _pass.reset(self._token)


def take_stages_pass() -> StagesPass | None:
    """Of the pass that calls this, whether it is a stage's own: None where somebody else calls it."""
    found = _pass.get(None)
    if found is not None:
        _pass.set(None)
    return found


@contextlib.contextmanager
def with_weights(in_graph: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """A pass within it takes each weight for the one that is in the graph: the module's parameters may be shards, where
    a forward has resharded them, and others by the time of W."""
    token = _weights.set(in_graph)
    try:
        yield
    finally:
        _weights.reset(token)


def in_graph(weights: Iterable[torch.Tensor] | None) -> Iterable[torch.Tensor] | None:
    """The weights that a pass is asked for, as they are in the graph."""
    known = _weights.get(None)
    if not known or weights is None:
        return weights
    return [known.get(weight, weight) for weight in weights]


def in_graph_of(policy: Policy) -> Policy:
    """The policy, its excluded parameters as they are in the graph."""
    if not policy.exclude:
        return policy
    return dataclasses.replace(policy, exclude=in_graph(policy.exclude))  # type: ignore[arg-type]
