"""The hooks by which a module with ``backward_dw()`` is followed."""

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zbpipe._kernels.book import Book, unique
from zbpipe._kernels.call import Call
from zbpipe._torch.dispatch import disable_dynamo


class Handle(RemovableHandle):
    """Of several hooks."""

    def __init__(self, *handles: RemovableHandle) -> None:
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __getstate__(self) -> Any:
        return self.handles

    def __setstate__(self, state: Any) -> None:
        self.handles = state


class Registration:
    """The hooks of one module. Copied with it, when it takes up a book of its own."""

    def __init__(self, module: nn.Module, weights: Sequence[nn.Parameter] | None) -> None:
        names = {id(weight): name for name, weight in module.named_parameters()}
        self.given = None if weights is None else [(names.get(id(weight), ""), weight) for weight in weights]
        self.book = Book()
        self.running = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {"given": self.given, "is_pending": bool(self.book.entries)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        self.book = Book()
        self.running = threading.local()
        if state["is_pending"]:
            self.book.doubt("it was copied while weight gradients were pending")

    def register(self, module: nn.Module) -> Handle:
        before = module.register_forward_pre_hook(self.enter, with_kwargs=True)
        return Handle(before, module.register_forward_hook(self.leave, always_call=True))

    def weights(self, module: nn.Module) -> list[nn.Parameter]:
        """Those whose gradients ``backward_dw()`` computes, as the module has them now: another tensor may have taken
        a parameter's place for a call."""
        if self.given is None:
            found = list(module.parameters())
        else:
            named = dict(module.named_parameters(remove_duplicate=False))
            found = unique(named.get(name, weight) for name, weight in self.given)
        return [weight for weight in found if weight.requires_grad]

    @disable_dynamo
    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._end_calls(_depth(), None)
        weights = self.weights(module)
        if not weights or not torch.is_grad_enabled():
            return None
        call = Call(module, weights, self.book)
        self.running.calls.append((_depth(), call))
        return call.enter(args, kwargs)

    @disable_dynamo
    def leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self._end_calls(_depth(), result)

    def _end_calls(self, depth: int, result: Any) -> None:
        """Those that began at this depth of Python's stack: the one that ends, and ones that ended by a
        KeyboardInterrupt, for which no hook is called. A module may call itself, deeper."""
        calls = self.running.__dict__.setdefault("calls", [])
        while calls and calls[-1][0] >= depth:
            calls.pop()[1].leave(result)


def _depth() -> int:
    """Of the caller's caller, on Python's stack."""
    frame, depth = sys._getframe(2), 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return depth
