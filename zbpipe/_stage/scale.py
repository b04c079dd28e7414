"""What a schedule or a reducer does to ``.grad``, where the policy has gradients in ``main_grad``.

A schedule's division by the number of microbatches must reach ``main_grad``, too. A reducer does not reduce it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zbpipe._formatting import enumeration
from zbpipe._policy import get_policy
from zbpipe._stage import state
from zbpipe._torch import fsdp, probe


def check_main_grad() -> None:
    """Raises RuntimeError where the patched torch would not scale main_grad."""
    if state.in_force and (refusal := probe.refusal("the scale of main_grad")):
        raise RuntimeError(
            f"policy(main_grad=True) cannot be used while torch {torch.__version__} is patched: with it {refusal}; "
            f"{probe.ADVICE}."
        )


def refuse_reducer(weights: Iterable[tuple[str, Any]], module: str, reducer: str) -> None:
    """Raises RuntimeError where these weights, with their names, have a ``main_grad`` that the policy adds to."""
    if get_policy().main_grad:
        shards = {whole: shard for shard, whole in fsdp.gathered().items()}  # the module may have either now
        names = [name for name, weight in weights if getattr(shards.get(weight, weight), "main_grad", None) is not None]
        if names:
            raise RuntimeError(
                f"policy(main_grad=True) adds to the main_grad of {enumeration(names)} of {module}, and {reducer} "
                "reduces .grad alone; use one of the two: policy(main_grad=False), or data parallelism that owns "
                "main_grad, as Megatron's does"
            )


def scale_grads(original: Callable[..., Any], self: Any, grad_scale_factor: int) -> Any:
    """Around the stage's method of this name."""
    result = original(self, grad_scale_factor)
    if grad_scale_factor != 1 and get_policy().main_grad:
        # One buffer may be the main_grad of several weights, or also a .grad, which torch has divided.
        divided = {id(weight.grad) for weight in self.submod.parameters()}
        for weight in self.submod.parameters():
            main_grad = getattr(weight, "main_grad", None)
            if main_grad is not None and id(main_grad) not in divided:
                divided.add(id(main_grad))
                main_grad.div_(grad_scale_factor)
    return result
