"""What a stage says of the pass that it is about to call, beside what torch's stage hands over."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import torch

_outputs: contextvars.ContextVar[list[torch.Tensor]] = contextvars.ContextVar("zbpipe_outputs_beside_the_loss")


@contextlib.contextmanager
def beside_the_loss(outputs: Sequence[object]) -> Iterator[None]:
    """An I within it is the last stage's, which has these outputs: it detaches them, or leaves them to its W.

    Where no I of zbpipe's takes them, they are detached here, as torch's stage would.
    """
    waiting = [output for output in outputs if isinstance(output, torch.Tensor)]
    token = _outputs.set(waiting)
    try:
        yield
    finally:
        _outputs.reset(token)
    for output in waiting:
        if not output._is_view():
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
