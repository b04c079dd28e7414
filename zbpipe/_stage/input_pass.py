"""I as C runs it, and what its backward raises."""

from typing import Any

import torch

from zbpipe import _C
from zbpipe._stage import self_check


class BackwardError(RuntimeError):
    """From what the backward of an input pass has raised. Other errors of the pass refuse its arguments."""


def input_pass(*given: Any) -> tuple[tuple[torch.Tensor | None, ...], list[_C.ParamGroup]]:
    """``_C.input_pass``, but what its backward raised is raised as BackwardError."""
    self_check.require(given[-1])
    result = _C.input_pass(*given)
    if isinstance(result, Exception):
        try:
            raise BackwardError("the backward raised") from result
        finally:
            del result  # its traceback refers to this frame
    return result
