"""Release helpers: giving the memory of stage outputs back before their backward has run.

For schedules of one's own. An output that was sent is needed for its place in the autograd graph alone;
these functions let go of its values and keep the graph.

Note [Where the memory of a deallocated output goes]

A tensor in Python is the tensor of C++, which holds a storage. Nodes that save an output of their own hold the storage
alone. Nodes that save an input, views (their base) and sends in flight hold the tensor of C++: taking the storage out
of that would pull memory away from under them. So `deallocate_output` changes it only if nobody else has it; otherwise
the Python object moves to a twin, without memory and at the same place in the graph, and the other holders keep the old
one. Either way the Python object gives up its share, and the memory goes with the last holder.
"""

import sys
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zbpipe import _C
from zbpipe._sharers import describe, who_holds
from zbpipe._torch import autograd


def deallocate_output(tensor: torch.Tensor) -> int:
    """Give up an output's memory, once it was sent, and keep its place in the autograd graph.

    The tensor keeps its shape, dtype, device, ``grad_fn`` and hooks, so that ``torch.autograd.backward``,
    :func:`stage_backward_input` and :func:`stage_backward` take it as before. Reading its values, those of a view of it
    too, or printing them raises a RuntimeError from then on, through whatever name the object has, which says on which
    line its memory was given up. Its ``untyped_storage()`` has no memory, though it still says how many bytes it had.
    New memory (``tensor.data = ...``) makes it an ordinary tensor again. Where nobody else names the tensor,
    ``out = torch.autograd.graph.get_gradient_edge(out)`` does the same without zbpipe.

    Whoever else holds the memory keeps it, and sees nothing of this: nodes that saved the output for
    their backward, views of it, detached aliases, numpy arrays, a send that is still under way. The memory
    goes back to the allocator with the last of them. What keeps the Python object itself keeps no memory, and
    raises when it reads: a hook of ``saved_tensors_hooks`` that packs a tensor as itself, as ``save_on_cpu`` does
    with one that is on the CPU; an attribute of an ``autograd.Function``'s context. On a device with streams all is
    as for ``del tensor``: work on other streams must have been waited for, or recorded with ``record_stream``.

    Args:
        tensor: a dense tensor that is no view and no leaf that requires a gradient. A second call is legal.

    Returns:
        The bytes that went back at once; 0 if somebody else still holds the memory, or if it is not
        torch's own (from numpy, DLPack, another process, a lazy clone).

    Raises:
        TypeError: no tensor, or one whose memory is not one plain storage (a subclass with a dispatch of
            its own such as DTensor, a functorch wrapper, a sparse, nested or quantized tensor).
        ValueError: a view (see :func:`make_viewless`), a parameter, an input, a tensor on ``meta``.
        RuntimeError: C++ holds the tensor, and refers to it weakly too (``retain_grad``).
        After any of these nothing has been changed.

    Source:
        Megatron-LM's ``deallocate_output_tensor`` (megatron/core/pipeline_parallel/schedules.py); here without the
        flag, and with an ordinary backward afterwards in place of a custom one.
    """
    with autograd.without_torch_functions():
        own = _own_bytes(tensor)
        _check_output(tensor)
        if own < 0:
            return 0
        memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        twin = _memoryless(tensor, tensor, "zbpipe.deallocate_output")
        if autograd.holders_of(tensor):
            _exchange(tensor, twin)
            del twin
        else:
            tensor.data = twin
    return own if memory.expired() else 0  # type: ignore[no-untyped-call]


