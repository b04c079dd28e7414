"""The recordings that run: zbpipe's passes mark themselves in these."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from zbpipe import _C, passes
from zbpipe.memory._phases import Marks, PhaseContext


class Running:
    """The recordings that run, and the observer of zbpipe's passes as long as there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.recordings: tuple[Marks, ...] = ()

    def add(self, recording: Marks) -> None:
        with self._lock:
            self.recordings = (*self.recordings, recording)
            passes.observer = self

    def remove(self, recording: Marks) -> None:
        with self._lock:
            self.recordings = tuple(r for r in self.recordings if r is not recording)
            if not self.recordings:
                passes.observer = None

    def input_pass(self, *args: Any) -> tuple[tuple[torch.Tensor | None, ...], list[_C.ParamGroup]]:
        recordings = self.recordings
        calls = [recording.next_call() for recording in recordings]
        with contextlib.ExitStack() as stack:
            for recording, call in zip(recordings, calls, strict=True):
                stack.enter_context(PhaseContext([recording], "I", None, call, (call,)))
            result = _C.input_pass(*args)
        for recording, call in zip(recordings, calls, strict=True):
            recording.note(result[1], call)
        return result

    def weight_pass(self, groups: tuple[Any, ...], *how: Any) -> None:
        with contextlib.ExitStack() as stack:
            for recording in self.recordings:
                calls = recording.calls_of(groups)
                stack.enter_context(PhaseContext([recording], "W", None, calls[0] if len(calls) == 1 else None, calls))
            _C.weight_pass(groups, *how)

    def backward(self, backward: Callable[..., None], /, *args: Any) -> None:
        with PhaseContext(self.recordings, "B"):
            backward(*args)


running = Running()
