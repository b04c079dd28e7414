"""The policy: which gradients the weight pass computes, what is kept for it, and how it adds.

docs/memory.md says what each choice costs.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch

from zbpipe._formatting import argument, refuse_what_runs_later

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
    """Which gradients the weight pass (W) computes, what the groups hold for it, and how it adds.

    I reads ``defer``, ``exclude`` and ``checkpoint``; W reads ``fused``; both read ``main_grad``.

    Attributes:
        defer: the gradients that W computes. "matrices": those of matrices in products, and of the biases added to
            these; I computes the gradients of vectors, and the groups hold them. "all": every gradient that can be
            split from I. "nothing": none; I computes every gradient, and W only adds.
        exclude: parameters, compared by identity, whose gradients I computes. Use it for a large head, whose logits'
            gradient would be too much to hold. A node that serves one of them runs whole in I. So do nodes that compute
            one of them from others, unless an output reaches them by no node of I.
        checkpoint: the treatment of packed activations (``torch.utils.checkpoint``, ``save_on_cpu``). "keep": I unpacks
            them once, and the groups hold what W reads. "recompute": W unpacks them once more, and so recomputes a
            checkpointed region. "input_pass": I computes the gradients that need them.
        fused: True adds a product to an existing gradient by one kernel in the gradient's dtype, ``addmm_``. If the
            gradient's dtype is wider, the kernel is ``addmm`` with ``out_dtype`` where the device has it; elsewhere the
            factors are cast. False adds on the CPU as ``grad += a @ b`` does, to the bit. On other devices a product of
            the gradient's dtype uses ``addmm_`` in either case.
        main_grad: True adds a weight's gradient to the weight's ``main_grad``, where there is one, and leaves ``.grad``
            alone. ``main_grad`` is a floating-point tensor of the weight's shape and device. The weight's
            ``grad_added_to_main_grad`` becomes True, where there is one. Kernels that set it themselves may run for one
            weight on one thread at a time.

    Raises:
        TypeError, ValueError: an attribute has none of these values.

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
            value = getattr(self, name)
            if not isinstance(value, str) or value not in words:
                error = ValueError if isinstance(value, str) else TypeError
                raise error(f"{name} is {argument(value)}; expected one of {', '.join(map(repr, words))}")
        for name in _YES_OR_NO:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {argument(getattr(self, name))}; expected True or False")
        object.__setattr__(self, "exclude", _parameters(self.exclude))

    def as_dict(self) -> dict[str, str | bool | list[str]]:
        """The choices by name. ``exclude`` becomes a list of shapes and dtypes, which keeps no tensor."""
        return {**vars(self), "exclude": [f"{tuple(p.shape)} {p.dtype}" for p in self.exclude]}

    def __repr__(self) -> str:
        return f"Policy({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})"

    def _choices(self) -> tuple[int, int, bool, bool, tuple[torch.Tensor, ...]]:
        """For C: csrc/core/pass/zbp_kind.h has the numbers."""
        defer = ("nothing", "matrices", "all").index(self.defer)
        return defer, _WORDS["checkpoint"].index(self.checkpoint), self.main_grad, self.fused, self.exclude

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
            words = "expected defer=, checkpoint=, fused= or main_grad=; parameters to exclude are named in Python"
            raise ValueError(f"{_VARIABLE} says {item!r}; {words}")
    try:
        return Policy(**choices)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_VARIABLE} is {os.environ[_VARIABLE]!r}: {error}") from None


_default = _from_environment()
_blocks: contextvars.ContextVar[tuple[Policy, ...]] = contextvars.ContextVar("zbpipe_policies", default=())


def get_policy() -> Policy:
    """The policy that a pass would follow now.

    Returns:
        The policy of the innermost :func:`policy` block of this thread or task, or else the process's.
    """
    blocks = _blocks.get()
    return blocks[-1] if blocks else _default


def set_policy(policy: Policy | None = None, /, **choices: Unpack[Choices]) -> Policy:
    """Changes the process's policy, for all threads.

    Args:
        policy: the new policy; None for the process's own.
        choices: changes to it, by the attributes of :class:`Policy`.

    Returns:
        The policy before. Give it to :func:`set_policy` to go back.

    Raises:
        RuntimeError: this thread is within a :func:`policy` block, which would hide the change.
        TypeError, ValueError: there is no such choice, or no such value of it. Nothing has been changed.

    Example::

        before = zbpipe.set_policy(defer="all")
        zbpipe.set_policy(before)
    """
    global _default
    if _blocks.get():
        raise RuntimeError(
            "set_policy() was called within a policy() block, which decides for this thread until its end; "
            "call set_policy() outside of the block, or open another policy() block"
        )
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy is {argument(policy)}; expected a Policy, as set_policy() returns it")
    before, _default = _default, _changed(policy or _default, choices)
    return before


def policy(**choices: Unpack[Choices]) -> _Block:
    """Changes the policy for the passes that are called in a ``with`` block, in this thread or task.

    Threads that the block starts follow the process's policy.

    Args:
        choices: changes to the policy in effect, by the attributes of :class:`Policy`.

    Returns:
        A context manager and decorator, for any number of blocks and calls. ``with`` gives the policy of the block.

    Raises:
        TypeError, ValueError: there is no such choice, or no such value of it. Or a coroutine or generator function was
            decorated, which would run after the block.

    Example::

        with zbpipe.policy(checkpoint="recompute", exclude=[stage.weight]):
            schedule.step(x)
    """
    checked = _changed(_default, choices)
    return _Block({name: getattr(checked, name) for name in choices})


class _Block(contextlib.ContextDecorator):
    """What :func:`policy` returns. It keeps no state of a block, since blocks nest, and threads share it."""

    _is_used = True  # where __init__ has not run, as of an object that dynamo makes

    def __init__(self, choices: dict[str, Any]) -> None:
        self._choices = choices
        self._is_used = False

    def __call__(self, function: Any) -> Any:
        self._is_used = True
        refuse_what_runs_later(function)
        return super().__call__(function)

    def __del__(self) -> None:
        if not self._is_used and not sys.is_finalizing():
            warnings.warn(
                "zbpipe.policy(...) was called and not used, and changed nothing; write `with zbpipe.policy(...):`, or "
                "zbpipe.set_policy(...) for the whole process",
                ResourceWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Policy:
        self._is_used = True
        _blocks.set((*_blocks.get(), _changed(get_policy(), self._choices)))
        return get_policy()

    def __exit__(self, *error: object) -> None:
        _blocks.set(_blocks.get()[:-1])


def _changed(policy: Policy, choices: Mapping[str, Any]) -> Policy:
    for name in choices.keys() - vars(policy).keys():
        raise TypeError(f"{name!r} is no choice of a policy; expected one of {', '.join(map(repr, vars(policy)))}")
    return dataclasses.replace(policy, **choices)
