"""Release helpers: free the memory of stage outputs before their backward has run.

They are for schedules of your own. Once an output is sent, only its place in the autograd graph is needed. These
functions free the output's values and keep the graph.

Note [Where the memory of a deallocated output goes]

A Python tensor wraps a C++ tensor, which holds a storage. A node that saved its own output holds only the storage. The
C++ tensor is held by a node that saved an input, by a view (of its base) and by a send in flight. They would lose their
memory with its storage, so `deallocate_output` empties the C++ tensor only if nobody else holds it. Otherwise the
Python object moves to a twin, which has no memory and the same place in the graph. The other holders keep the old C++
tensor. The last of them frees the memory.
"""

import sys
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

from zbpipe import _C
from zbpipe._formatting import argument
from zbpipe._sharers import describe, who_holds
from zbpipe._torch import autograd


def deallocate_output(tensor: torch.Tensor) -> int:
    """Frees the memory of an output that was sent, and keeps the output's place in the autograd graph.

    The tensor keeps its shape, dtype, device, ``grad_fn`` and hooks: ``torch.autograd.backward``,
    :func:`stage_backward_input` and :func:`stage_backward` take it as before. A read of its values, also through a view
    or by ``print``, raises a RuntimeError that names the line of this call. ``untyped_storage()`` has no memory, and
    still reports its former size. New memory (``tensor.data = ...``) makes it an ordinary tensor again. For an output
    with a single name, ``out = torch.autograd.graph.get_gradient_edge(out)`` does the same without zbpipe.

    Other holders keep the memory and notice nothing: nodes that saved the output for their backward, views, detached
    aliases, numpy arrays, sends in flight. The last of them frees it. A holder of the Python object keeps no memory,
    and raises when it reads. Such holders are attributes of an ``autograd.Function``'s context, and hooks of
    ``saved_tensors_hooks`` that pack a tensor as itself (``save_on_cpu`` does, on the CPU). On a device with streams
    the rules of ``del tensor`` hold: wait for work on other streams first, or announce it by ``record_stream``.

    Args:
        tensor: a plain dense tensor; no view, and no leaf that requires a gradient. A second call changes nothing.

    Returns:
        The bytes freed at once. 0 if another holder keeps the memory, or if the memory is not torch's own (from numpy,
        DLPack, another process, a lazy clone).

    Raises:
        TypeError: no plain dense tensor (DTensor, sparse, nested, quantized). No error here changes anything.
        ValueError: a view (see :func:`make_viewless`), a parameter or other leaf that requires a gradient, a tensor on
            ``meta``.
        RuntimeError: C++ holds the tensor, and also refers to it weakly (``retain_grad``).

    Example::

        output = zbpipe.make_viewless(stage(x))
        send(output)
        zbpipe.deallocate_output(output)

    Source:
        Megatron-LM's ``deallocate_output_tensor`` (megatron/core/pipeline_parallel/schedules.py), without its flag. An
        ordinary backward follows here, not a custom one.
    """
    with autograd.without_torch_functions():
        own = _own_bytes(tensor)
        _check_output(tensor)
        if own < 0:
            return 0
        memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        twin = _memoryless(tensor, tensor, "zbpipe.deallocate_output")
        if holders := autograd.holders_of(tensor):
            try:
                autograd.exchange(tensor, twin)
            except RuntimeError as error:
                raise RuntimeError(
                    f"tensor is a {describe(tensor)} and has {holders} other holders and a weak reference (as of "
                    "retain_grad) in C++, so its memory cannot be freed; drop the holders first (wait for the sends, "
                    "delete the views)"
                ) from error
            del twin
        else:
            tensor.data = twin
    return own if memory.expired() else 0  # type: ignore[no-untyped-call]


