"""How the backward of an ``autograd.Function`` leaves weight gradients to the weight pass."""

import operator
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch

from zbpipe import _C
from zbpipe._torch import autograd


def defer(
    function: Callable[..., Any], weights: SupportsIndex | tuple[SupportsIndex, ...] | None, saved: tuple[Any, ...] = ()
) -> Any:
    """In the backward of an ``autograd.Function``: leaves ``function(*saved)``, which computes weights' gradients, to
    the weight pass.

    ::

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            dw = zbpipe.defer(lambda x, grad: grad.mT @ x, weights=1, saved=(x, grad))
            return grad @ w, dw

    Within an input pass (:func:`stage_backward_input`) the call is kept in the parameter group, made in its weight
    pass, once, and its gradients are added as all others are: hooks of the weights, ``.grad`` or ``main_grad``, the
    way from a weight to the tensor that the Function was given (a cast, a view, any other computation). What is
    returned here is then None, for ``backward`` to return. In every other case it is made at once and its gradients are
    returned here: in an ordinary backward, in a backward within the input pass or under ``torch.vmap``, where the
    policy leaves these weights to the input pass (by default vectors that come without a matrix), where the Function's
    node has a post hook, and where a gradient is needed to go on, since what was given for the weight is computed from
    the stage's inputs. Gradients that nobody asks for (a frozen weight, one that is None, one that is not among those
    given to the input pass) are not computed at all: if none of the weights' is asked for, the call is not made.

    Args:
        function: gets what is in ``saved``; returns a gradient or None for a single weight, otherwise a tuple or
            list of them, one per weight. Gradients have the shape, dtype and device of what was given to the Function,
            as the ones that ``backward`` returns. It may return None for a weight to which it has added the gradient
            itself; hooks then see what they see for such a Function in an ordinary backward. Without grad mode, with
            autocast as it is here, on the stream of the Function.
        weights: the position of the weight among the arguments of ``forward``, counted as in
            ``ctx.needs_input_grad``, or a tuple of positions, one for each gradient. None: all the Function's weights,
            and ``function`` adds all gradients itself and returns None; then the call is made at once wherever it is
            not handed over, whatever is asked for, as a backward that adds by itself would do.
        saved: what ``function`` is called with. Tensors in it come with their class and attributes, but without
            history, are counted in the group's ``bytes_held`` and freed when the call has been made. An
            ``nn.Parameter`` comes as it is and is not counted; nor is a view of one. None may be modified in place
            until then, which the weight pass checks. All else is handed on as it is, neither counted nor checked: a
            tuple, list or dictionary must hold no tensor with a history (``detach()`` it), and nobody looks into other
            objects, tensors' attributes among them, nor into what ``function`` closes over. ``function`` should not
            close over ``ctx``, which holds the graph. If it reaches its own group, only the garbage collector frees a
            group that is never run.

    Returns:
        For a single weight its gradient or None; for several a tuple of such.

    Raises:
        TypeError, ValueError: an argument is refused, before ``function`` is called; or ``function`` returned what are
            no gradients for ``weights``.

    If ``function`` raises in the weight pass, its gradients have not been added, and a repeated weight pass calls it
    again; if it returned, it is not called again. A group that is dropped without its weight pass never calls it.

    Source:
        Delayed weight gradients: NVIDIA/TransformerEngine PR 1976 (``wgrad_store.put``), which skip hooks:
        NVIDIA/Megatron-LM 2999, 6697.
    """
    if torch.compiler.is_compiling():
        return function(*saved)
    if not callable(function):
        raise TypeError(
            f"function is a {_type(function)}; expected a callable that returns the gradients of the weights"
        )
    if not isinstance(saved, tuple):
        raise TypeError(f"saved is a {_type(saved)}; expected a tuple of what the function is called with")
    _check_containers(saved)
    if weights is None:
        _C.defer(function, None, saved)
        return None
    if isinstance(weights, tuple):
        return _C.defer(function, _positions(weights), saved)
    return _C.defer(function, _positions((weights,)), saved)[0]


def _positions(weights: tuple[SupportsIndex, ...]) -> tuple[int, ...]:
    if not weights:
        raise ValueError(
            "weights is empty; expected the positions of the weights whose gradients the function returns, or None if "
            "it adds them itself"
        )
    for weight in weights:
        if isinstance(weight, (bool, torch.Tensor)) or not hasattr(type(weight), "__index__"):
            raise TypeError(
                f"weights names a {_type(weight)}; expected the position of a weight among the arguments of forward, "
                "as in ctx.needs_input_grad, a tuple of such, or None"
            )
    return tuple(map(operator.index, weights))


def _check_containers(saved: tuple[Any, ...]) -> None:
    """Refuses tensors with a history within containers: they would hold the graph until the weight pass."""
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
                    f"saved has a {_type(container)} with a tensor of shape {list(thing.shape)} that has a history; "
                    "pass the tensor itself in saved, or detach() it"
                )


def _has_history(tensor: torch.Tensor) -> bool:
    base = autograd.base_of(tensor)  # which a view keeps that was made without grad mode
    return tensor.grad_fn is not None or (base is not None and base.grad_fn is not None)


def _type(thing: object) -> str:
    return type(thing).__name__
