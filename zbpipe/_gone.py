"""Tensors whose memory was given up: they say so to whoever reads them, and can be printed.

Note [What a tensor without memory says]

Its storage has no bytes, and libtorch answers whoever asks it for data with our words. But a view is made from sizes
alone: `o[0]`, iterating, `expand`, `as_strided` and `resize_` fail where the storage is found too small, with words
about bounds. So the Python object has a class of its own from then on: every function of torch that it is given to
comes to ``__torch_function__``, which does what torch would have done, and says who gave the memory up where torch
refuses for want of it. No other tensor has that class; no other is any slower. A tensor that is given new memory
(``o.data = ...``) gets its own class back.

What stays torch's own words: functions that C++ calls on it (within the engine, a C++ extension), and tensors of other
subclasses than Parameter, whose class is their own business.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from zbpipe._torch import autograd

_ABOUT_SIZES = ("out of bounds for storage of size 0", "resize storage that is not resizable")


class _GoneStorage(torch.UntypedStorage):
    """The storage of no bytes that is left. Another process would rebuild it with bytes of any content."""

    by: str
    why: str

    def is_shared(self) -> bool:
        return False  # torch's asks for the data where nothing catches libtorch's answer: the process would end

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.data_ptr()  # raises, saying who gave the memory up
        raise AssertionError("a storage that was given up has been given memory")


def who(function: str) -> str:
    """``function``, which is the caller's name, and the line that called it."""
    frame = sys._getframe(1).f_back
    return function if frame is None else f"{function} at {frame.f_code.co_filename}:{frame.f_lineno}"


def why(by: str) -> str:
    """What is said to whoever reads the values."""
    return (
        f"the memory of this tensor was given up by {by}: its values are gone, and only its shape, dtype, device and "
        "autograd history can be used"
    )


def mark(tensor: torch.Tensor, by: str) -> None:
    """From now on the tensor, which has no memory any more, says so."""
    with autograd.without_torch_functions():
        storage = tensor.untyped_storage()
        storage.__class__ = _GoneStorage
        storage.by, storage.why = by, why(by)  # type: ignore[attr-defined]
    _set_class(tensor)


def reason(tensor: object) -> str | None:
    """Why reading the tensor raises; None if it was not marked, or has got new memory since."""
    storage = _storage_of(tensor) if isinstance(tensor, _Gone) else None
    return None if storage is None else storage.why


def _storage_of(tensor: Any) -> _GoneStorage | None:
    with autograd.without_torch_functions():
        storage = tensor.untyped_storage()
    return storage if type(storage) is _GoneStorage else None


def _set_class(tensor: torch.Tensor) -> None:
    gone = _CLASSES.get(type(tensor))
    if gone is not None:
        tensor.__class__ = gone


class _Gone:
    """What the classes of marked tensors have of their own."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        storage = _storage_of(self)
        with autograd.without_torch_functions():
            if storage is None:
                return super().__repr__()
            return f"{_outline(self)} whose memory was given up by {storage.by}"

    def __format__(self, form: str) -> str:
        if form and (text := reason(self)) is not None:
            raise RuntimeError(text)
        return super().__format__(form)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.backward:
            return _backward(*args, **kwargs)
        if function in (torch.autograd.backward, torch.autograd.grad) and not kwargs.get("materialize_grads"):
            places = args, kwargs.get("inputs")  # torch hands all else over by name
            if any(_has_place(tensor) for tensor in _gone_in(places)):
                by_name = {**kwargs, "inputs": _edges(kwargs["inputs"])} if "inputs" in kwargs else kwargs
                return function(*_edges(args), **by_name)
        try:
            with autograd.without_torch_functions():
                result = function(*args, **kwargs)
        except RuntimeError as error:
            reasons = [text for tensor in _gone_in((args, kwargs)) if (text := reason(tensor)) is not None]
            if reasons and any(words in str(error) for words in _ABOUT_SIZES):
                raise RuntimeError(reasons[0]) from None
            raise
        for tensor in (args[:1], result) if args else (result,):
            _update(tensor)
        return result


class GoneTensor(_Gone, torch.Tensor):  # type: ignore[misc]
    """A torch.Tensor whose memory was given up."""


class GoneParameter(_Gone, torch.nn.Parameter):  # type: ignore[misc]
    """A torch.nn.Parameter whose memory was given up."""


_CLASSES: dict[type, type] = {torch.Tensor: GoneTensor, torch.nn.Parameter: GoneParameter}
_BACK: dict[type, type] = {gone: own for own, gone in _CLASSES.items()}


def _update(result: Any) -> None:
    """Classes follow the memory: aliases of a marked tensor are marked, one with new memory is not any more."""
    if isinstance(result, (tuple, list)):
        for one in result:
            _update(one)
    elif type(result) is torch.Tensor:
        with autograd.without_torch_functions():
            shares = result.layout is torch.strided and type(result.untyped_storage()) is _GoneStorage
        if shares:
            _set_class(result)
    elif type(result) in _BACK and _storage_of(result) is None:
        result.__class__ = _BACK[type(result)]


def _gone_in(things: Any) -> Iterable[_Gone]:
    if isinstance(things, _Gone):
        yield things
    elif isinstance(things, (tuple, list)):
        for thing in things:
            yield from _gone_in(thing)
    elif isinstance(things, dict):
        yield from _gone_in(tuple(things.values()))


def _backward(
    tensor: Any, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
) -> None:
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _edges(things: Any) -> Any:
    """The same, with marked tensors' places in the graph for themselves: a backward from there runs as any other, where
    without torch functions hooks and what is computed again would run without them."""
    if isinstance(things, (tuple, list)):
        return type(things)(map(_edges, things))
    if isinstance(things, _Gone) and _has_place(things):
        with autograd.without_torch_functions():
            return torch.autograd.graph.get_gradient_edge(things)  # type: ignore[arg-type]
    return things


def _has_place(tensor: Any) -> bool:
    with autograd.without_torch_functions():
        return bool(tensor.requires_grad)


def _outline(tensor: Any) -> str:
    """As torch prints a tensor, without its values."""
    what = [
        "...",
        f"size={tuple(tensor.shape)}",
        f"dtype={tensor.dtype}",
        f"device='{tensor.device}'",
    ]
    try:
        node = tensor.grad_fn
    except RuntimeError:  # a view whose history an in-place change has made unusable
        node = None
    if node is not None:
        what.append(f"grad_fn=<{type(node).__name__}>")
    elif tensor.requires_grad:
        what.append("requires_grad=True")
    return f"{'Parameter' if isinstance(tensor, torch.nn.Parameter) else 'tensor'}({', '.join(what)})"
