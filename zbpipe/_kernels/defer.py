"""How the backward of an ``autograd.Function`` leaves weight gradients to the weight pass."""

import operator
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch

from zbpipe import _C
from zbpipe._formatting import argument
from zbpipe._torch import autograd
from zbpipe._work import gradients_in


def defer(
    function: Callable[..., Any], weights: SupportsIndex | tuple[SupportsIndex, ...] | None, saved: tuple[Any, ...] = ()
) -> Any:
    """Leaves ``function(*saved)``, which computes weights' gradients, to the weight pass (W).

    The backward of an ``autograd.Function`` calls it::

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            dw = zbpipe.defer(lambda x, grad: grad.mT @ x, weights=1, saved=(x, grad))
            return grad @ w, dw

    Within an input pass (I) the parameter group keeps the call, and W of this group makes the call, once. W adds the
    gradients to ``.grad`` or ``main_grad``, as all others. Hooks run. If the Function's argument is computed from the
    weight (by a cast, a view, anything), the gradient goes back through that computation. ``defer`` returns None, for
    ``backward`` to return.

    Otherwise ``defer`` makes the call at once and returns the gradients:

    - in an ordinary backward, in a backward within I, and under ``torch.vmap``;
    - where the policy leaves these weights to I (by default vectors without a matrix);
    - where the Function's node has a post hook, or its argument is computed from the stage's inputs.

    A gradient that is not asked for (of a frozen weight, of None, of a weight that I was not given) is not computed. If
    no gradient is asked for, the call is not made.

    Args:
        function: takes the entries of ``saved``. It returns a gradient or None for a single weight, else a tuple or
            list with one of these per weight. A gradient has the shape, dtype and device of the Function's argument,
            as in ``backward``. None also stands for a gradient that ``function`` has added itself; hooks then see the
            same as in an ordinary backward. It runs without grad mode, on the Function's stream, with the autocast of
            this call.
        weights: the weight's position among the arguments of ``forward``, as in ``ctx.needs_input_grad``, or a tuple of
            positions, one per gradient. None means all weights of the Function: ``function`` adds all gradients itself
            and returns None. Then a call that is not left to W is made even if no gradient is asked for.
        saved: the arguments of ``function``. Tensors keep their class and attributes, lose their history, count in the
            group's ``bytes_held``, and are freed after the call. An ``nn.Parameter`` is passed as it is; neither it
            nor a view of it is counted. Modify none of these tensors in place before the call: W checks that. Other
            objects are passed as they are, neither counted nor checked. Tensors with a history (``detach()`` them) are
            refused in a tuple, list or dictionary, and not looked for in other objects, attributes and closures.
            ``function`` should not close over ``ctx``, which holds the graph. Only the garbage collector frees a group
            that never runs and that ``function`` refers to.

    Returns:
        A gradient or None for a single weight; a tuple of these for several.

    Raises:
        TypeError, ValueError: an argument is refused, before ``function`` is called; or ``function`` did not return
            gradients of ``weights``.

    If ``function`` raises in W, its gradients have not been added, and the next W of the group calls it again, unless W
    had run a node that has saved something: then torch raises. Once it has returned, it is not called again. A group
    that is dropped without W never calls it.

    Source:
        Delayed weight gradients: NVIDIA/TransformerEngine PR 1976 (``wgrad_store.put``), which skip hooks:
        NVIDIA/Megatron-LM 2999, 6697.
    """
    listed = weights if isinstance(weights, tuple) or weights is None else (weights,)
    if torch.compiler.is_compiling():
        grads = tuple(gradients_in(function(*saved), len(listed or ())))
    else:
        grads = _deferred(function, listed, saved)
    return grads if isinstance(weights, tuple) else grads[0] if grads else None


def _deferred(function: Any, weights: tuple[SupportsIndex, ...] | None, saved: Any) -> tuple[Any, ...]:
    """As :func:`defer`, for a tuple of positions or None. Refuses what is no argument of the kind."""
    if not callable(function):
        raise TypeError(
            f"function is {argument(function)}; expected a callable that returns the gradients of the weights"
        )
    if not isinstance(saved, tuple):
        raise TypeError(f"saved is {argument(saved)}; expected a tuple, the arguments of the function")
    _check_containers(saved)
    grads: tuple[Any, ...] = _C.defer(function, None if weights is None else _positions(weights), saved)
    return grads


def _positions(weights: tuple[SupportsIndex, ...]) -> tuple[int, ...]:
    if not weights:
        raise ValueError(
            "weights is empty; expected the positions of the weights whose gradients the function returns, or None if "
            "it adds them itself"
        )
    for weight in weights:
        if isinstance(weight, (bool, torch.Tensor)) or not hasattr(type(weight), "__index__"):
            raise TypeError(
                f"weights names {argument(weight)}; expected a weight's position among the arguments of forward, as in "
                "ctx.needs_input_grad, a tuple of positions, or None"
            )
    positions = tuple(map(operator.index, weights))
    if len(set(positions)) < len(positions):
        raise ValueError(f"weights names a position twice: {positions}; expected one gradient per weight")
    return positions


def _check_containers(saved: tuple[Any, ...]) -> None:
    """Refuses containers of tensors with a history, which would hold the graph until W."""
    todo = [thing for thing in saved if isinstance(thing, (tuple, list, dict))]
    seen = set()
    while todo:
        container = todo.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        for thing in dict.values(container) if isinstance(container, dict) else container:
            if isinstance(thing, (tuple, list, dict)):
                todo.append(thing)
            elif isinstance(thing, torch.Tensor) and _has_history(thing):
                raise ValueError(
                    f"saved has {argument(container)} with a tensor of shape {list(thing.shape)} that has a history; "
                    "pass the tensor itself in saved, or detach() it"
                )


def _has_history(tensor: torch.Tensor) -> bool:
    base = autograd.base_of(tensor)  # whose history a view keeps, even one made without grad mode
    return tensor.grad_fn is not None or (base is not None and base.grad_fn is not None)
