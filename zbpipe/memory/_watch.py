"""Stages that recordings watch: each call of a stage's methods marks a phase."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from zbpipe._torch.pipelining import stages_of

if TYPE_CHECKING:
    from zbpipe.memory._recording import Recording

METHODS: dict[str, Callable[[dict[str, Any]], str]] = {
    "forward_one_chunk": lambda _: "forward",
    "backward_one_chunk": lambda arguments: "B" if arguments.get("full_backward", True) else "I",
    "backward_weight_one_chunk": lambda _: "W",
}
"""A stage's methods, and from their arguments the kind of phase that a call is."""


def _stages_in(stages: Any) -> Iterator[Any]:
    """The stages that Recording.watch() is given. Raises TypeError."""
    if all(hasattr(stages, name) for name in METHODS):
        yield stages
    elif (of_schedule := stages_of(stages)) is not None:
        yield from of_schedule
    elif isinstance(stages, Iterable):
        for stage in stages:
            yield from _stages_in(stage)
    else:
        raise TypeError(
            f"watch() was given a {type(stages).__name__}; expected a pipeline stage, a schedule or a list of them"
        )


class _Method:
    """Stands in front of a stage's method, as an attribute of the stage: one that is dropped goes with the next garbage
    collection. Somebody may keep it, or put another one in front: when its recording is over it passes calls on."""

    def __init__(self, recording: Recording, stage: Any, name: str) -> None:
        method = getattr(stage, name)
        functools.update_wrapper(self, method)
        self._recording, self._stage, self._name = weakref.ref(recording), stage, name
        self.before: Callable[..., Any] | None = vars(stage).get(name)
        self._own = self.before if self.before is not None or hasattr(type(stage), name) else method
        self._signature = inspect.signature(method)

    def running(self) -> Recording | None:
        """Its recording, until that has ended."""
        recording = self._recording()
        return recording if recording is not None and recording._is_running else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # By its class, now: zbpipe's patch and whoever else changes the class between two calls must be met.
        method = self._own or functools.partial(getattr(type(self._stage), self._name), self._stage)
        if (recording := self.running()) is None:
            return method(*args, **kwargs)
        arguments = self._signature.bind(*args, **kwargs).arguments
        microbatch = arguments.get("fwd_chunk_id", arguments.get("bwd_chunk_id"))
        kind, stage = METHODS[self._name](arguments), self._stage.stage_index
        with recording.phase(kind, stage=stage, microbatch=microbatch):
            return method(*args, **kwargs)


_lock = threading.Lock()


def watch(recording: Recording, stages: Any) -> None:
    """From now on the stages' methods mark their calls in the recording."""
    for stage in list(_stages_in(stages)):
        with _lock:
            if stage not in recording._watched:
                recording._watched.add(stage)
                vars(stage).update({name: _Method(recording, stage, name) for name in METHODS})


def unwatch(recording: Recording) -> None:
    """The recording has ended: what stands before its stages' methods goes, with that of others that have ended."""
    with _lock:
        for stage, name in itertools.product(recording._watched, METHODS):
            method = vars(stage).pop(name, None)
            while isinstance(method, _Method) and method.running() is None:
                method = method.before
            if method is not None:
                vars(stage)[name] = method
