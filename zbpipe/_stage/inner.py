"""What passes run in: the caller's context, and ``policy(main_grad=True)`` for the backwards within them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from zbpipe._policy import Policy
from zbpipe._torch import autograd, main_grad


def backwards(policy: Policy) -> AbstractContextManager[None]:
    """What a pass runs in. Under ``main_grad=True`` it moves to ``main_grad`` what backwards within the pass add to
    ``.grad``, such as a reentrant checkpoint's."""
    context = autograd.with_callers_context()
    return _moving(context) if policy.main_grad else context


@contextmanager
def _moving(context: AbstractContextManager[None]) -> Iterator[None]:
    added: set[Any] = set()
    try:
        with context, autograd.inner_backwards_through(partial(_into_main_grad, added)):
            yield
    finally:
        for weight in added:
            main_grad.set_flag(weight, True)


def _into_main_grad(added: set[Any], run: Callable[[], Any], outputs: Sequence[Any]) -> Any:
    """Runs a backward as one that finds no ``.grad``, and moves what it leaves there.

    A fused kernel adds to ``main_grad`` itself, and says so by the flag. It leaves a dummy in ``.grad``."""
    leaves: Iterator[Any] = autograd.leaves_behind(outputs)
    weights = [leaf for leaf in leaves if isinstance(getattr(leaf, "main_grad", None), torch.Tensor)]
    for weight in weights:
        if weight.main_grad.shape != weight.shape:
            raise ValueError(f"a weight of {list(weight.shape)} has a main_grad of {list(weight.main_grad.shape)}")
    before = [(weight.grad, getattr(weight, main_grad.FLAG, None)) for weight in weights]
    for weight in weights:
        weight.grad = None
        main_grad.set_flag(weight, False)
    try:
        return run()
    finally:
        for weight, (grad, flag) in zip(weights, before, strict=True):
            is_added = getattr(weight, main_grad.FLAG, False)
            if weight.grad is not None and not is_added:
                with torch.no_grad():
                    weight.main_grad.add_(weight.grad)
            if weight.grad is not None or is_added:
                added.add(weight)
            weight.grad = grad
            main_grad.set_flag(weight, flag)
