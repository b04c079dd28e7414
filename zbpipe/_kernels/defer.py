"""How the backward of an ``autograd.Function`` leaves weight gradients to the weight pass."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zbpipe import _C

Weights = int | torch.Tensor | Sequence[int | torch.Tensor] | None


def defer(function: Callable[..., Any], weights: Weights, saved: Sequence[Any] = ()) -> Any:
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
        weights: for each gradient the position of the argument of ``forward`` that it is for, counted as in
            ``ctx.needs_input_grad``, or a tensor that was given there (not a view or a cast of it). None: all the
            Function's weights, and ``function`` adds all gradients itself and returns None; then an ordinary backward
            that asks for the gradients of some arguments, but not of all, makes the call if one of these is a leaf or
            was computed from leaves alone, by at most 256 nodes. Name weights that are computed by more, or frozen.
        saved: what ``function`` is called with. Tensors in it, also within tuples, lists, dictionaries and subclasses
            of these, come with their class and attributes, but without history, are counted in the group's
            ``bytes_held`` and freed when the call has been made. An ``nn.Parameter`` comes as it is and is not counted;
            nor is a view of one. None may be modified in place until then, which the weight pass checks. Lists and
            dictionaries are copied. Nobody looks into other objects, dataclasses, sets and tensors' attributes among
            them, nor into what ``function`` closes over: it is held, with its history, and neither counted nor
            checked. ``function`` should not close over ``ctx``, which holds the graph. If it reaches its own group,
            only the garbage collector frees a group that is never run.

    Returns:
        For a single weight its gradient or None; for several a tuple of such.

    Raises:
        TypeError, ValueError: an argument is refused, before ``function`` is called; or ``function`` returned what are
            no gradients for ``weights``. What contains itself, or cannot be copied, is refused in ``saved`` where it
            would be kept.

    If ``function`` raises in the weight pass, its gradients have not been added, and a repeated weight pass calls it
    again; if it returned, it is not called again. A group that is dropped without its weight pass never calls it.

    Source:
        Delayed weight gradients: NVIDIA/TransformerEngine PR 1976 (``wgrad_store.put``), which skip hooks:
        NVIDIA/Megatron-LM 2999, 6697.
    """
    if torch.compiler.is_compiling():
        return function(*saved)
    return _C.defer(function, weights, saved)
