"""zbpipe: the zero-bubble backward of a pipeline stage, in C.

zbpipe runs a stage's backward in two passes. The input pass (I) computes the gradients of the stage's inputs. The
weight pass (W) computes the parameters' gradients later, in the bubbles of a pipeline schedule. The package replaces
``torch.distributed.pipelining._backward``:

    import zbpipe
    zbpipe.patch()          # every torch schedule now runs on zbpipe

A loop of your own calls :func:`stage_backward_input`, :func:`stage_backward_weight` and :func:`stage_backward`.
:mod:`zbpipe.memory` counts the bytes that the groups hold. :mod:`zbpipe.leaks`, imported at its first use, finds
tensors that outlive their step. An import of zbpipe changes nothing in torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from zbpipe import _first_aid, _native

_first_aid.watch_import()
_build = _native.load()

# First, so that the error for a wrong ZBPIPE_POLICY comes with few frames.
from zbpipe._policy import Policy, get_policy, policy, set_policy  # noqa: E402, I001

from zbpipe import memory  # noqa: E402
from zbpipe._C import ParamGroup  # noqa: E402
from zbpipe._compile import compile as compile  # noqa: E402
from zbpipe._explain.result import Explanation  # noqa: E402
from zbpipe._explain.run import explain  # noqa: E402
from zbpipe._kernels.defer import defer  # noqa: E402
from zbpipe._patch import is_patched, patch, unpatch  # noqa: E402
from zbpipe._version import __version__ as __version__  # noqa: E402
from zbpipe.passes import stage_backward, stage_backward_input, stage_backward_weight  # noqa: E402
from zbpipe.release import deallocate_output, make_viewless, release_storage  # noqa: E402

# Without compile: a star import would hide Python's own.
__all__ = [
    "Explanation",
    "ParamGroup",
    "Policy",
    "deallocate_output",
    "defer",
    "explain",
    "get_policy",
    "is_patched",
    "make_viewless",
    "memory",
    "patch",
    "policy",
    "release_storage",
    "set_policy",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
    "unpatch",
]

if TYPE_CHECKING:
    from zbpipe import leaks as leaks
else:

    def __getattr__(name: str) -> ModuleType:
        if name == "leaks":
            return importlib.import_module("zbpipe.leaks")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), "leaks"})


_first_aid.import_is_done()

# With ZBPIPE_PATCH=1 torch may have called the hook during this import, too early to patch.
if "_zbpipe_hook" in sys.modules:
    sys.modules["_zbpipe_hook"].complete()
