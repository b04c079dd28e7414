"""Receive buffers, which are there while something is in them.

A received tensor belongs to the microbatch: memory is allocated when its receive is posted, and goes with the
microbatch. In between a description is in its place, a tensor on the meta device: it has the buffer's layout and no
memory, and torch's code, which tells a missing gradient by None, goes on working.
"""

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from zbpipe._stage import state

_DESCRIPTION = "zbpipe_description"  # what was last in the place of this one's buffer
_with_descriptions: weakref.WeakSet[Any] = weakref.WeakSet()  # stages that may have some


def of(stage: Any) -> Iterable[Any]:
    """What torch's stage knows of each tensor that it receives."""
    for recv_infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
        yield from recv_infos


def give_back() -> None:
    """Stages have the buffers that torch expects them to have, each from when it is used."""
    for stage in list(_with_descriptions):
        for info in of(stage):
            vars(info).pop(_DESCRIPTION, None)
        _allocate_when_asked(of(stage), stage.device)
    _with_descriptions.clear()


def describe(stage: Any, recv_infos: Iterable[Any]) -> None:
    """Put descriptions in the place of the buffers."""
    if not state.in_force:  # unpatched meanwhile, from within the step
        return
    for info in recv_infos:
        buffer = getattr(info, "buffer", None)
        if type(buffer) is torch.Tensor and not buffer.is_meta:
            before = getattr(info, _DESCRIPTION, None)
            if before is None or not _is_like(before, buffer):
                # Of a layout to be written in: a gradient handed over on the same rank may be expanded.
                before = torch.empty_like(buffer, device="meta", requires_grad=buffer.requires_grad)
                setattr(info, _DESCRIPTION, before)
                _with_descriptions.add(stage)
            info.buffer = before


def _is_like(description: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        description.shape == tensor.shape
        and description.stride() == tensor.stride()
        and description.dtype is tensor.dtype
        and description.requires_grad == tensor.requires_grad
    )


def description(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout on the meta device."""
    return _empty(tensor, "meta")


def _empty(like: torch.Tensor, device: Any) -> torch.Tensor:
    return torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device=device, requires_grad=like.requires_grad
    )


def allocate(recv_infos: Iterable[Any], device: Any) -> None:
    """Put buffers in the place of descriptions."""
    for info in recv_infos:
        buffer = getattr(info, "buffer", None)
        if type(buffer) is torch.Tensor and buffer.is_meta:
            # Not empty_like, which for a meta tensor is Python.
            info.buffer = _empty(buffer, device)


def _allocate_when_asked(recv_infos: Iterable[Any], device: Any) -> None:
    """Where torch looks for a buffer and nobody of zbpipe's is there to make it: not before it looks."""
    for info in recv_infos:
        buffer = getattr(info, "buffer", None)
        if type(buffer) is torch.Tensor and buffer.is_meta:
            info.zbpipe_device = device
            info.__class__ = _with_late_buffer(type(info))  # type: ignore[arg-type]


@functools.cache
def _with_late_buffer(kind: type) -> type:
    """A class of what has a description in the place of its buffer, until somebody asks for that, or gives one."""

    def become_plain(self: Any) -> Any:
        self.__class__ = kind
        return vars(self).pop("zbpipe_device")

    def get(self: Any) -> torch.Tensor:
        allocate([self], become_plain(self))
        buffer: torch.Tensor = self.buffer
        return buffer

    def give(self: Any, buffer: Any) -> None:
        become_plain(self)
        self.buffer = buffer

    return type(kind.__name__, (kind,), {"buffer": property(get, give)})
