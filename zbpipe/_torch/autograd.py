"""What is private in autograd and in tensors: views, versions, classes, what nodes saved."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


def without_torch_functions() -> Any:
    """A context in which neither tensors' subclasses nor modes answer in the place of torch's functions."""
    return torch._C.DisableTorchFunction()


def is_dtensor(tensor: object) -> bool:
    """Whether it is a torch.distributed.tensor.DTensor: nothing is one where nobody imported that module."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def without_autocast() -> Any:
    return torch._C._DisableAutocast()


def autocast_here() -> dict[str, torch.dtype]:
    """The devices for which autocast is on, with its dtype."""
    devices = torch._C._autocast_supported_devices()
    return {device: torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)}


def cached_by_autocast() -> int:
    """Bytes per element of the weights that autocast casts and caches on the CPU; 0 if it caches none."""
    if not torch.is_autocast_enabled("cpu") or not torch.is_autocast_cache_enabled():
        return 0
    return torch.get_autocast_dtype("cpu").itemsize


# Operations that torch.nn and einsum come down to.
grouped_mm, unsafe_view = torch.ops.aten._grouped_mm, torch.ops.aten._unsafe_view
reshape_alias = torch.ops.aten._reshape_alias

# Base classes of Python objects around C++ tensors, storages and Functions; C++ nodes have classes of their own.
NATIVE_CLASSES = (torch._C.TensorBase, torch.UntypedStorage, torch._C._FunctionBase)
FUNCTION_NODE = torch._C._FunctionBase
SAVED_TENSOR = torch._C._autograd.SavedTensor
_RAW = "_raw_saved_"  # begins the names of the getters for what a node has saved


def placed(tensor: torch.Tensor) -> str:
    """A tensor as "float32[3, 4] on cpu", as C writes it."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def takes_gradient(value: object) -> bool:
    """Whether a gradient can arrive there: at a GradientEdge, or at a tensor that requires one."""
    return isinstance(value, GradientEdge) or getattr(value, "requires_grad", False)


def with_its_edge(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor with the edge that a gradient of ``tensor`` takes; None if there is no such edge.

    For a leaf it is a node in front of the accumulator, which is no history. A view made without grad mode has no edge,
    though it requires a gradient if its base does.
    """
    if tensor.grad_fn is not None or not tensor.requires_grad:
        return tensor
    with torch.enable_grad():
        behind = tensor.view_as(tensor)
    node = behind.grad_fn
    return behind if node is not None and node.next_functions[0][0] is not None else None


def is_view(tensor: torch.Tensor) -> bool:
    return tensor._is_view()


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor of which this one is a view, or None."""
    return tensor._base


def own_grad_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its ``.grad``, without torch's warning where it has none."""
    try:
        has_one = tensor.is_leaf or tensor.retains_grad
    except RuntimeError:  # a view whose history an in-place change has made unusable
        return None
    return tensor.grad if has_one else None


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor's memory was changed in place; -1 of an inference tensor, which does not count."""
    return -1 if tensor.is_inference() else tensor._version


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory and version counter in its class, without its history, attributes, gradient and hooks."""
    cls = type(tensor)
    return tensor.detach() if has_dispatch(cls) else torch.Tensor._make_subclass(cls, tensor)


def has_dispatch(cls: Any) -> bool:
    return bool(cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)


def holders_of(tensor: torch.Tensor) -> int:
    """How many hold the tensor in C++ besides its Python object: nodes, views, sends."""
    return int(tensor._use_count()) - 1  # type: ignore[attr-defined]


def holders_of_memory(tensor: torch.Tensor) -> tuple[int, bool]:
    """How many hold the tensor's storage besides it, and whether Python names its storage."""
    other = torch.empty(0)  # the only holder of its storage
    theirs, mine = other.untyped_storage(), tensor.untyped_storage()
    in_python = sys.getrefcount(mine) > sys.getrefcount(theirs)
    more = torch._C._storage_Use_Count(mine._cdata) - torch._C._storage_Use_Count(theirs._cdata)
    return more + in_python, in_python


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges the C++ tensors of two Python objects. Raises RuntimeError where C++ refers to one of them weakly."""
    torch._C._swap_tensor_impl(one, other)


def memory_of(tensor: torch.Tensor) -> int | None:
    """A number that all tensors on one storage share; None for a tensor without one. No Python object is made of the
    storage: that would hold it."""
    try:
        return int(torch._C._storage_address(tensor)) or None  # type: ignore[attr-defined]
    except (RuntimeError, NotImplementedError):  # sparse, say, or a wrapper of functorch's
        return None


def by_memory(tensors: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """Those that have a storage, by :func:`memory_of`."""
    found: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if (memory := memory_of(tensor)) is not None:
            found.setdefault(memory, []).append(tensor)
    return found


def leaves_behind(outputs: Iterable[torch.Tensor | GradientEdge]) -> Iterator[torch.Tensor]:
    """The leaves that the graph leads to from these outputs."""
    ends = [(o if isinstance(o, GradientEdge) else get_gradient_edge(o)).node for o in outputs]
    accumulator: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
    return (node.variable for node in nodes_behind(ends) if isinstance(node, accumulator))


def nodes_behind(ends: Iterable[Node]) -> Iterator[Node]:
    """These nodes and all that the graph leads to from them, each once."""
    seen = set(ends)
    pending = list(seen)
    while pending:
        node = pending.pop()
        yield node
        further = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= further
        pending += further


def run_backward(
    outputs: Iterable[torch.Tensor], grads: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """An ordinary backward that keeps the graph: the inputs' gradients. Unlike torch.autograd.grad it imports nothing,
    and nobody has replaced it."""
    engine: Any = torch.autograd.Variable._execution_engine
    return tuple(engine.run_backward(tuple(outputs), tuple(grads), True, False, tuple(inputs), accumulate_grad=False))


def names_saved_by(node_type: str) -> list[str] | None:
    """The names of what nodes of a type have saved, by torch's getters, in order; None if torch has no such type."""
    cls = getattr(torch._C._functions, node_type, None)
    names = (name for name in dir(cls) if name.startswith(_RAW))
    return None if cls is None else sorted(name.removeprefix(_RAW) for name in names)


