"""The other holders of a tensor's memory, as far as Python sees them: release_storage names them as it refuses."""

import gc
from collections.abc import Iterator
from typing import Any

import torch

from zbpipe._formatting import described
from zbpipe._torch import autograd

_LISTED = 8  # holders that a refusal describes; it counts the others


def who_holds(tensor: torch.Tensor, size: int, of_storage: int, in_python: bool, of_tensor: int) -> str:
    """The other holders of a tensor's memory as a sentence, which keeps nothing alive."""
    seen: list[str] = []
    memory = autograd.memory_of(tensor)
    base = autograd.base_of(tensor)  # before the search, which finds Python objects alone
    # type(), not isinstance(): a lazy object's __class__ may run anything.
    others = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and thing is not tensor]
    sharing = [t for t in others if autograd.memory_of(t) == memory]
    for other in sharing:
        of_storage -= 1
        of_tensor -= autograd.base_of(other) is tensor
        seen.append(f"{'its base, ' if other is base else ''}a {describe(other)}")
    for other in others:
        if autograd.own_grad_of(other) is tensor:
            of_tensor -= 1
            seen.append(f"the .grad of a {describe(other)}")
    packed = 0
    for node in autograd.nodes_behind(filter(None, map(_node_of, [tensor, *others]))):
        for name, held in _held_by(node):
            if held is None:
                packed += 1
            elif held is tensor:
                of_tensor -= 1
                seen.append(f"{node.name()}, which keeps it as {name}")
            elif autograd.memory_of(held) == memory:
                # A node that saved a tensor counted above is no further holder of the storage.
                of_storage -= not any(t is held for t in sharing)
                seen.append(f"{node.name()}, which keeps a tensor on the same memory as {name}")
    if in_python:
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
        f"the storage ({size} bytes) of a {describe(tensor)} is kept, because it has {count} other "
        f"holder{'' if count == 1 else 's'}: {'; '.join(listed)}; drop {'it' if count == 1 else 'them'} first"
    )


def describe(tensor: torch.Tensor) -> str:
    if isinstance(tensor, torch.nn.Parameter):
        kind = "parameter"
    elif autograd.is_view(tensor):
        kind = "view"
    elif tensor.grad_fn is not None:
        kind = f"result of {tensor.grad_fn.name()}"
    else:
        kind = "leaf that requires a gradient" if tensor.requires_grad else "tensor without history"
    return f"{kind} of {described(tensor)} on {tensor.device}"


def _node_of(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view whose history an in-place change has made unusable
        return None


def _held_by(node: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """A node's saved tensors by name, and an accumulator's leaf. None for a packed tensor: no hook runs."""
    if hasattr(node, "variable"):
        yield "its leaf", node.variable
    for name, saved in autograd.saved_by(node):
        if saved.unpack_hook is not None:
            yield name, None
        elif saved.data is not None:
            yield name, saved.data