def make_viewless(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the same values and autograd history that is no view.

    A view keeps its base and the base's memory alive. The result can be detached in place and deallocated, for any kind
    of view, also for one of many pieces (``chunk``, ``unbind``). Its gradients go where those of ``tensor`` go, in
    every grad mode. The result of a view made under ``no_grad`` requires no gradient. A leaf that requires a gradient
    stays the leaf: its ``.grad`` gets the result's gradients, and the result keeps it and its base alive.

    Args:
        tensor: a plain dense tensor.

    Returns:
        ``tensor`` itself if it is no view and fills its storage. Otherwise a new ``torch.Tensor``, on the same memory
        if ``tensor`` fills its storage, else on a copy of its elements. Tensors on the same memory share the version
        counter: a node that saved one notices a change in place of the other. Autograd records the change for one
        alone. The call is a graph break in code that ``torch.compile`` traces.

    Raises:
        TypeError: no plain dense tensor, or a view of a class other than ``torch.Tensor``.
        ValueError: a view that carries a forward-mode gradient; a tensor on ``meta``.
        RuntimeError: the tensor's memory was given up before.

    Source:
        Megatron-LM's ``make_viewless_tensor`` (megatron/core/utils.py), without flags. Views that cannot be detached:
        pytorch/pytorch 142229, 142237, 143589.
    """
    with autograd.without_torch_functions():
        if _own_bytes(tensor) < 0:
            tensor.untyped_storage().data_ptr()  # raises, and names the call that freed the memory
        fills = _fills_its_storage(tensor)
        if fills and not autograd.is_view(tensor):
            return tensor
        if type(tensor) is not torch.Tensor:
            raise TypeError(
                f"tensor is a {type(tensor).__name__}, whose class the result could not have; "
                "pass tensor.as_subclass(torch.Tensor)"
            )
        if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise ValueError(
                f"tensor is a {describe(tensor)} and carries a forward-mode gradient, which the result would lose; "
                "take it off with torch.autograd.forward_ad.unpack_dual"
            )
        # Only the result of an inference tensor may be an inference tensor.
        with torch.inference_mode(torch.is_inference_mode_enabled() and tensor.is_inference()):
            place = autograd.with_its_edge(tensor)
            with torch.no_grad():
                # With the memory's version counter, by which nodes that saved the base notice a change in place.
                return _C.twin(tensor if fills else _copy(tensor), place, None)


def release_storage(tensor: torch.Tensor) -> int:
    """Frees a tensor's storage, if nobody else holds it.

    All names, containers and hooks in Python that refer to the tensor's object count as one holder. A read through any
    of them raises a RuntimeError afterwards, as after :func:`deallocate_output`. The tensor may be a leaf or a
    parameter. A user of the bare address (a ctypes array on ``data_ptr()``) is not seen.

    Args:
        tensor: a plain dense tensor.

    Returns:
        The bytes freed; 0 if the tensor had none.

    Raises:
        RuntimeError: others hold the memory; nothing has been changed. The message names those that Python sees
            (tensors, nodes that saved the memory) and counts the others (a send in flight, a packed tensor).
        TypeError: no plain dense tensor.
        ValueError: memory that torch cannot free (from numpy, DLPack, another process, a lazy clone); a tensor on
            ``meta``.

    Source:
        ``storage.resize_(0)`` at a buffer's last use, as in microsoft/DeepSpeed PR 8032.
    """
    with autograd.without_torch_functions():
        own, size = _own_bytes(tensor), tensor.untyped_storage().nbytes()
        if own < 0 or size == 0:
            return 0
        if own == 0:
            raise ValueError(
                f"tensor is a {describe(tensor)} and lies in {size} bytes that are not torch's alone to free (from "
                "numpy, DLPack, another process or a lazy clone); drop the tensor instead"
            )
        of_storage, in_python = autograd.holders_of_memory(tensor)
        of_tensor = autograd.holders_of(tensor)
        if of_storage or of_tensor:
            raise RuntimeError(who_holds(tensor, size, of_storage, in_python, of_tensor))
        tensor.data = _memoryless(tensor, None, "zbpipe.release_storage")
    return size


class _Memoryless(torch.UntypedStorage):
    """The storage of a tensor that has given up its memory."""

    def is_shared(self) -> bool:
        return False  # torch's own reads the data, and nothing catches libtorch's error: the process would end

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.data_ptr()  # raises


def _memoryless(tensor: torch.Tensor, place: torch.Tensor | None, function: str) -> torch.Tensor:
    """A twin without memory, whose error names ``function`` and the line that called it."""
    frame = sys._getframe(1)
    frame = frame.f_back or frame  # a thread may have begun with it
    twin = _C.twin(
        tensor,
        place,
        f"the memory of this tensor was given up by {function} at {frame.f_code.co_filename}:{frame.f_lineno}: its "
        "values are gone, and only its shape, dtype, device and autograd history can be used",
    )
    twin.untyped_storage().__class__ = _Memoryless
    return twin


def _own_bytes(tensor: torch.Tensor) -> int:
    """As ``_C.own_bytes``. Refuses whatever has not one plain storage."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor is {argument(tensor)}; expected a torch.Tensor")
    has_parts = tensor.is_nested or tensor.is_quantized or autograd.has_dispatch(type(tensor))
    if has_parts or autograd.memory_of(tensor) is None:
        raise TypeError(
            f"tensor is a {type(tensor).__name__} whose memory is not one plain strided storage (a tensor subclass, a "
            "functorch wrapper, a sparse, nested or quantized tensor); pass the plain tensors that it is made of"
        )
    if tensor.is_meta:
        raise ValueError(f"tensor is a {describe(tensor)}, which has no memory to give up")
    return _C.own_bytes(tensor)


def _check_output(tensor: torch.Tensor) -> None:
    base = autograd.base_of(tensor)
    if base is not None:
        raise ValueError(
            f"tensor is a {describe(tensor)}, and its base, a {describe(base)}, would keep the "
            f"{base.untyped_storage().nbytes()} bytes; deallocate what zbpipe.make_viewless(tensor) returns"
        )
    if isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
        raise ValueError(
            f"tensor is a {describe(tensor)}, not an output, and its values cannot be computed again; keep it"
        )


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    """Whether every byte of the storage is the tensor's. Views made to find out would be recorded."""
    reached = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride != reached:
            return False
        reached *= size
    return tensor.untyped_storage().nbytes() == (reached * tensor.itemsize if tensor.numel() else 0)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in a storage of its own; dimensions of stride 0 keep that stride."""
    once = tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            once = once.narrow(dim, 0, 1)
    return once.clone().expand_as(tensor)