def make_viewless(tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor with the same values and the same autograd history that is no view.

    A view keeps its base alive, and with it the base's memory. The result can be detached in place and
    deallocated, whatever ``tensor`` was: a view of any kind, one of many pieces (``chunk``, ``unbind``)
    too. Its gradients take the edge that those of ``tensor`` take, in every grad mode; a view that was
    made under ``no_grad`` has no such edge, and the result requires no gradient. A leaf that requires one
    stays the leaf: the result's gradients go to its ``.grad``, and the result's history keeps it and its
    base alive.

    Args:
        tensor: a dense tensor.

    Returns:
        ``tensor`` itself if it is no view and its storage has no byte more than it needs. Otherwise a
        new ``torch.Tensor``: on the same memory, without a copy, if ``tensor`` fills its storage, and if
        not, on a copy of its own elements. Where memory is shared the version counter is shared as well,
        so that a change in place is noticed by nodes that saved either; it is not recorded for the other.
        Within what ``torch.compile`` traces, the call is a graph break.

    Raises:
        TypeError: no tensor, one whose memory is not one plain storage, or a view of a class other than
            ``torch.Tensor``.
        ValueError: a view that carries a forward-mode gradient; a tensor on ``meta``.

    Source:
        Megatron-LM's ``make_viewless_tensor`` (megatron/core/utils.py); here without flags. Views that cannot be
        detached: pytorch/pytorch 142229, 142237, 143589.
    """
    with autograd.without_torch_functions():
        if _own_bytes(tensor) < 0:
            tensor.untyped_storage().data_ptr()  # raises, saying who gave the memory up
        fills = _fills_its_storage(tensor)
        if fills and not autograd.is_view(tensor):
            return tensor
        if type(tensor) is not torch.Tensor:
            raise TypeError(
                f"tensor is a {type(tensor).__name__}, whose class the result could not have; "
                "pass tensor.as_subclass(torch.Tensor)"
            )
        if autograd.has_forward_gradient(tensor):
            raise ValueError(
                f"tensor is a {describe(tensor)} and carries a forward-mode gradient, which the result would lose; "
                "take it off with torch.autograd.forward_ad.unpack_dual"
            )
        # An inference tensor's result may be one; others stay what they are.
        with torch.inference_mode(torch.is_inference_mode_enabled() and tensor.is_inference()):
            place = _with_its_edge(tensor)
            with torch.no_grad():
                # The counter of what shares the memory: a change in place is seen by those that saved the base.
                return _C.twin(tensor if fills else _copy(tensor), place, None)


def release_storage(tensor: torch.Tensor) -> int:
    """Free a tensor's storage, provided that nobody else needs it.

    The tensor's object may be known to any number of names, containers and hooks in Python: they are one
    holder, and reading through any of them raises a RuntimeError afterwards, as after :func:`deallocate_output`.
    The tensor may be a leaf or a parameter. Who has nothing but an address (a ctypes array on ``data_ptr()``)
    cannot be seen.

    Args:
        tensor: a dense tensor.

    Returns:
        The bytes that went back to the allocator; 0 if it had none.

    Raises:
        RuntimeError: others hold the memory, and are named as far as can be seen: tensors in Python, and
            nodes that saved it in graphs that tensors in Python lead to. Holders in C++ (a send under way,
            a tensor that hooks have packed) and tensors that the garbage collector does not list
            (``gc.freeze``) are counted. Nothing has been changed. Time is linear in the number of
            Python objects and nodes that live.
        TypeError: no tensor, or one whose memory is not one plain storage.
        ValueError: memory that torch cannot free: from numpy, DLPack, another process, a lazy clone;
            a tensor on ``meta``.

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
        return False  # torch's asks for the data where nothing catches libtorch's answer: the process would end

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.data_ptr()  # raises


def _memoryless(tensor: torch.Tensor, place: torch.Tensor | None, function: str) -> torch.Tensor:
    """A twin whose readers are told who gave the memory up: ``function``, the caller's name, and its caller's line."""
    frame = sys._getframe(2)
    twin = _C.twin(
        tensor,
        place,
        f"the memory of this tensor was given up by {function} at {frame.f_code.co_filename}:{frame.f_lineno}: its "
        "values are gone, and only its shape, dtype, device and autograd history can be used",
    )
    twin.untyped_storage().__class__ = _Memoryless
    return twin


# What a tensor holds.


def _own_bytes(tensor: torch.Tensor) -> int:
    """As ``_C.own_bytes``. Refuses what is no plain tensor: memory of its own kind, reached through one storage."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor is a {type(tensor).__name__}; expected a torch.Tensor")
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
            f"tensor is a {describe(tensor)}, and no output; nothing could compute its values again, so keep it"
        )


def _exchange(tensor: torch.Tensor, twin: torch.Tensor) -> None:
    holders = autograd.holders_of(tensor)
    try:
        autograd.exchange(tensor, twin)
    except RuntimeError as error:
        raise RuntimeError(
            f"tensor is a {describe(tensor)}, has {holders} other holders in C++ and is referred to weakly there as "
            "well, as retain_grad() does, so its memory cannot be given up; drop the holders first (wait for the "
            "sends, delete the views)"
        ) from error


# Views.


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    """Whether every byte of the storage is the tensor's. Views made to find out would be recorded."""
    moving = [
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1 and stride
    ]
    reached = 1
    for stride, size in sorted(moving):
        if stride != reached:
            return False
        reached *= size
    return tensor.untyped_storage().nbytes() == (reached * tensor.itemsize if tensor.numel() else 0)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """In a storage of its own, of the same shape; dimensions of stride 0 keep it."""
    once = tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            once = once.narrow(dim, 0, 1)
    return once.clone().expand_as(tensor)


def _with_its_edge(tensor: torch.Tensor) -> torch.Tensor | None:
    """What has the edge that a gradient of ``tensor`` takes; None if it takes none.

    A leaf's is not its accumulator, which is no history, but a node in front of it. A view that was made without grad
    mode has none, though it says that it requires a gradient when its base does.
    """
    if tensor.grad_fn is not None or not tensor.requires_grad:
        return tensor
    with torch.enable_grad():
        behind = tensor.view_as(tensor)
    node = behind.grad_fn
    return behind if node is not None and node.next_functions[0][0] is not None else None
