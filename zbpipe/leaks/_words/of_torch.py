"""Links of a chain that are torch's: tensors, nodes, hooks, works."""

from __future__ import annotations

from typing import Any

import torch

from zbpipe._torch.pipelining import work_type
from zbpipe.leaks._results import Holder
from zbpipe.leaks._words.of_python import callable_name, code_place, found_in_class, said, type_name


def tensor(thing: Any, name: str, edge: str | None) -> Holder:
    cls = "Tensor" if thing is None or type(thing) is torch.Tensor else type_name(thing).rpartition(".")[2]
    text = f"{cls} {name}".rstrip()
    if edge is not None and edge.startswith("saved_"):
        return Holder("saved", f"{edge.removeprefix('saved_')}, saved: {text}")
    return Holder("saved" if edge and edge.startswith("saved tensor") else "tensor", f"{said(edge)}{text}")


def node(thing: Any, name: str, edge: str | None) -> Holder:
    short = name.rpartition("::")[2]
    where = None
    if thing is not None and issubclass(type(thing), torch.autograd.function.BackwardCFunction):
        where = code_place(_forward_of(type(thing)))
    return Holder("accumulator" if short == "AccumulateGrad" else "node", f"{said(edge)}{short}", where)


def _forward_of(cls: type) -> Any:
    """The forward of the autograd.Function whose nodes are of this class, without running a descriptor for it."""
    function = found_in_class(cls, "_forward_cls")
    forward = found_in_class(function, "forward") if issubclass(type(function), type) else None
    return forward.__func__ if type(forward) is staticmethod else forward


def hook(hook: Any, edge: str) -> Holder:
    """A dictionary of hooks; ``hook`` is the one that leads on."""
    kind = edge.rstrip("0123456789 ").removesuffix("s")
    if hook is None:
        return Holder("hook", f"the {kind}s")
    name = callable_name(hook)
    return Holder("hook", f"{kind} {name}", code_place(hook))


def is_work(cls: type) -> bool:
    work = work_type()
    return work is not None and issubclass(cls, work)
