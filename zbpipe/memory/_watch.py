"""Pipeline stages whose methods mark their calls in recordings."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from zbpipe._torch.pipelining import stages_of
from zbpipe.memory._phases import Marks, PhaseContext, running

METHODS: dict[str, Callable[[dict[str, Any]], str]] = {
    "forward_one_chunk": lambda _: "forward",
    "backward_one_chunk": lambda arguments: "B" if arguments.get("full_backward", True) else "I",
    "backward_weight_one_chunk": lambda _: "W",
}
"""A stage's methods, and from their arguments the kind of phase that a call is."""


def stages_in(stages: Any) -> Iterator[Any]:
    """The stages that Recording.watch() is given. Raises TypeError."""
    if all(hasattr(stages, name) for name in METHODS):
        yield stages
    elif (of_schedule := stages_of(stages)) is not None:
        yield from of_schedule
    elif isinstance(stages, Iterable):
        for stage in stages:
            yield from stages_in(stage)
    else:
        raise TypeError(
            f"watch() was given a {type(stages).__name__}; expected a pipeline stage, a schedule or a list of them"
        )


class _Watch:
    """That a stage is watched. The stage's own attributes hold it: a stage that is dropped meanwhile goes with the next
    garbage collection."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage


class _Method:
    """Stands in front of a stage's method. Somebody may keep it for longer, or put another one in front of it: when
    nothing watches any more it only passes calls on."""

    def __init__(self, watch: _Watch, name: str) -> None:
        method = getattr(watch.stage, name)
        functools.update_wrapper(self, method)
        self.watch = watch
        self.before: Callable[..., Any] | None = vars(watch.stage).get(name)
        self._own = self.before if self.before is not None or hasattr(type(watch.stage), name) else method
        self._name = name
        self._signature = inspect.signature(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage = self.watch.stage
        # By its class, now: zbpipe's patch and whoever else changes the class between two calls must be met.
        method = self._own or functools.partial(getattr(type(stage), self._name), stage)
        recordings = [recording for recording in running.recordings if self.watch in recording.watched]
        if not recordings:
            return method(*args, **kwargs)
        arguments = self._signature.bind(*args, **kwargs).arguments
        microbatch = arguments.get("fwd_chunk_id", arguments.get("bwd_chunk_id"))
        with PhaseContext(recordings, METHODS[self._name](arguments), stage.stage_index, microbatch):
            return method(*args, **kwargs)


_lock = threading.Lock()


def join(recording: Marks, stage: Any) -> None:
    """From now on the stage's methods mark their calls in the recording."""
    attributes = vars(stage)
    with _lock:
        ours = [attributes[name] for name in METHODS if isinstance(attributes.get(name), _Method)]
        watch = ours[0].watch if ours else _Watch(stage)
        for name in METHODS:
            if not ours or name not in attributes:  # else ours is there, perhaps behind somebody else's
                attributes[name] = _Method(watch, name)
        recording.watched.add(watch)


def leave(recording: Marks) -> None:
    """No stage marks anything in the recording any more, which has ended."""
    with _lock:
        watches = list(recording.watched)
        recording.watched.clear()
        for watch in watches:
            if not any(watch in other.watched for other in running.recordings):
                _restore(watch)


def _restore(watch: _Watch) -> None:
    attributes = vars(watch.stage)
    for name in METHODS:
        method = attributes.get(name)
        if not isinstance(method, _Method):
            continue  # somebody has put another one in front; ours passes calls on
        if method.before is None:
            del attributes[name]
        else:
            attributes[name] = method.before
