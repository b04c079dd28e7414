"""Receive buffers, which exist only while they are in use.

A received tensor belongs to its microbatch: its memory is allocated when the receive is posted, and freed with the
microbatch. At other times a tensor on the meta device is in the buffer's place. It has the buffer's layout and no
memory, and torch's code works with it. None would mean a missing gradient there.
"""

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from zbpipe._stage import state

_DESCRIPTION = "zbpipe_description"  # the attribute that keeps a buffer's last description
_with_descriptions: weakref.WeakSet[Any] = weakref.WeakSet()  # stages that may have descriptions


def of(stage: Any) -> Iterable[Any]:
    """torch's records of the tensors that a stage receives, each with its buffer."""
    for recv_infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
        yield from recv_infos


def give_back() -> None:
    """Gives all stages the buffers that torch expects, each at its first use, as zbpipe is called no more."""
    for stage in list(_with_descriptions):
        for info in of(stage):
            vars(info).pop(_DESCRIPTION, None)
        for info in _described(of(stage)):
            info.zbpipe_device = stage.device
            info.__class__ = _with_late_buffer(type(info))  # type: ignore[arg-type]
    _with_descriptions.clear()


def describe(stage: Any, recv_infos: Iterable[Any]) -> None:
    """Put descriptions in the place of the buffers."""
    if not state.in_force:  # unpatch() was called within the step
        return
    for info in recv_infos:
        buffer = getattr(info, "buffer", None)
        if type(buffer) is torch.Tensor and not buffer.is_meta:
            before = getattr(info, _DESCRIPTION, None)
            if before is None or _layout(before) != _layout(buffer):
                # empty_like gives a layout to write to; a gradient from a stage of the same rank may be expanded.
                before = torch.empty_like(buffer, device="meta", requires_grad=buffer.requires_grad)
                setattr(info, _DESCRIPTION, before)
                _with_descriptions.add(stage)
            info.buffer = before


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _described(recv_infos: Iterable[Any]) -> list[Any]:
    """The records that have a description in the place of the buffer."""
    return [info for info in recv_infos if type(b := getattr(info, "buffer", None)) is torch.Tensor and b.is_meta]


def empty_like(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """A tensor of the same layout. torch.empty_like of a meta tensor runs Python."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
    )


def allocate(recv_infos: Iterable[Any], device: Any) -> None:
    """Put buffers in the place of descriptions."""
    for info in _described(recv_infos):
        info.buffer = empty_like(info.buffer, device)


@functools.cache
def _with_late_buffer(kind: type) -> type:
    """The class of a record with a description, which becomes a ``kind`` when its buffer is read or set."""

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
