"""Leak tools: which tensors outlive their step, and what holds them, in Python and in C++.

    with zbpipe.leaks.check_tensor_leak(allow=[model, optimizer]):
        train_step()

At the end of the block a warning lists the tensors that were allocated inside and are alive, or that only the garbage
collector freed. It shows the shortest chain of holders to each, from a module, a running function or a cycle. Holders
are dictionaries, closures, hooks, parameter groups, and autograd nodes with the field that saved the tensor.
:func:`find_holders` finds the chain of one living tensor, :class:`Growth` those of what piles up from step to step. The
search unpacks, runs and keeps alive nothing.
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
