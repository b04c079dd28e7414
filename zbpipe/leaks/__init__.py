"""Leak tools: which tensors outlive their step, and what holds them, in Python and in C++."""

from zbpipe.leaks._check import Check, TensorLeakError, TensorLeakWarning, check_tensor_leak, find_holders
from zbpipe.leaks._growth import Growth
from zbpipe.leaks._marker import step
from zbpipe.leaks._report import Cycle, Holder, Leak, Report

__all__ = [
    "Check",
    "Cycle",
    "Growth",
    "Holder",
    "Leak",
    "Report",
    "TensorLeakError",
    "TensorLeakWarning",
    "check_tensor_leak",
    "find_holders",
    "step",
]
