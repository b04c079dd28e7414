"""Release helpers: giving the memory of stage outputs back before their backward has run.

For schedules of one's own. An output that was sent is needed for its place in the autograd graph alone;
these functions let go of its values and keep the graph.
"""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from zbpipe import _C, _gone
from zbpipe._torch import autograd

_LISTED = 8  # holders that a refusal describes; more are counted


def deallocate_output(tensor: torch.Tensor) -> int:
    """Give up an output's memory, once it was sent, and keep its place in the autograd graph.

    The tensor keeps its shape, dtype, device, ``grad_fn`` and hooks, so that ``torch.autograd.backward``,
    :func:`stage_backward_input` and :func:`stage_backward` take it as before. Reading its values or taking a view of it
    raises a RuntimeError from then on, through whatever name the object has, which says on which line its memory was
    given up; printing it says that too. Its ``untyped_storage()`` has no bytes. For all this the object becomes one of
    a subclass, ``zbpipe._gone.GoneTensor``, until it is given new memory (``tensor.data = ...``); other tensors, and
    torch, are left as they are. So a tensor of a subclass of one's own keeps its class, and torch's words about bounds
    where a view is taken of it; and so does what C++ alone does with the tensor.

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
    if isinstance(tensor, torch.nn.Parameter):
        raise ValueError(
            f"tensor is a {_describe(tensor)}, and no output; nothing could compute its values again, so keep it"
        )
    if _gone.reason(tensor):
        return 0
    by = _gone.who("zbpipe.deallocate_output")
    freed = _C.deallocate_output(tensor, _gone.why(by))
    _gone.mark(tensor, by)
    return freed


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
        Megatron-LM's ``make_viewless_tensor`` (megatron/core/utils.py); here without flags. Views that
        cannot be detached: pytorch/pytorch 142229, 142237, 143589.
    """
    if reason := _gone.reason(tensor):
        raise RuntimeError(reason)
    return _C.make_viewless(tensor)


def release_storage(tensor: torch.Tensor) -> int:
    """Resize a tensor's storage to zero bytes, provided that nobody else needs it.

    The tensor's object may be known to any number of names, containers and hooks in Python: they are one
    holder, and reading through any of them raises a RuntimeError afterwards, for good: no new bytes can
    be given to the storage. The tensor may be a leaf or a parameter. What it says when it is read or printed
    is as after :func:`deallocate_output`. Who has nothing but an address (a ctypes array on ``data_ptr()``)
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
    by = _gone.who("zbpipe.release_storage")
    released, size, of_storage, python_storage, of_tensor = _C.release_storage(tensor, _gone.why(by))
    if not released:
        raise RuntimeError(_who_holds(tensor, size, of_storage, python_storage, of_tensor))
    if size > 0:
        _gone.mark(tensor, by)
    return size


def _who_holds(tensor: torch.Tensor, size: int, of_storage: int, python_storage: bool, of_tensor: int) -> str:
    """Say who holds a tensor's memory besides it. Returns text alone: nothing is kept alive by it."""
    with autograd.without_torch_functions():
        seen: list[str] = []
        base = autograd.base_of(tensor)  # before the search, which finds objects
        others = [t for t in _living_tensors() if t is not tensor]
        sharing = [t for t in others if _C.find_hold(tensor, t)]
        for other in sharing:
            of_storage -= 1
            of_tensor -= bool(_C.find_hold(tensor, other) & _C.HOLDS_AS_BASE)
            seen.append(f"{'its base, ' if other is base else ''}a {_describe(other)}")
        for other in others:
            if other.is_leaf and other.grad is tensor:
                of_tensor -= 1
                seen.append(f"the .grad of a {_describe(other)}")
        packed = 0
        for node in _nodes_below([tensor, *others]):
            for name, held in _held_by(node):
                hold = _C.find_hold(tensor, held)
                packed += bool(hold & _C.HOLDS_UNKNOWN)
                if hold & _C.HOLDS_TENSOR:
                    of_tensor -= 1
                    seen.append(f"{node.name()}, which keeps it as {name}")
                elif hold & _C.HOLDS_STORAGE:
                    # A tensor that was counted above, saved by a node: one holder of the storage.
                    of_storage -= not any(_C.find_hold(t, held) & _C.HOLDS_TENSOR for t in sharing)
                    seen.append(f"{node.name()}, which keeps a tensor on the same memory as {name}")
        if python_storage:
            of_storage -= 1
            seen.append("an UntypedStorage in Python")
        return _refusal(tensor, size, seen, max(of_storage, 0) + max(of_tensor, 0), packed)


def _refusal(tensor: torch.Tensor, size: int, seen: list[str], unseen: int, packed: int) -> str:
    listed = seen[:_LISTED]
    if len(seen) > _LISTED:
        listed.append(f"{len(seen) - _LISTED} more that Python can see")
    if unseen:
        text = f"{unseen} that cannot be seen from Python, such as a send under way"
        listed.append(text + (f" or one of {packed} saved tensors that hooks have packed" if packed else ""))
    count = len(seen) + unseen
    return (
        f"the storage ({size} bytes) of a {_describe(tensor)} is kept, because it has {count} other "
        f"holder{'' if count == 1 else 's'}: {'; '.join(listed)}; drop {'it' if count == 1 else 'them'} first"
    )


def _describe(tensor: torch.Tensor) -> str:
    if isinstance(tensor, torch.nn.Parameter):
        kind = "parameter"
    elif autograd.is_view(tensor):
        kind = "view"
    elif tensor.grad_fn is not None:
        kind = f"result of {tensor.grad_fn.name()}"
    else:
        kind = "leaf that requires a gradient" if tensor.requires_grad else "tensor without history"
    return f"{kind} of {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


def _living_tensors() -> list[torch.Tensor]:
    # type(), not isinstance(): a lazy object's __class__ may run anything.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


def _nodes_below(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    todo: list[Any] = []
    for tensor in tensors:
        try:
            todo.append(tensor.grad_fn)
        except RuntimeError:  # a view whose history an in-place change has made unusable
            continue
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [below for below, _ in node.next_functions]
        yield node


def _held_by(node: Any) -> Iterator[tuple[str, Any]]:
    """What a node saved, as name and torch's SavedTensor: no hook runs; and an accumulator's leaf."""
    if hasattr(node, "variable"):
        yield "its leaf", node.variable
    yield from autograd.saved_by(node)
