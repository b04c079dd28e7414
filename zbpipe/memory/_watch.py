"""Pipeline stages whose methods mark their calls in recordings."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from zbpipe._torch.pipelining import stages_of
from zbpipe.memory._phases import Marks, PhaseContext

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
    """A stage whose methods mark their calls in the recordings that watch it. It holds the stage, and the stage's own
    attributes hold it: a stage that is dropped meanwhile goes with the next garbage collection."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self.recordings: tuple[Marks, ...] = ()
        self.methods = {name: _WatchedMethod(self, name) for name in METHODS}


class _WatchedMethod:
    """Stands in front of a stage's method. Somebody may keep it for longer, or put another one in front of it: when
    nothing watches any more it only passes calls on."""

    def __init__(self, watch: _Watch, name: str) -> None:
        stage = watch.stage
        method = getattr(stage, name)
        functools.update_wrapper(self, method)
        before = vars(stage).get(name)
        while isinstance(before, _WatchedMethod):  # of an earlier watch, which somebody's own undoing has put back
            before = before.before
        self.before: Callable[..., Any] | None = before
        self._own = method if before is None and not hasattr(type(stage), name) else before
        self._watch = watch
        self._name = name
        self._signature = inspect.signature(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage, recordings = self._watch.stage, self._watch.recordings
        # By its class, now: zbpipe's patch and whoever else changes the class between two calls must be met.
        method = self._own or functools.partial(getattr(type(stage), self._name), stage)
        if not recordings:
            return method(*args, **kwargs)
        arguments = self._signature.bind(*args, **kwargs).arguments
        microbatch = arguments.get("fwd_chunk_id", arguments.get("bwd_chunk_id"))
        with PhaseContext(recordings, METHODS[self._name](arguments), stage.stage_index, microbatch):
            return method(*args, **kwargs)


_watches: weakref.WeakValueDictionary[int, _Watch] = weakref.WeakValueDictionary()
"""By their stages' ids: a watch keeps its stage. Those that some recording has joined and not left."""

_joined: weakref.WeakKeyDictionary[Marks, weakref.WeakSet[_Watch]] = weakref.WeakKeyDictionary()
_watches_lock = threading.Lock()


def join(recording: Marks, stage: Any) -> None:
    """From now on the stage's methods mark their calls in the recording."""
    with _watches_lock:
        watch = _watches.get(id(stage))
        if watch is None:
            watch = _Watch(stage)
            vars(stage).update(watch.methods)
            _watches[id(stage)] = watch
        if recording not in watch.recordings:
            watch.recordings = (*watch.recordings, recording)
            _joined.setdefault(recording, weakref.WeakSet()).add(watch)


def leave(recording: Marks) -> None:
    """No stage marks anything in the recording any more."""
    with _watches_lock:
        for watch in list(_joined.pop(recording, ())):
            watch.recordings = tuple(r for r in watch.recordings if r is not recording)
            if not watch.recordings:
                _watches.pop(id(watch.stage), None)
                _restore(watch)


def _restore(watch: _Watch) -> None:
    attributes = vars(watch.stage)
    for name, method in watch.methods.items():
        if attributes.get(name) is not method:
            continue  # somebody has put another one in front; ours passes calls on
        if method.before is None:
            del attributes[name]
        else:
            attributes[name] = method.before
    watch.methods.clear()  # no cycle is left for the garbage collector
