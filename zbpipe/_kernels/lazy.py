"""How W gets the products of a Function that says nothing: ``policy(split_functions=True)``. The C part imports this
module by name.

Note [Lazy products]

While I runs the backward of a Python Function, a dispatch mode sees its operators. A matrix product that has as many
elements as a weight whose gradient W may compute gives a LazyProduct: nothing is multiplied. Views and casts of one are
lazy, too. Whatever else touches one computes it, once, so that all who hold it see what is written to it. A gradient
that is still lazy when the backward has returned is handed over as zbpipe.defer() would: the call is the product with
what was done to it, and its factors are what is saved.

At once is computed, for to be late would be to be wrong:

- a product whose factor an operator is about to write to;
- a product whose factor a collective, or an operator that is not torch's, has written to in this backward: such
  buffers are used again, and who writes to them next need not count as a change of the tensor;
- a product that has a history or gets one (in grad mode, in the forward of a Function, in forward mode), and one in a
  backward within the backward;
- what is returned twice, or for an input too, and what the program still has when the backward has returned.

What nobody sees is what comes to a tensor's memory past the dispatcher: a kernel that is launched there (Triton, a C++
extension, code compiled by inductor) and writes to a factor; ``x.data = ...``, ``x.numpy()``, ``swap_tensors``, another
thread. Hence the policy is off by default.
"""

from __future__ import annotations

import enum
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zbpipe._torch import autograd, compiler, dispatch

_computing = threading.RLock()
_here = threading.local()
"""``computes``: a product is being computed in this thread, and is not to become lazy again."""


