"""The policy: which gradients are left to the weight pass, what is kept for it, and how it adds.

docs/memory.md says what each choice costs.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch

from zbpipe._formatting import argument

if TYPE_CHECKING:
    from typing_extensions import Unpack

Defer = Literal["matrices", "all", "nothing"]
Checkpoint = Literal["keep", "recompute", "input_pass"]

_WORDS = {"defer": ("matrices", "all", "nothing"), "checkpoint": ("keep", "recompute", "input_pass")}
_YES_OR_NO = ("fused", "main_grad")
_VARIABLE = "ZBPIPE_POLICY"


class Choices(TypedDict, total=False):
    """Keyword arguments of :func:`policy` and :func:`set_policy`: the attributes of :class:`Policy`."""

    defer: Defer
    exclude: Iterable[torch.Tensor]
    checkpoint: Checkpoint
    fused: bool
    main_grad: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """Which gradients the weight pass (W) computes, what is kept for it, and how it adds.

    ``defer``, ``exclude`` and ``checkpoint`` count when I is called, ``fused`` when W is, ``main_grad`` in both.

    Attributes:
        defer: whose gradients W computes. "matrices": those of products with a matrix, and their biases; I computes the
            gradients of vectors and keeps them. "all": every gradient that can be split from I. "nothing": I computes
            every gradient and keeps it; W only adds.
        exclude: parameters whose gradients I computes all the same, and keeps: a large head, say, whose logits'
            gradient is too much to hold. They are compared by identity. A node that serves one of them runs whole in I.
        checkpoint: what becomes of activations saved behind hooks (``torch.utils.checkpoint``, ``save_on_cpu``).
            "keep": I unpacks them, once, and keeps what W reads. "recompute": they stay packed, and W unpacks them once
            more: it computes a checkpointed region again. "input_pass": I computes the gradients that need them.
        fused: True adds a product to an existing gradient by one kernel in the gradient's dtype: ``addmm_``, with
            ``out_dtype`` where the gradient is wider and the device can, else on factors cast to it. On the CPU
            False adds as ``grad += a @ b`` would, to the bit; elsewhere products of the gradient's dtype go by
            ``addmm_``.
        main_grad: True adds a weight's gradient to its attribute ``main_grad``, a floating-point tensor of its shape
            and device, where it has one, and leaves ``.grad`` alone. Its attribute ``grad_added_to_main_grad``, if it
            has one, becomes True.

    Raises:
        TypeError, ValueError: a value that is none of these.

    Source:
        ``torch.utils.checkpoint.CheckpointPolicy`` (MUST_SAVE, PREFER_RECOMPUTE) for ``checkpoint``; Megatron-LM's
        ``gradient_accumulation_fusion`` for ``fused`` and ``main_grad``.
    """

    defer: Defer = "matrices"
    exclude: tuple[torch.Tensor, ...] = ()
    checkpoint: Checkpoint = "keep"
    fused: bool = False
    main_grad: bool = False

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            _require_one_of(words, name, getattr(self, name))
        for name in _YES_OR_NO:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {argument(getattr(self, name))}; expected True or False")
        object.__setattr__(self, "exclude", _parameters(self.exclude))

    def as_dict(self) -> dict[str, str | bool | list[str]]:
        """The choices by their names. ``exclude`` is a list of shapes and dtypes, for it may not keep a tensor."""
        return {**vars(self), "exclude": [f"{tuple(p.shape)} {p.dtype}" for p in self.exclude]}

    def __repr__(self) -> str:
        return f"Policy({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})"

    def _key(self) -> tuple[Any, ...]:
        return self.defer, frozenset(map(id, self.exclude)), self.checkpoint, self.fused, self.main_grad

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Policy) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


def _parameters(given: Any) -> tuple[torch.Tensor, ...]:
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise TypeError(f"exclude is {argument(given)}; expected an iterable of parameters, such as [head.weight]")
    parameters = tuple(given)
    for i, parameter in enumerate(parameters):
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"exclude[{i}] is {argument(parameter)}; expected a parameter")
    return parameters


def _require_one_of(words: tuple[str, ...], name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {argument(value)}; expected one of {', '.join(map(repr, words))}")
    if value not in words:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, words))}")


def _from_environment() -> Policy:
    """The policy that ZBPIPE_POLICY names, such as ``defer=all,checkpoint=recompute,fused=1``."""
    choices: dict[str, Any] = {}
    for item in filter(None, os.environ.get(_VARIABLE, "").replace(" ", "").split(",")):
        name, _, value = item.partition("=")
        if name in _YES_OR_NO:
            if value not in ("0", "1"):
                raise ValueError(f"{_VARIABLE} says {item!r}; expected {name}=0 or {name}=1")
            choices[name] = value == "1"
        elif name in _WORDS:
            choices[name] = value
        else:
            raise ValueError(f"{_VARIABLE} says {item!r}; expected defer=, checkpoint=, fused= or main_grad=")
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


def set_policy(policy: Policy | None = None, /, **choices: Unpack[Choices]) -> Policy:
    """Changes the process's policy, for all threads.

    Args:
        policy: the new one; None for the one that the process has.
        choices: what changes in it; see :class:`Policy`.

    Returns:
        The policy that it was; give it to :func:`set_policy` to go back.

    Raises:
        RuntimeError: within a :func:`policy` block of this thread, which would hide the change.
        TypeError, ValueError: a choice that there is none of. Nothing has been changed.
    """
    global _default
    if _current.get() is not None:
        raise RuntimeError(
            "set_policy() was called within a policy() block, which decides for this thread until its end; "
            "call set_policy() outside of the block, or open another policy() block"
        )
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy is {argument(policy)}; expected a Policy, as set_policy() returns it")
    before, _default = _default, dataclasses.replace(policy or _default, **choices)  # type: ignore[arg-type]
    return before


@contextlib.contextmanager
def policy(**choices: Unpack[Choices]) -> Iterator[Policy]:
    """Changes the policy for the passes that are called in a ``with`` block, in this thread or task.

    Threads that are started within the block do not see it; they follow the process's policy.

    Args:
        choices: what changes; see :class:`Policy`. What is not given stays.

    Returns:
        A context manager, also usable as a decorator. It gives the policy that holds within it.

    Raises:
        TypeError, ValueError: a choice that there is none of.
    """
    token = _current.set(dataclasses.replace(get_policy(), **choices))  # type: ignore[arg-type]
    try:
        yield get_policy()
    finally:
        _current.reset(token)
