"""What is left to the weight pass, what is kept for it, and how it adds: a policy of six choices.

Note [What each choice costs]

defer: which weights' gradients W computes. ("heavy": a matrix or more; "light": a vector, a scale, a bias.)

    "matrices"      The default. W computes the heavy weights' gradients; I those of the light ones and keeps them, a
                    vector each, until W adds them, so that the activations behind them go in I. A bias beside a
                    deferred matrix waits with it: its output gradient is kept anyway. Held from I to W: per heavy
                    weight its input and its output gradient, each storage once.
    "all"           W also computes what light weights need, where the node can be split (norms, elementwise
                    products, added biases). I is shortest; more is held: a norm's input beside that of the linear
                    layer behind it.
    "nothing"       I computes every gradient and keeps it, W only adds. I is as long as a whole backward and W fills no
                    bubble; held is one gradient per weight and microbatch in flight, however often the weight is used,
                    and no activation but what nodes between a node of I and a weight (a computed weight) have saved.
    function        Called with each weight in I; true: its gradient is left to W where its node can be split, light
                    or not; false: it is computed in I. A node with several weights is deferred if any of them is.

checkpoint: what W needs of activations that are saved behind hooks: ``torch.utils.checkpoint`` (not reentrant, nested
and selective too), ``save_on_cpu``, packing hooks.

    "keep"          The default. Unpacked in I, as an ordinary backward does, and what W reads is kept: the same bytes as without
                    checkpointing, no second recomputation, whatever is in flight.
    "recompute"     Stays packed until W, which unpacks it: a checkpointed region is recomputed once more in each call
                    of the weight pass, region by region, from the last one to the first. Held from I to W: output
                    gradients, and the regions' inputs and random states (or the copies on the CPU); a stage's input
                    that is one keeps its ``.grad``. Weights must not change before the
                    last W that computes a region with them: W refuses. A region under a CheckpointPolicy,
                    which torch recomputes only once, is kept all the same; so is everything in a GraphExecGroup.
    "input_pass"    These weights' gradients are computed in I and kept: one recomputation, no activation is held but
                    what nodes between a node of I and a weight (a computed weight) have saved.
    function        Called with each weight in I; returns one of the three words.

fused: False adds a product to an existing gradient as ``grad += a @ b`` would, to the bit. Where BLAS computes a panel
    of rows or columns as it computes the whole (one thread, float32 and float64, no side shorter than 256) it goes
    panel by panel: no temporary of the weight's size. Several products for one weight are summed first, in one
    temporary; an ordinary backward takes one for each. True adds each by ``grad.addmm_(a, b)``: up to a third faster
    where the inner dimension is short; those of several microbatches that one call of W is given as one, whose inner
    dimension is that of all. BLAS rounds once per block of that dimension, so after some microbatches
    gradients differ from an ordinary backward's by more than the last bit. On other devices than the CPU products of
    the gradient's dtype are always added so: there the accumulation rounds once, in 16 bits once less than an ordinary
    backward.

main_grad: True accumulates a weight that has an attribute ``main_grad``, a floating-point tensor of its shape and
    device (usually float32), there and leaves its ``.grad`` alone, as Megatron's fused kernels do; its attribute
    ``grad_added_to_main_grad``, if it has one, becomes True. Hooks of the weight see the gradient as always. A patched
    schedule with ``scale_grads`` divides it as it divides a ``.grad``.

wide: True adds a product of 16-bit factors to a float32 gradient (a ``main_grad``, a ``.grad`` of a weight whose
    ``grad_dtype`` says so, the ``.grad`` of a float32 weight under autocast) in float32: neither the product nor a sum
    of products is rounded to 16 bits first, and no temporary is larger than 2 MiB. False rounds each to the weight's
    dtype before it is added, as an ordinary backward does. On the CPU, and where the device has ``addmm`` with an
    ``out_dtype``, as CUDA; elsewhere, and for what is no product (convolutions, biases, sums that the engine forms for
    weights that hooks watch), as without. A first gradient is rounded still: there is nothing yet to add it to.
    Products are added one by one, as with ``fused``.

split_functions: True looks at what the backward of a Python Function computes in I. A matrix product (``mm``, ``bmm``,
    ``_scaled_mm``) that it only transposes, views, casts and returns as a weight's gradient is not computed, but handed
    over to W as by :func:`zbpipe.defer`; its factors are held. Whatever else touches such a product computes it at
    once. ``defer`` and ``checkpoint`` say for which weights, as for work that is handed over by hand. Each operator of
    such a backward costs a few us more. What nobody sees is what writes to a factor past torch's dispatcher when it has
    been multiplied (Triton, a C++ extension, ``.numpy()``, ``.data = ...``; all of it in docs/kernels.md): such a
    Function needs the default, False.

``defer``, ``checkpoint`` and ``split_functions`` count when I is called, ``fused``, ``wide`` and
``main_grad`` when W is; ``main_grad`` in I too, for what a reentrant checkpoint's own backward adds there: it goes to
``main_grad`` when I ends. ``stage_backward`` is not told the weights and refuses such a checkpoint.
"""

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from zbpipe._text import argument

