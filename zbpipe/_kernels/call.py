"""A call of a module with ``backward_dw()``: its place in the graph."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from zbpipe import _C
from zbpipe._kernels.book import Book, unique
from zbpipe._kernels.defer import will_defer
from zbpipe._torch import autograd


class Call:
    """One forward of a module, and then its backward.

    Note [The entrance]
    A node behind the module's inputs is what runs after all of the module's backward. Inputs are given that node for
    the time of the forward (``_C.detour``), so that the module has the very tensors, also to compute in place on. Where
    it computes in place on a view, its base is what gets a new history, so the base is given the node, too. Where no
    input requires a gradient the module gets an alias that does, of the same memory and version; no view, since one
    that a custom Function made cannot be computed in place on.
    """

    def __init__(self, module: nn.Module, weights: Sequence[nn.Parameter], book: Book) -> None:
        self.module = module
        self.weights = weights
        self.book = book
        self.has_run = False
        self.entrance: Any = None  # the node; until the forward is over, as all of the following
        self.detours: list[object] = []
        self.alias: tuple[torch.Tensor, torch.Tensor] | None = None

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        inputs = unique(tensor for tensor in _tensors_in((args, kwargs)) if _is_differentiable(tensor))
        inputs = [tensor for tensor in inputs if tensor.requires_grad]
        if not inputs:
            inputs = [tensor for tensor in (*args, *kwargs.values()) if _is_differentiable(tensor)][:1]
        if not inputs:
            raise TypeError(
                f"{type(self.module).__name__} was called without a floating-point tensor, so that backward_dw() has "
                "no place in its graph; expected one that requires a gradient, or one that is an argument by itself"
            )
        bases = [autograd.base_of(tensor) for tensor in inputs if _can_change_its_base(tensor)]
        places = unique([*inputs, *bases])
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
        for node in unique(output.grad_fn for output in _tensors_in(result) if output.grad_fn is not None):
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
