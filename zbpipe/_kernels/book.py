"""What :func:`zbpipe.stores.run_backward_dw` does with a module: a place in its graph, and a book about its queue."""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from zbpipe import _C
from zbpipe._torch import autograd
from zbpipe._torch.dispatch import disable_dynamo
from zbpipe._torch.modules import hooks_before_forward
from zbpipe._work import will_defer

Grads = Sequence[torch.Tensor | None]


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
            found = _unique(named.get(name, weight) for name, weight in self.given)
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


def registrations(module: nn.Module) -> list[Registration]:
    """Those whose hooks the module has."""
    owners = [getattr(hook, "__self__", None) for hook in hooks_before_forward(module)]
    return [owner for owner in owners if isinstance(owner, Registration)]


def _depth() -> int:
    """Of the caller's caller, on Python's stack."""
    frame, depth = sys._getframe(2), 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def _unique(objects: Iterable[Any]) -> list[Any]:
    return list({id(obj): obj for obj in objects}.values())


# ---- the graph


class Call:
    """One forward of a module, and then its backward.

    Note [The entrance]
    A node behind the module's inputs is what runs after all of the module's backward. Inputs are given that node for
    the time of the forward (``_C.detour``), so that the module has the very tensors, also to compute in place on. Where
    it computes in place on a view, its base is what gets a new history, so the base is given the node, too. Where no
    input requires a gradient the module gets an alias that does, of the same memory and version; no view, since one
    that a custom Function made cannot be computed in place on.
    """

    def __init__(self, module: nn.Module, weights: Sequence[nn.Parameter], book: "Book") -> None:
        self.module = module
        self.weights = weights
        self.book = book
        self.has_run = False
        self.entrance: Any = None  # the node; until the forward is over, as all of the following
        self.detours: list[object] = []
        self.alias: tuple[torch.Tensor, torch.Tensor] | None = None

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        inputs = _unique(tensor for tensor in _tensors_in((args, kwargs)) if _is_differentiable(tensor))
        inputs = [tensor for tensor in inputs if tensor.requires_grad]
        if not inputs:
            inputs = [tensor for tensor in (*args, *kwargs.values()) if _is_differentiable(tensor)][:1]
        if not inputs:
            raise TypeError(
                f"{type(self.module).__name__} was called without a floating-point tensor, so that backward_dw() has "
                "no place in its graph; expected one that requires a gradient, or one that is an argument by itself"
            )
        bases = [autograd.base_of(tensor) for tensor in inputs if _can_change_its_base(tensor)]
        places = _unique([*inputs, *bases])
        passed = _Entrance.apply(self, len(places), *places, *self.weights)  # type: ignore[no-untyped-call]
        self.entrance = passed[0].grad_fn
        for i, (tensor, other) in enumerate(zip(places, passed, strict=True)):
            if i >= len(inputs) or tensor.requires_grad:
                self.detours.append(_C.detour(tensor, other))
            else:
                self.alias = tensor, other
        if self.alias is None:
            return None
        original, alias = self.alias
        return (
            tuple(alias if arg is original else arg for arg in args),
            {name: alias if arg is original else arg for name, arg in kwargs.items()},
        )

    def leave(self, result: Any) -> None:
        """The forward is over, or has raised."""
        detours, self.detours = self.detours, []
        for detour in reversed(detours):
            _C.end_detour(detour)
        entrance, self.entrance = self.entrance, None
        alias, self.alias = self.alias, None
        if alias is not None:
            self._hand_on_history(*alias, entrance)
        if entrance is None:
            return
        for node in _unique(output.grad_fn for output in _tensors_in(result) if output.grad_fn is not None):
            if node is not entrance and autograd.age(node) > autograd.age(entrance):
                node.register_prehook(self.begin)

    def _hand_on_history(self, tensor: torch.Tensor, alias: torch.Tensor, entrance: Any) -> None:
        """What was computed in place on the alias is the tensor's, whose memory it is."""
        if alias.grad_fn is entrance or not _has_leaf(alias.grad_fn, entrance):
            return
        if autograd.is_view(tensor):
            raise RuntimeError(
                f"{type(self.module).__name__} computed in place, with gradient, on an input that is a view and "
                "requires no gradient, to whose base run_backward_dw() cannot give that history; call it with a clone"
            )
        _C.detour(tensor, alias)

    def begin(self, grads: Any) -> None:
        """The backward has come to the module's outputs."""
        if not self.has_run:
            self.book.begun[self] = autograd.run_id()


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _can_change_its_base(tensor: torch.Tensor) -> bool:
    """Whether autograd lets one compute in place on it with gradient, and then changes the base's history."""
    if tensor.grad_fn is None or not autograd.is_view(tensor):
        return False
    base = autograd.base_of(tensor)
    return (
        autograd.may_be_written_to(tensor) and _is_differentiable(base) and not (base.is_leaf and base.requires_grad)  # type: ignore[union-attr]
    )


def _has_leaf(node: Any, entrance: Any) -> bool:
    """True if a gradient of `node` goes to some leaf, other than by the entrance."""
    seen, stack = {entrance}, [node]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            return True
        stack.extend(behind for behind, _ in node.next_functions)
    return False


class _Entrance(torch.autograd.Function):
    """See Note [The entrance]. Its backward hands over ``backward_dw``."""

    @staticmethod
    def forward(ctx: Any, call: Call, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        first = 2 + len(grads)
        positions = tuple(range(first, first + len(ctx.call.weights)))
        claim = ctx.call.book.claim(ctx.call)
        # Also if nobody wants the gradients (torch's stages infer shapes so): the queue has an entry for them.
        taken = _C.defer(claim, positions, ()) if will_defer(positions) else claim()
        return None, None, *grads, *taken


# ---- the module's queue


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
        self.begun: dict[Call, int] = {}  # calls between outputs and entrance: the engine's run that came to them
        self.lock = threading.Lock()

    def claim(self, call: Call) -> "Claim":
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


class Claim:
    """To one entry; the group's work, which alone holds it. Returns a gradient or None per weight."""

    def __init__(self, call: Call) -> None:
        self.module: Any = call.module
        self.book = call.book
        self.entry = Entry(call.weights)
        self.entry.claim = weakref.ref(self)
        self.was_met = False

    def __call__(self) -> Grads:
        name = type(self.module).__name__
        if any(other.book is not self.book for other in registrations(self.module)):
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
    touched = _unique([*weights, *module.parameters()])
    before = [(weight, _attributes(weight)) for weight in touched]
    buffers = _unique(of.get("main_grad") for _, of in before)
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
