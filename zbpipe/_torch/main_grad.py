"""A weight's ``main_grad``, where Megatron-LM and its kin accumulate. The C part imports this module by name."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zbpipe._torch.autograd import placed

FLAG = "grad_added_to_main_grad"

Watched = tuple[int, Any, Any]  # a weight's number, the weight, its flag as it was


def set_flag(weight: Any, flag: Any) -> None:
    """Sets the flag of a weight that has the attribute, whatever is in it."""
    if hasattr(weight, FLAG):
        setattr(weight, FLAG, flag)


def places(weights: Sequence[Any]) -> list[torch.Tensor | None]:
    """Where W adds each weight's gradients; None stands for ``.grad``. Nothing is changed until all were looked at."""
    found = [getattr(weight, "main_grad", None) for weight in weights]
    for weight, main_grad in zip(weights, found, strict=True):
        if main_grad is not None:
            _check(weight, main_grad)
    for weight, main_grad in zip(weights, found, strict=True):
        if main_grad is not None and getattr(weight, FLAG, None) is not None:
            setattr(weight, FLAG, True)  # hooks that would add .grad to main_grad see that there is nothing left to add
    return found


def _check(weight: torch.Tensor, main_grad: Any) -> None:
    of = f"the main_grad of the weight of {placed(weight)}"
    if not isinstance(main_grad, torch.Tensor):
        raise TypeError(f"{of} is a {type(main_grad).__name__}; expected a tensor or None")
    is_alike = main_grad.shape == weight.shape and main_grad.device == weight.device
    if not is_alike or not main_grad.is_floating_point() or main_grad.requires_grad:
        raise ValueError(
            f"{of} is {placed(main_grad)}{' and requires a gradient' if main_grad.requires_grad else ''}; expected a "
            "floating-point tensor of the weight's shape and device that requires none"
        )


def watch(weights: Iterable[Any]) -> list[Watched]:
    """Resets the flags of the weights of the gradients to come, None for one of no weight, before a Function runs.

    W sets a flag too, and nobody may reset it for a whole step. So it is asked per run, and put back afterwards.
    """
    watched: list[Watched] = []
    try:
        for number, weight in enumerate(weights):
            flag = getattr(weight, FLAG, None)
            if flag is not None and getattr(weight, "main_grad", None) is not None:
                watched.append((number, weight, flag))
                setattr(weight, FLAG, False)
    except BaseException:
        unwatch(watched)
        raise
    return watched


def added(watched: list[Watched]) -> list[int]:
    """The numbers of the gradients that the Function's kernels have added: what it returned for them is a dummy."""
    return [number for number, weight, _ in watched if getattr(weight, FLAG, None)]


def unwatch(watched: list[Watched]) -> None:
    """Puts the flags back, from the last one on, as a weight can be there twice. After an interrupt: those left."""
    while watched:
        _, weight, flag = watched[-1]
        setattr(weight, FLAG, flag)
        del watched[-1]
