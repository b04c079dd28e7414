"""zbpipe: the zero-bubble backward of a pipeline stage, in C.

A stage's backward comes in two halves: the input pass (I) computes the gradients of the stage's
inputs, the weight pass (W) those of its parameters, later, to fill the bubbles of a pipeline
schedule. This package replaces ``torch.distributed.pipelining._backward``:

    import zbpipe
    zbpipe.patch()          # every torch schedule now runs on zbpipe

or call :func:`stage_backward_input`, :func:`stage_backward_weight` and :func:`stage_backward`
directly. :mod:`zbpipe.memory` counts what the passes hold. Importing changes nothing in torch.
"""

from zbpipe import _build_check

_build_check.check()

from zbpipe import memory  # noqa: E402
from zbpipe._C import ParamGroup  # noqa: E402
from zbpipe._functions import (  # noqa: E402
    set_fused_accumulation,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from zbpipe._version import __version__  # noqa: E402
from zbpipe.patch import is_patched, patch, patched, unpatch  # noqa: E402

__all__ = [
    "ParamGroup",
    "__version__",
    "is_patched",
    "memory",
    "patch",
    "patched",
    "set_fused_accumulation",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
    "unpatch",
]
