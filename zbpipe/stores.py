"""For modules whose weight gradients are delayed by other means than zbpipe's: a store of functions that somebody pops
later, or a method ``backward_dw()``. Both are given to the weight pass, through :func:`zbpipe.defer`.
"""

import contextlib
import queue
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zbpipe import _C
from zbpipe._kernels.book import books_of
from zbpipe._kernels.defer import Weights, will_defer
from zbpipe._kernels.registration import Registration
from zbpipe._torch.dispatch import pytree

__all__ = ["WeightGradStore", "run_backward_dw"]


class WeightGradStore:
    """A store of weight gradient work that keeps nothing itself: what is put goes to the weight pass of the input pass
    that runs.

    Give one to each module, where it expects its own store (TransformerEngine's ``module.wgrad_store``), or put one
    in place of the class that is used as a global one (zero-bubble Megatron, DualPipe). Their Functions ask the store
    whether to put or to compute at once; here the answer is yes within an input pass that takes the work, so that every
    ordinary backward computes at once. Nobody has to switch, flush or pop: what a loop calls and sets for that is
    there and does nothing, and the queue is always empty.

    Args:
        weights: for which arguments of the Function the work is, as in :func:`zbpipe.defer`: positions or
            tensors. None, the default: for all its weights, and the functions add the gradients themselves
            (to ``main_grad``, say) and return what nobody needs.
        gradients: called as ``gradients(result, arguments)`` with what a function returned and what it was called
            with; returns the gradients for ``weights``. Default: the result is the gradients.

    Raises:
        ValueError: `gradients` without `weights`.

    Source:
        ``WeightGradStore`` of NVIDIA/TransformerEngine (PR 1976), of zero-bubble Megatron (sail-sg) and of DualPipe
        (deepseek-ai).
    """

    def __init__(self, weights: Weights = None, gradients: Callable[[Any, tuple[Any, ...]], Any] | None = None) -> None:
        if weights is None and gradients is not None:
            raise ValueError("gradients is given and weights is None; expected the weights that they are for")
        self._weights = weights
        self._gradients = gradients

    # Whether to put, under the names that it has elsewhere.

    @property
    def enabled(self) -> bool:
        """True within an input pass that takes the work for the weights, whatever was assigned: loops assign True
        before a backward that they split and False after it."""
        return will_defer(self._weights)

    @enabled.setter
    def enabled(self, value: bool) -> None:
        pass

    def split_bw(self) -> bool:
        """As :attr:`enabled`."""
        return self.enabled

    def delay_wgrad_compute(self) -> bool:
        """As :attr:`enabled`; false outside of a backward, so that ``module.backward_dw()`` does nothing."""
        return self.enabled

    def enable_split_bw(self) -> None:
        """Nothing: the pass that runs says whether to put."""

    def disable_split_bw(self) -> None:
        """Nothing, as :meth:`enable_split_bw`."""

    def set_split_bw(self, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Nothing, as :meth:`enable_split_bw`; for use in a ``with`` statement."""
        return contextlib.nullcontext()

    def put(self, *work: Any) -> None:
        """Takes work, in one of the three forms that stores have: ``put(function)``, ``put(arguments, function)`` or
        ``put(weight, prepare, function)``, for ``function(*prepare(async_op=False))``.

        Arguments are held for the weight pass as what is ``saved`` in :func:`zbpipe.defer`, but for a weight's
        ``main_grad`` or ``grad`` and views of them, also within tuples, lists and dictionaries: those are the weight's,
        to be added to, are not counted in ``bytes_held``, and other microbatches may change them meanwhile.

        Where no input pass takes it (:attr:`enabled` is false) it is done at once, and gradients that the
        function returns are added to the weights in a backward of their own, as the Function that put them will
        return None: hooks of these weights fire for both.

        Raises:
            TypeError, ValueError: as :func:`zbpipe.defer`; or other arguments than these.
        """
        function, arguments = self._parse(work)
        result = _C.defer(partial(self._run, function), self._weights, self._without_sums(arguments))
        if self._weights is not None:
            single = isinstance(self._weights, (int, torch.Tensor))
            self._add(*([[self._weights], [result]] if single else [self._weights, result]))

    def flush(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: what was put is in a parameter group already."""

    def pop(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the weight pass does the work."""

    def clear(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: nothing is kept here."""

    def assert_empty(self) -> None:
        """Nothing: nothing is kept here."""

    def queue_size(self, *args: Any, **kwargs: Any) -> int:
        """0, of whatever chunk: nothing is kept here."""
        return 0

    @property
    def funcs_queue(self) -> "queue.Queue[Any]":
        """An empty queue, for those that ask whether it is."""
        return queue.Queue()

    @staticmethod
    def _parse(work: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        function = work[-1] if work else None
        if not callable(function) or len(work) > 3:
            raise TypeError(
                f"put() was called with {len(work)} arguments, the last of which is a {type(function).__name__}; "
                "expected (function), (arguments, function) or (weight, prepare, function)"
            )
        if len(work) == 3:
            _, prepare, _ = work
            return (lambda: function(*prepare(async_op=False))), ()
        if len(work) == 2 and not isinstance(work[0], (tuple, list)):
            raise TypeError(
                f"put() was called with a {type(work[0]).__name__} and a function; expected a list of arguments"
            )
        return function, tuple(work[0]) if len(work) == 2 else ()

    def _without_sums(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, what the weights' gradients are added to in a wrapping each."""
        leaves = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        named = [self._weights] if isinstance(self._weights, torch.Tensor) else self._weights
        weights = [*_C.weights_here(), *leaves, *(named if isinstance(named, (tuple, list)) else ())]
        weights = [weight for weight in weights if isinstance(weight, torch.Tensor) and weight.is_leaf]
        sums = [getattr(weight, name, None) for weight in weights for name in ("main_grad", "grad")]
        ids, storages = {id(total) for total in sums if total is not None}, _C.storages_of(sums)

        def is_sum(leaf: torch.Tensor) -> bool:
            return id(leaf) in ids or not storages.isdisjoint(_C.storages_of([leaf]))

        if not any(is_sum(leaf) for leaf in leaves):
            return arguments
        return pytree.tree_map_only(torch.Tensor, lambda leaf: _Sum(leaf) if is_sum(leaf) else leaf, arguments)  # type: ignore[no-any-return]

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        arguments = pytree.tree_map_only(_Sum, lambda wrapping: wrapping.tensor, arguments)
        result = function(*arguments)
        if self._weights is None:
            return None
        return result if self._gradients is None else self._gradients(result, arguments)

    @staticmethod
    def _add(weights: Sequence[int | torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
        edges, added = [], []
        for i, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            if grad is None:
                continue
            if isinstance(weight, int):
                raise ValueError(
                    f"put() was called where no input pass takes the work, and weights[{i}] is a position, to which "
                    "nothing can be added here; ask `enabled` first, or give the store the tensor"
                )
            edges.append(torch.autograd.graph.get_gradient_edge(weight))
            added.append(grad)
        if edges:
            # The backward that is under way comes to what lies behind a weight once more, with the Function's None.
            torch.autograd.backward(edges, added, retain_graph=True)


class _Sum:
    """Hides a tensor that is added to from what holds, counts and watches tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def run_backward_dw(module: nn.Module, weights: Sequence[nn.Parameter] | None = None) -> RemovableHandle:
    """Lets the weight pass call ``module.backward_dw()``, for a module whose backward gives no weight gradients but
    queues what they are computed from, one entry per call of the module, and which computes them in that method, one
    entry per call, first in, first out.

    Where no input pass runs it is called at once, at the end of the module's backward, also of one for the inputs
    alone. Each call may set, or add to, the weights' ``.grad``: what it leaves there is that entry's gradient, which is
    then added as every other one, with hooks, ``main_grad`` and whatever was in ``.grad`` before. A call that leaves
    all ``.grad`` None has added the gradients elsewhere itself.

    Every weight pass gets its own microbatch's gradients, in any order: entries in front of its own are computed
    before it and kept for theirs (in memory that no group counts; gradients that are added elsewhere are added then).
    Entries of groups that were dropped, also by :func:`zbpipe.explain`, stay in the queue until then, are computed and
    leave no trace in ``.grad`` and ``main_grad``.

    Hooks on the module's forward give its inputs that require a gradient, also within tuples, lists and dictionaries, a
    node that takes the module's place in the graph, for the time of the forward; meanwhile no other thread may run a
    backward that ends in one of them. Where none does, the first floating-point argument is passed as an alias that
    does, and gets one computed, in vain.

    Args:
        module: has a method ``backward_dw()`` without arguments, which nobody else calls, and whose queue is empty;
            its ``forward`` takes a floating-point or complex tensor and computes with it what it queues.
        weights: whose gradients it computes; default: its parameters that require a gradient.

    Returns:
        A handle; its ``remove()`` undoes this for later calls of the module. To start anew, empty the module's queue,
        ``remove()`` and call this again.

    Raises:
        TypeError: the module has no such method.
        ValueError: this was called for the module before, and the handle not removed.

    In a weight pass, or at the end of the module's backward, RuntimeError says so where the entries cannot be told
    apart any more: a backward failed or ended within the module, or ``backward_dw()`` raised while later entries were
    waiting; and where weight passes of one module run at the same time, which they must not. If ``backward_dw()``
    raised for the only entry, a repeated weight pass calls it again.

    Source:
        ``backward_dw()`` of NVIDIA/TransformerEngine's modules and of Megatron-LM, PR 1976 of the former.
    """
    if not callable(getattr(module, "backward_dw", None)):
        raise TypeError(f"{type(module).__name__} has no method backward_dw; expected a module that delays its weights")
    if books_of(module):
        raise ValueError(
            f"run_backward_dw was called for this {type(module).__name__} before; remove() the handle that it returned"
        )
    return Registration(module, weights).register(module)