# The numbers of zbp_shim.h.
_DEFER = {"nothing": 0, "matrices": 1, "all": 2}
_CHECKPOINT = {"keep": 0, "recompute": 1, "input_pass": 2}
_YES_OR_NO = ("fused", "main_grad", "wide", "split_functions")
_VARIABLE = "ZBPIPE_POLICY"

Defer = Literal["matrices", "all", "nothing"] | Callable[[torch.Tensor], bool]
Checkpoint = Literal["keep", "recompute", "input_pass"] | Callable[[torch.Tensor], str]


class _AsItIs:
    """Of a choice that is not made."""

    def __repr__(self) -> str:
        return "as it is"


_AS_IT_IS: Any = _AsItIs()


@dataclass(frozen=True)
class Policy:
    """What W computes, what is kept for it, and how it adds. What each choice costs: Note [What each choice costs] in
    ``zbpipe/_policy.py``.

    Attributes:
        defer: which weights' gradients W computes: "matrices", "all" that can be split, "nothing"; or a function of a
            weight (called in I) that returns whether W does.
        checkpoint: what becomes of activations that are checkpointed, offloaded or packed otherwise: "keep" (what W
            reads is unpacked in I and kept), "recompute" (they stay packed until W), "input_pass" (these weights'
            gradients are computed in I); or a function of a weight (called in I) that returns one of these words.
        fused: products are added by ``grad.addmm_(a, b)``; otherwise as ``grad += a @ b`` would, to the bit.
        main_grad: a weight's gradient is added to its attribute ``main_grad``, a floating-point tensor of its shape and
            device, where it has one, and not to ``.grad``.
        wide: products of 16-bit factors are added to float32 gradients without being rounded before.
        split_functions: what the backward of a Python ``autograd.Function`` multiplies for a weight is left to W.

    Raises:
        TypeError, ValueError: a value that is none of these.

    Source:
        ``torch.utils.checkpoint.CheckpointPolicy`` (MUST_SAVE, PREFER_RECOMPUTE) and pytorch/pytorch 136766 for
        ``checkpoint``; Megatron-LM's ``gradient_accumulation_fusion`` for ``fused`` and ``main_grad``;
        ``torch.addmm``'s ``out_dtype`` for ``wide``.
    """

    defer: Defer = "matrices"
    checkpoint: Checkpoint = "keep"
    fused: bool = False
    main_grad: bool = False
    wide: bool = False
    split_functions: bool = False

    def __post_init__(self) -> None:
        for name, words in (("defer", tuple(_DEFER)), ("checkpoint", tuple(_CHECKPOINT))):
            value = getattr(self, name)
            if not callable(value):
                _require_one_of(words, name, value, " or a function of a parameter")
        for name in _YES_OR_NO:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {argument(getattr(self, name))}; expected True or False")

    def as_dict(self) -> dict[str, str | bool | int | None]:
        """The choices by their names; a function is its name, and not what it says of itself, which may be a tensor."""
        return {
            name: getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else value
            for name, value in vars(self).items()
        }

    def __repr__(self) -> str:
        return f"Policy({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})"

    def _defer(self) -> int | Callable[[torch.Tensor], int]:
        choice = self.defer
        if isinstance(choice, str):
            return _DEFER[choice]
        return lambda parameter: _DEFER["all" if choice(parameter) else "nothing"]

    def _checkpoint(self) -> int | Callable[[torch.Tensor], int]:
        choice = self.checkpoint
        if isinstance(choice, str):
            return _CHECKPOINT[choice]
        what = "what the checkpoint function returned"
        return lambda parameter: _CHECKPOINT[_require_one_of(tuple(_CHECKPOINT), what, choice(parameter))]



