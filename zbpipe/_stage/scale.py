"""The scale of gradients: where W adds to ``main_grad``, a schedule's division by the number of microbatches is for
that too."""

from collections.abc import Callable
from typing import Any

from zbpipe._policy import get_policy

# Why W may not add to main_grad while torch is patched; None where it may.
refusal: str | None = None


def check_main_grad() -> None:
    """Raises RuntimeError if a W that adds to main_grad would be given to an optimizer wrongly scaled."""
    if refusal is not None:
        raise RuntimeError(refusal)


def scale_grads(original: Callable[..., Any], self: Any, grad_scale_factor: int) -> Any:
    """Around the stage's method of this name."""
    result = original(self, grad_scale_factor)
    if grad_scale_factor != 1 and get_policy().main_grad:
        # A buffer may be several weights', and a weight's .grad, which torch has divided.
        divided = {id(weight.grad) for weight in self.submod.parameters()}
        for weight in self.submod.parameters():
            main_grad = getattr(weight, "main_grad", None)
            if main_grad is not None and id(main_grad) not in divided:
                divided.add(id(main_grad))
                main_grad.div_(grad_scale_factor)
    return result
