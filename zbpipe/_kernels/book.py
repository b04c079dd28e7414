"""The book about the queue of a module with ``backward_dw()``: what is in it, and whose it is."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from zbpipe._torch import autograd
from zbpipe._torch.modules import hooks_before_forward

Grads = Sequence[torch.Tensor | None]


def unique(objects: Iterable[Any]) -> list[Any]:
    return list({id(obj): obj for obj in objects}.values())


class Caller(Protocol):
    """A call of the module, of whose entry the book is told."""

    module: nn.Module
    weights: Sequence[nn.Parameter]
    book: Any
    has_run: bool


class Entry:
    """One that the module's queue has; or a doubt: at this place it may have any number of them."""

    def __init__(self, weights: Sequence[nn.Parameter] = (), doubt: str = "") -> None:
        self.weights = weights
        self.doubt = doubt
        self.claim: Callable[[], Claim | None] = lambda: None  # weak: gone if the group was dropped
        self.grads: Grads | None = None  # when it was computed


class Book:
    """What a module's queue has, in its order, and whose it is.

    A module says nothing about its queue but by ``backward_dw()``, which computes the first entry. So the entries in
    front of the wanted one are computed before it. Those of a group that is gone leave no trace; the others' gradients
    are kept for their own weight pass.
    """

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.begun: dict[Caller, int] = {}  # calls between outputs and entrance: the engine's run that came to them
        self.lock = threading.Lock()

    def claim(self, call: Caller) -> "Claim":
        """Called where the queue has got the call's entry."""
        call.has_run = True
        self.begun.pop(call, None)
        run = autograd.run_id()
        failed = [other for other, its_run in list(self.begun.items()) if its_run != run]
        for other in failed:
            self.begun.pop(other, None)
        if failed:
            self.doubt("a backward began with its outputs and never came to its inputs")
        claim = Claim(call)
        self.entries.append(claim.entry)
        return claim

    def doubt(self, why: str) -> None:
        self.entries.append(Entry(doubt=why))

    def compute(self, claim: "Claim") -> Grads:
        name = type(claim.module).__name__
        if not self.lock.acquire(blocking=False):
            raise RuntimeError(
                f"backward_dw() of {name} is running already; weight passes of one module must not run at the same time"
            )
        try:
            while claim.entry.grads is None:
                self._compute_first(claim)
        finally:
            self.lock.release()
        return claim.entry.grads

    def _compute_first(self, claim: "Claim") -> None:
        first = self.entries[0]
        if first.doubt and (first is not claim.entry or len(self.entries) > 1):
            raise RuntimeError(
                f"which microbatch backward_dw() of {type(claim.module).__name__} would compute is not known: "
                f"{first.doubt}, and its queue may still have that entry or not; drop the groups that wait, empty its "
                "queue, remove() the handle and call run_backward_dw() again"
            )
        is_dropped = first.claim() is None
        with _without_trace(first.weights, claim.module) if is_dropped else _put_back(first.weights):
            try:
                claim.module.backward_dw()
            except BaseException as error:
                first.doubt = f"it raised {type(error).__name__}"
                raise
            first.grads = [weight.grad for weight in first.weights]
        self.entries.popleft()


def books_of(module: nn.Module) -> list[Book]:
    """Those that hooks of the module keep."""
    books = [getattr(getattr(hook, "__self__", None), "book", None) for hook in hooks_before_forward(module)]
    return [book for book in books if isinstance(book, Book)]


class Claim:
    """To one entry; the group's work, which alone holds it. Returns a gradient or None per weight."""

    def __init__(self, call: Caller) -> None:
        self.module: Any = call.module
        self.book: Book = call.book
        self.entry = Entry(call.weights)
        self.entry.claim = weakref.ref(self)
        self.was_met = False

    def __call__(self) -> Grads:
        name = type(self.module).__name__
        if any(book is not self.book for book in books_of(self.module)):
            raise RuntimeError(
                f"run_backward_dw() was called again for {name} before this weight pass, and its queue began anew; "
                "run the weight passes before remove()"
            )
        grads = self.book.compute(self)
        if self.was_met and all(grad is None for grad in grads):
            raise RuntimeError(
                f"backward_dw() of {name} has added the gradients elsewhere itself and cannot do so again for the same "
                "microbatch; run its weight pass once, without retain_graph"
            )
        self.was_met = True
        return grads


@contextmanager
def _put_back(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within, the weights have no gradient; afterwards they have theirs again."""
    before = [(weight, weight.grad) for weight in weights]
    try:
        for weight, _ in before:
            weight.grad = None
        yield
    finally:
        for weight, grad in before:
            weight.grad = grad


@contextmanager
def _without_trace(weights: Iterable[nn.Parameter], module: nn.Module) -> Iterator[None]:
    """As :func:`_put_back`, of all the module's weights, also with their ``main_grad``: the object, its values, and the
    flag that goes with it."""
    touched = unique([*weights, *module.parameters()])
    before = [(weight, _attributes(weight)) for weight in touched]
    buffers = unique(of.get("main_grad") for _, of in before)
    values = [(buffer, buffer.clone()) for buffer in buffers if isinstance(buffer, torch.Tensor)]
    with _put_back(touched), torch.no_grad():
        try:
            yield
        finally:
            for weight, attributes in before:
                for name, value in attributes.items():
                    setattr(weight, name, value)
            for buffer, value in values:
                buffer.copy_(value)


def _attributes(weight: nn.Parameter) -> Mapping[str, Any]:
    names = ("main_grad", "grad_added_to_main_grad")
    return {name: getattr(weight, name) for name in names if hasattr(weight, name)}