def _require_one_of(words: Sequence[str], name: str, value: object, alternative: str = "") -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {argument(value)}; expected one of {', '.join(map(repr, words))}{alternative}")
    if value not in words:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, words))}{alternative}")
    return value


def _from_environment() -> Policy:
    """The policy that ZBPIPE_POLICY names, such as ``defer=all,checkpoint=recompute,fused=1``."""
    choices: dict[str, Any] = {}
    for item in filter(None, os.environ.get(_VARIABLE, "").replace(" ", "").split(",")):
        name, _, value = item.partition("=")
        if name in _YES_OR_NO:
            if value not in ("0", "1"):
                raise ValueError(f"{_VARIABLE} says {item!r}; expected {name}=0 or {name}=1")
            choices[name] = value == "1"
        elif name in ("defer", "checkpoint"):
            choices[name] = value
        else:
            raise ValueError(
                f"{_VARIABLE} says {item!r}; expected defer=, checkpoint=, fused=, main_grad=, wide= or "
                "split_functions="
            )
    try:
        return Policy(**choices)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_VARIABLE} is {os.environ[_VARIABLE]!r}: {error}") from None


_default = _from_environment()
_current: contextvars.ContextVar[Policy | None] = contextvars.ContextVar("zbpipe_policy", default=None)


def get_policy() -> Policy:
    """The policy that a pass called now would follow.

    Returns:
        That of the innermost :func:`policy` block of this thread or task, or else the process's.
    """
    return _current.get() or _default


def set_policy(
    *,
    defer: Defer = _AS_IT_IS,
    checkpoint: Checkpoint = _AS_IT_IS,
    fused: bool = _AS_IT_IS,
    main_grad: bool = _AS_IT_IS,
    wide: bool = _AS_IT_IS,
    split_functions: bool = _AS_IT_IS,
) -> Policy:
    """Changes the process's default policy, for all threads. What is not given stays.

    Args:
        defer, checkpoint, fused, main_grad, wide, split_functions: see :class:`Policy`.

    Returns:
        The policy that it was.

    Raises:
        TypeError, ValueError: a choice that there is none of; nothing has been changed.
    """
    global _default
    before, _default = (
        _default,
        _changed(_default, defer, checkpoint, fused, main_grad, wide, split_functions),
    )
    return before


@contextlib.contextmanager
def policy(
    *,
    defer: Defer = _AS_IT_IS,
    checkpoint: Checkpoint = _AS_IT_IS,
    fused: bool = _AS_IT_IS,
    main_grad: bool = _AS_IT_IS,
    wide: bool = _AS_IT_IS,
    split_functions: bool = _AS_IT_IS,
) -> Iterator[Policy]:
    """Changes the policy for the passes that are called in a ``with`` block, in this thread or task. What is not given
    stays.

    Threads that are started within the block do not see it; they follow the process's policy.

    Args:
        defer, checkpoint, fused, main_grad, wide, split_functions: see :class:`Policy`.

    Returns:
        A context manager, which gives the policy that holds within it.

    Raises:
        TypeError, ValueError: a choice that there is none of.
    """
    token = _current.set(
        _changed(get_policy(), defer, checkpoint, fused, main_grad, wide, split_functions)
    )
    try:
        yield get_policy()
    finally:
        _current.reset(token)


def _changed(before: Policy, *given: Any) -> Policy:
    """`given` in the order of the policy's fields."""
    choices = zip((field.name for field in dataclasses.fields(before)), given, strict=True)
    return dataclasses.replace(before, **{name: value for name, value in choices if value is not _AS_IT_IS})