def be_unseen() -> None:
    """Lets this thread, and no other, compute without further threads of OpenMP's, and no profiler see it."""
    torch.get_num_threads()  # which may set the thread's own number, once
    with contextlib.suppress(AttributeError):  # a torch without these
        torch.autograd._enable_record_function(False)
        ctypes.CDLL(torch._C.__file__).omp_set_num_threads(1)


_THROUGH = "zbpipe_through"
_lock = threading.Lock()
_passes = 0
_run_backward: Any = None  # torch's, while a pass stands in front of it


@contextlib.contextmanager
def inner_backwards_through(function: Callable[..., Any]) -> Iterator[None]:
    """A context in which ``function(run, outputs)`` runs each ``torch.autograd.backward`` that is called in this
    thread, or on a thread of the engine in a run that this thread has begun. Other backwards are left alone."""
    global _passes, _run_backward
    with _lock:
        _passes += 1
        if _passes == 1:
            _run_backward = torch.autograd._engine_run_backward
            torch.autograd._engine_run_backward = functools.partial(_run_through, _run_backward)
    try:
        with _in_state(_THROUGH, function):
            yield
    finally:
        with _lock:
            _passes -= 1
            if _passes == 0:
                torch.autograd._engine_run_backward = _run_backward


def with_callers_context() -> contextlib.AbstractContextManager[None]:
    """As torch.autograd.backward has it: what a backward compiles on the engine's threads is configured as here.

    Without a device other than the CPU all nodes run on the caller's thread. A value costs the engine a copy per node.
    """
    if torch._C._get_accelerator().type == "cpu" and not torch._C._is_key_in_tls("context"):
        return contextlib.nullcontext()
    return _in_state("context", contextvars.copy_context())


@contextlib.contextmanager
def _in_state(name: str, value: Any) -> Iterator[None]:
    """A context in which the thread's state has a value. Runs of the engine take it along to the engine's threads."""
    before = _from_state(name)
    _stash(name, value)
    try:
        yield
    finally:
        _stash(name, before)
        if before is None and hasattr(torch._C, "_remove_obj_from_tls"):
            torch._C._remove_obj_from_tls(name)  # at a thread's end torch would wait for the GIL to drop it


def _stash(name: str, value: Any) -> None:
    if torch.__version__.startswith("2.11."):  # which takes over the reference that it is lent
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(name, value)


def _from_state(name: str) -> Any:
    return torch._C._get_obj_in_tls(name) if torch._C._is_key_in_tls(name) else None


def _run_through(run_backward: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
    run = functools.partial(run_backward, outputs, *args, **kwargs)
    function = _from_state(_THROUGH) if kwargs.get("accumulate_grad", True) else None
    return run() if function is None else function(run, outputs)


def saved_by(node: Node) -> Iterator[tuple[str, Any]]:
    """A node's saved tensors by name, each a SavedTensor of torch's; no hook runs."""
    for attribute in dir(type(node)):
        if not attribute.startswith(_RAW):
            continue
        try:
            saved = getattr(node, attribute)
        except RuntimeError:  # a backward has released it
            continue
        for one in saved if isinstance(saved, (tuple, list)) else [saved]:
            yield attribute.removeprefix(_RAW), one
