"""The phases of a step, marked in recordings while they run; zbpipe's passes and watched stages mark themselves."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zbpipe import _C, passes
from zbpipe._formatting import argument
from zbpipe._torch.pipelining import stages_of
from zbpipe.memory._log import Open

if TYPE_CHECKING:
    from zbpipe.memory._recording import Recording

METHODS: dict[str, Callable[[dict[str, Any]], str]] = {
    "forward_one_chunk": lambda _: "forward",
    "backward_one_chunk": lambda arguments: "B" if arguments.get("full_backward", True) else "I",
    "backward_weight_one_chunk": lambda _: "W",
}
"""A stage's methods, and from their arguments the kind of phase that a call is."""

ENDED = "_zbpipe_phase"  # an exception's attribute, which may be pickled: the innermost phase that it has ended


class PhaseContext:
    """Marks its beginning and its end in recordings, whatever happens between."""

    def __init__(self, recordings: Sequence[Recording], kind: str, *place: int | None, calls: Any = None) -> None:
        if not isinstance(kind, str):
            raise TypeError(f"kind is {argument(kind)}; expected the phase's name, and its number as microbatch=...")
        self._recordings, self._what = recordings, (kind, *(place or (None, None)), calls)
        self._open: list[tuple[Recording, Open]] = []

    def __enter__(self) -> None:
        begun = [(recording, recording._begin(*self._what)) for recording in self._recordings]
        self._open += [(recording, opened) for recording, opened in begun if opened is not None]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        while self._open:
            recording, opened = self._open.pop()
            recording._end(opened)
            if error is not None:
                vars(error).setdefault(ENDED, opened.label)


class Running:
    """The recordings that run, and the observer of zbpipe's passes as long as there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call_of: weakref.WeakKeyDictionary[_C.ParamGroup, int] = weakref.WeakKeyDictionary()
        self.calls = 0  # of zbpipe's I, while something recorded
        self.recordings: tuple[Recording, ...] = ()

    def add(self, recording: Recording) -> None:
        with self._lock:
            self.recordings = (*self.recordings, recording)
            recording._first_call = self.calls
            passes.observer = self

    def remove(self, recording: Recording) -> None:
        with self._lock:
            self.recordings = tuple(r for r in self.recordings if r is not recording)
            if not self.recordings:
                passes.observer = None

    def input_pass(self, *args: Any) -> tuple[tuple[torch.Tensor | None, ...], list[_C.ParamGroup]]:
        with self._lock:
            recordings, call = self.recordings, self.calls
            self.calls += 1
        with PhaseContext(recordings, "I", calls=(call,)):
            result = _C.input_pass(*args)
        for group in result[1]:
            self._call_of[group] = call
        return result

    def weight_pass(self, groups: tuple[Any, ...], *how: Any) -> None:
        # What is no group the pass will refuse.
        known = {self._call_of.get(group) for group in groups if isinstance(group, _C.ParamGroup)}
        with PhaseContext(self.recordings, "W", calls=tuple(sorted(call for call in known if call is not None))):
            _C.weight_pass(groups, *how)

    def backward(self, backward: Callable[..., None], /, *args: Any) -> None:
        with PhaseContext(self.recordings, "B"):
            backward(*args)


running = Running()


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


class _Method:
    """Stands in front of a stage's method, as an attribute of the stage: one that is dropped goes with the next garbage
    collection. Somebody may keep it, or put another one in front: when its recording is over it passes calls on."""

    def __init__(self, recording: Recording, stage: Any, name: str) -> None:
        method = getattr(stage, name)
        functools.update_wrapper(self, method)
        self.recording, self._stage, self._name = weakref.ref(recording), stage, name
        self.before: Callable[..., Any] | None = vars(stage).get(name)
        self._own = self.before if self.before is not None or hasattr(type(stage), name) else method
        self._signature = inspect.signature(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # By its class, now: zbpipe's patch and whoever else changes the class between two calls must be met.
        method = self._own or functools.partial(getattr(type(self._stage), self._name), self._stage)
        if (recording := self.recording()) not in running.recordings or recording is None:
            return method(*args, **kwargs)
        arguments = self._signature.bind(*args, **kwargs).arguments
        microbatch = arguments.get("fwd_chunk_id", arguments.get("bwd_chunk_id"))
        with PhaseContext([recording], METHODS[self._name](arguments), self._stage.stage_index, microbatch):
            return method(*args, **kwargs)


_lock = threading.Lock()


def watch(recording: Recording, stage: Any) -> None:
    """From now on the stage's methods mark their calls in the recording."""
    with _lock:
        if stage not in recording._watched:
            recording._watched.add(stage)
            vars(stage).update({name: _Method(recording, stage, name) for name in METHODS})


def unwatch(recording: Recording) -> None:
    """The recording has ended: what stands before its stages' methods goes, with that of others that have ended."""
    with _lock:
        for stage, name in itertools.product(recording._watched, METHODS):
            method = vars(stage).pop(name, None)
            while isinstance(method, _Method) and method.recording() not in running.recordings:
                method = method.before
            if method is not None:
                vars(stage)[name] = method
