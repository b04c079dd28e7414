"""Leak tools: which tensors outlive their step, and what holds them, in Python and in C++.

    with zbpipe.leaks.check_tensor_leak(allow=[model, optimizer]):
        train_step()

says by a warning, on leaving, which tensors were born inside and are still alive, or went only because the garbage
collector ran, with the shortest chain of holders from a module, a running function or a cycle to each: dictionaries,
closures, hooks, autograd nodes with the field that saved the tensor, parameter groups. :func:`find_holders` says it of
a living tensor; :class:`Growth` of what piles up from step to step. Nothing is unpacked, run or kept alive by looking.
"""

import importlib
from typing import TYPE_CHECKING

from zbpipe.leaks._check import Check, TensorLeakError, TensorLeakWarning, check_tensor_leak
from zbpipe.leaks._grown import Grown
from zbpipe.leaks._growth import Growth
from zbpipe.leaks._report import Report
from zbpipe.leaks._results import Cycle, Holder, Leak
from zbpipe.leaks._search import find_holders

__all__ = [
    "Check",
    "Cycle",
    "Grown",
    "Growth",
    "Holder",
    "Leak",
    "Report",
    "TensorLeakError",
    "TensorLeakWarning",
    "check_tensor_leak",
    "find_holders",
]

if TYPE_CHECKING:
    from zbpipe.leaks.pytest_plugin import TensorLeaks as TensorLeaks
else:

    def __getattr__(name: str) -> type:
        if name == "TensorLeaks":  # what the fixture no_tensor_leaks is; it imports pytest
            return importlib.import_module("zbpipe.leaks.pytest_plugin").TensorLeaks
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
