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
    known = _weights.get(None)
    if not known or not policy.exclude:
        return policy
    return dataclasses.replace(policy, exclude=[known.get(weight, weight) for weight in policy.exclude])  # type: ignore[arg-type]
