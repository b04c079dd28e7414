"""For modules whose weight gradients are delayed by other means than zbpipe's: a store of functions that somebody pops
later, or a method ``backward_dw()``. Both are given to the weight pass, through :func:`zbpipe.defer`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from zbpipe import _C
from zbpipe._work import Weights, will_defer

__all__ = ["WeightGradStore", "run_backward_dw"]


class WeightGradStore:
    """A store of weight gradient work that keeps nothing itself: what is put goes to the weight pass of the input pass
    that runs.

    Give one to each module, where it expects its own store (TransformerEngine's ``module.wgrad_store``) or the
    class that is used as a global one (zero-bubble Megatron, DualPipe). Their Functions ask the store whether to put
    or to compute at once; here the answer is what :func:`zbpipe.will_defer` says, so that every ordinary backward
    computes at once. Nobody has to flush or pop: the loop's calls of these do nothing.

    Args:
        weights: for which arguments of the Function the work is, as in :func:`zbpipe.defer`: positions or
            tensors. None, the default: for all its weights, and the functions add the gradients themselves
            (to ``main_grad``, say) and return what nobody needs.
        gradients: called as ``gradients(result, arguments)`` with what a function returned and what it was called
            with; returns the gradients for ``weights``. Default: the result is the gradients.
    """

    def __init__(self, weights: Weights = None, gradients: Callable[[Any, tuple[Any, ...]], Any] | None = None) -> None:
        if weights is None and gradients is not None:
            raise ValueError("gradients is given and weights is None; expected the weights that they are for")
        self._weights = weights
        self._gradients = gradients

    # Whether to put, under the names that it has elsewhere.

    @property
    def enabled(self) -> bool:
        """True within an input pass that takes the work for the weights."""
        return will_defer(self._weights)

    def split_bw(self) -> bool:
        """As :attr:`enabled`."""
        return self.enabled

    def delay_wgrad_compute(self) -> bool:
        """As :attr:`enabled`; false outside of a backward, so that ``module.backward_dw()`` does nothing."""
        return self.enabled

    def put(self, *work: Any) -> None:
        """Takes work, in one of the three forms that stores have: ``put(function)``, ``put(arguments, function)`` or
        ``put(weight, prepare, function)``, for ``function(*prepare(async_op=False))``.

        Where no input pass takes it (:attr:`enabled` is false) it is done at once, and gradients that the
        function returns are added to the weights in a backward of their own, as the Function that put them will
        return None: hooks of these weights fire for both.

        Raises:
            TypeError, ValueError: as :func:`zbpipe.defer`; or other arguments than these.
        """
        function, arguments = self._parse(work)
        result = _C.defer(partial(self._run, function), self._weights, arguments)
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

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
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
            torch.autograd.backward(edges, added)


def run_backward_dw(module: nn.Module, weights: Sequence[nn.Parameter] | None = None) -> RemovableHandle:
    """Lets the weight pass call ``module.backward_dw()``, for a module whose backward gives no weight gradients and
    which computes them in that method, one microbatch per call, first in, first out.

    Where no input pass runs it is called at once, at the end of the module's backward, also of one for the inputs
    alone, so that the module's queue stays in step. Each call may set, or add to, the weights' ``.grad``:
    what it leaves there is the microbatch's gradient, which is then added as every other one, with hooks, ``main_grad``
    and whatever was in ``.grad`` before. A call that leaves ``.grad`` None has added the gradient elsewhere itself.

    A hook on the module's forward passes its tensor inputs through a node that takes the module's place; where
    none of them needs a gradient, the first one gets one computed, in vain.

    Args:
        module: has a method ``backward_dw()`` without arguments; its ``forward`` takes at least one floating-point
            tensor, by position.
        weights: whose gradients it computes; default: its parameters that require a gradient.

    Returns:
        A handle; its ``remove()`` undoes this for later calls of the module.

    Raises:
        TypeError: the module has no such method.

    As the module's queue says which microbatch is computed, weight passes in another order than the input passes
    compute microbatches in the latter's order; after all of them the sums are right. Weight passes of one module must
    not run at the same time.
    """
    if not callable(getattr(module, "backward_dw", None)):
        raise TypeError(f"{type(module).__name__} has no method backward_dw; expected a module that delays its weights")
    given = None if weights is None else tuple(weights)

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        served = [w for w in (module.parameters() if given is None else given) if w.requires_grad]
        floating = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
        places = [i for i in floating if args[i].requires_grad] or floating[:1]
        if not served or not torch.is_grad_enabled():
            return args
        if not places:
            raise TypeError(
                f"{type(module).__name__} was called without a floating-point tensor by position; "
                "backward_dw() has no place in its graph"
            )
        passed = _Entrance.apply(  # type: ignore[no-untyped-call]
            module, len(places), *(args[i] for i in places), *served
        )
        entered = list(args)
        for i, tensor in zip(places, passed, strict=True):
            entered[i] = tensor
        return tuple(entered)

    return module.register_forward_pre_hook(enter)


class _Entrance(torch.autograd.Function):
    """The identity of a module's inputs; its backward, the last of the module, hands over ``backward_dw``."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.module = module
        ctx.weights = tensors[count:]
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        first = 2 + len(grads)
        positions = tuple(range(first, first + len(ctx.weights)))
        if will_defer(positions):
            taken = _C.defer(_backward_dw, positions, (ctx.module, ctx.weights))
        else:  # also if nobody wants the gradients (torch's stages infer shapes so): the queue has an entry for them
            taken = _backward_dw(ctx.module, ctx.weights)
        return None, None, *grads, *taken


def _backward_dw(module: Any, weights: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
    """The gradients that one call of ``backward_dw()`` leaves in ``.grad``, which is then as it was."""
    before = [weight.grad for weight in weights]
    try:
        for weight in weights:
            weight.grad = None
        module.backward_dw()
        return [weight.grad for weight in weights]
    finally:
        for weight, grad in zip(weights, before, strict=True):
            weight.grad = grad