class Promise:
    """What an operator will give for ``args``: a product, or, where there is a ``source``, what is made of that.

    ``steps``: what is made of this one. They are computed with it: who has its value may write to it, or lay it out
    anew.
    """

    __slots__ = ("__weakref__", "_value", "args", "kwargs", "operator", "source", "steps")

    def __init__(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], source: Promise | None = None):
        self.operator, self.args, self.kwargs, self.source = operator, args, kwargs, source
        self.steps: list[weakref.ref[Promise]] = []
        self._value: torch.Tensor | None = None

    def chain(self) -> list[Promise]:
        """The product, and what was made of it, to this."""
        chain = [self]
        while chain[-1].source is not None:
            chain.append(chain[-1].source)
        return chain[::-1]

    @property
    def is_computed(self) -> bool:
        return any(promise._value is not None for promise in self.chain())

    def value(self) -> torch.Tensor:
        with _computing:
            for promise in self.chain():
                promise._compute()
        assert self._value is not None
        return self._value

    def _compute(self) -> None:
        """Where the source has been computed: this one, and what was made of it, however long that chain is."""
        pending = [self]
        while pending:
            promise = pending.pop()
            if promise._value is None:
                first = () if promise.source is None else (promise.source._value,)
                promise._value = _computed(promise.operator, (*first, *promise.args), promise.kwargs)
                promise.args = ()
                pending += [step for ref in promise.steps if (step := ref()) is not None]
                promise.steps = []

    def call(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """A function, and what it is to be called with, that compute it and refer to no tensor beside."""
        product, *steps = self.chain()
        made = [(promise.operator, promise.args, promise.kwargs) for promise in steps]
        return _Call(product.operator, product.kwargs, made), tuple(product.args)


class _Call:
    """A product with what is done to it then."""

    def __init__(self, operator: Any, kwargs: dict[str, Any], steps: Sequence[tuple[Any, Sequence[Any], Any]]):
        self._operator, self._kwargs, self._steps = operator, kwargs, steps

    def __call__(self, *factors: Any) -> torch.Tensor:
        result = _computed(self._operator, factors, self._kwargs)
        for operator, args, kwargs in self._steps:
            result = _computed(operator, (result, *args), kwargs)
        return result


def _computed(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Autocast has been where the operator was seen."""
    before, _here.computes = getattr(_here, "computes", False), True
    try:
        with torch.inference_mode(False), torch.no_grad(), autograd.without_autocast():
            result: torch.Tensor = operator(*args, **kwargs)
    finally:
        _here.computes = before
    return result


class LazyProduct(torch.Tensor):
    """A matrix product that is computed when somebody touches it, as what it then is."""

    promise: Promise

    @classmethod
    def of(
        cls, promise: Promise, size: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, device: Any
    ) -> LazyProduct:
        lazy: LazyProduct = dispatch.wrapper(cls, size, strides, dtype, device)
        lazy.promise = promise
        return lazy

    @classmethod
    @dispatch.disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        only_looks = func in _LOOKS and type(first) is LazyProduct and not first.promise.is_computed
        if only_looks or dispatch.is_operator(func):
            with autograd.without_torch_functions():
                return func(*args, **(kwargs or {}))
        args, kwargs = _values((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    @dispatch.disable_dynamo
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if type(first) is LazyProduct and not first.promise.is_computed and _is_step(func, kwargs):
            return first._step(func, args[1:], kwargs or {})
        # Below autograd, in the dispatch of a subclass, operators come that consist of others.
        result = dispatch.decomposed(func, args, kwargs or {})
        if result is not NotImplemented:
            return result
        args, kwargs = _values((args, kwargs or {}))
        return func(*args, **kwargs)

    def _step(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> LazyProduct:
        here = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        there = operator(here, *args, **kwargs)
        promise = Promise(operator, args, kwargs, self.promise)
        self.promise.steps.append(weakref.ref(promise))
        return LazyProduct.of(promise, there.shape, there.stride(), there.dtype, self.device)


def _is_step(operator: Any, kwargs: dict[str, Any] | None) -> bool:
    if operator is dispatch.CAST:
        return kwargs is not None and kwargs.keys() == {"dtype"}
    return operator in dispatch.LAYOUT_STEPS


def _values(tree: Any) -> Any:
    return dispatch.pytree.tree_map_only(LazyProduct, lambda lazy: lazy.promise.value(), tree)


def _looks() -> Iterator[Any]:
    """What neither reads nor writes a tensor's memory, nor gives it to somebody who may."""
    for name in (
        *("shape", "dtype", "device", "layout", "ndim", "T", "mT", "requires_grad", "is_leaf", "itemsize", "nbytes"),
        *("is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_meta", "grad_fn"),
    ):
        yield getattr(torch.Tensor, name).__get__
    for name in (
        *("size", "stride", "dim", "numel", "nelement", "element_size", "is_contiguous", "is_floating_point"),
        *("t", "transpose", "permute", "view", "reshape", "view_as", "flatten", "unflatten", "unsqueeze", "squeeze"),
        *("swapaxes", "to", "type_as", "float", "double", "half", "bfloat16", "contiguous", "__len__", "__hash__"),
    ):
        yield getattr(torch.Tensor, name)
    for name in ("t", "transpose", "permute", "reshape", "flatten", "unsqueeze", "squeeze", "swapaxes", "numel"):
        yield getattr(torch, name)


_LOOKS = frozenset(_looks())


class _Kind(enum.Enum):
    """Of operators."""

    READS = enum.auto()
    PRODUCT = enum.auto()
    WRITES = enum.auto()  # torch's own: to what it says
    UNKNOWN_WRITES = enum.auto()
    UNKNOWN = enum.auto()


@functools.cache
def _kind_of(operator: Any) -> _Kind:
    if not dispatch.is_operator(operator):
        return _Kind.UNKNOWN
    if operator in dispatch.PRODUCTS:
        return _Kind.PRODUCT
    namespace = dispatch.namespace_of(operator)
    if namespace == dispatch.COLLECTIVES or (dispatch.is_mutable(operator) and namespace != "aten"):
        return _Kind.UNKNOWN_WRITES
    return _Kind.WRITES if dispatch.is_mutable(operator) else _Kind.READS


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class _Seen(dispatch.PushedMode):  # type: ignore[no-untyped-call]
    """What a backward runs, on the thread on which it was begun. ``sizes``: see :func:`begin`."""

    _wrapping: set[type] = set()  # noqa: RUF012  classes of tensors that wrap what they compute
    """Classes of tensors whose products are no plain tensors."""

    def __init__(self, sizes: Sequence[Sequence[int] | None]) -> None:
        super().__init__()
        self.sizes = sizes
        self._numbers = {math.prod(size) for size in sizes if size is not None}
        self._run = autograd.run_id()
        self._pending: list[weakref.ref[Promise]] = []
        self._written: set[int | None] = set()

    @dispatch.disable_dynamo
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kind_of(func)
        kwargs = kwargs or {}
        if kind is _Kind.PRODUCT:
            return self._product(func, types, args, kwargs)
        if kind is _Kind.UNKNOWN:  # it takes functions, and no lazy products
            args, kwargs = _values((args, kwargs))
        if kind is not _Kind.READS:
            self._before_write((args, kwargs), is_torchs=kind is _Kind.WRITES)
        return func(*args, **kwargs)

    def _product(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if getattr(_here, "computes", False) or not self._is_its_own():
            return func(*args, **kwargs)
        if types:
            return self._of_a_subclass(func, types, args, kwargs)
        product = dispatch.PRODUCTS[func](*args)
        if product is None or math.prod(product[0]) not in self._numbers or not self._are_left_alone(args):
            return func(*args, **kwargs)
        promise = Promise(func, args, kwargs)
        self._pending.append(weakref.ref(promise))
        return LazyProduct.of(promise, product[0], None, product[1], args[0].device)

    def _is_its_own(self) -> bool:
        """Whether it is the backward that multiplies, and the result has no history."""
        has_history = torch.is_grad_enabled() or autograd.is_within_forward() or autograd.is_in_forward_mode()
        return not has_history and autograd.run_id() == self._run

    def _of_a_subclass(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """A subclass may multiply plain tensors in the end: such a product may be lazy, if it comes out as it is."""
        cls = types[0]
        if cls is LazyProduct or cls in self._wrapping or cls.__module__.startswith("torch."):
            return func(*args, **kwargs)
        dispatch.push_mode(self)
        try:
            result = cls.__torch_dispatch__(func, types, args, kwargs)
        finally:
            dispatch.pop_mode()
        if type(result) in (LazyProduct, torch.Tensor):
            return result
        self._wrapping.add(cls)
        return func(*args, **kwargs)

    def _are_left_alone(self, args: Any) -> bool:
        """Whether the factors are plain, and nobody but torch's operators is known to write to their memory."""
        factors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        is_plain = all(factor.layout is torch.strided and type(factor) in _PLAIN for factor in factors)
        if not is_plain or None in self._written:
            return False
        return not self._written or self._written.isdisjoint(_storages(factors))

    def _before_write(self, tree: Any, *, is_torchs: bool) -> None:
        promises = self._waiting()
        if not promises and is_torchs:
            return
        leaves = dispatch.pytree.tree_leaves(tree)
        written = set(_storages(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
        if not is_torchs:
            self._written |= written
        for promise in promises:
            factors = (arg for arg in promise.args if isinstance(arg, torch.Tensor))
            if None in written or not written.isdisjoint(_storages(factors)):
                promise.value()

    def _waiting(self) -> list[Promise]:
        """The products that somebody still has, and nobody has touched."""
        return [promise for ref in self._pending if (promise := ref()) is not None and not promise.is_computed]

    def finish(self) -> None:
        """What was handed over has been let go of: others are the program's, which will not say when it changes what
        they are computed from."""
        for promise in self._waiting():
            promise.value()


def _storages(tensors: Any) -> Iterator[int | None]:
    """Of a wrapper, of what it wraps; None for what does not say what it wraps."""
    for tensor in tensors:
        if type(tensor) is LazyProduct:
            if (value := tensor.promise._value) is not None:
                yield from _storages([value])
        elif dispatch.is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _storages(getattr(tensor, name) for name in names)
        elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            yield None
        elif tensor.layout is torch.strided:
            yield autograd.storage_id(tensor.untyped_storage())


def begin(function: type, sizes: Sequence[Sequence[int] | None]) -> _Seen | None:
    """From here to :func:`end` products of this thread may be lazy.

    Args:
        function: the class of the Function's context.
        sizes: per gradient that its backward returns its size; None where it may not wait.

    Returns:
        None where the Function is not looked at, and nothing has begun.
    """
    if compiler.is_compiled_function(function):
        return None
    seen = _Seen(sizes)
    dispatch.push_mode(seen)
    return seen


def end() -> None:
    dispatch.pop_mode()


def settled(seen: _Seen, gradients: Sequence[torch.Tensor | None]) -> list[Any]:
    """What becomes of a backward's gradients: each is itself or, where it is lazy, its value; or, where it may wait, a
    function and a tuple of arguments that give it."""
    result: list[Any] = list(gradients)
    products = [lazy.promise.chain()[0] for lazy in gradients if isinstance(lazy, LazyProduct)]
    for i, lazy in enumerate(gradients):
        if isinstance(lazy, LazyProduct):
            promise = lazy.promise
            with autograd.without_torch_functions():
                fits = lazy.shape == seen.sizes[i]
            may_wait = fits and not promise.is_computed and products.count(promise.chain()[0]) == 1
            result[i] = promise.call() if may_wait else promise.value()
    return result


def touched(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a lazy product; any other tensor as it is."""
    return tensor.promise.value() if isinstance(tensor, LazyProduct) else tensor
