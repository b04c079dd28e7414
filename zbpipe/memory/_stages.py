"""The pipeline stages that recordings watch: a stage's methods, hidden by attributes that mark their calls."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from zbpipe._torch.pipelining import stages_of

if TYPE_CHECKING:
    from zbpipe.memory._recording import Recording

lock = threading.Lock()  # of the recordings that run, and of those that each stage has

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
    elif isinstance(stages, Iterable) and not isinstance(stages, str):  # whose parts are strings
        for stage in stages:
            yield from stages_in(stage)
    else:
        raise TypeError(
            f"watch() was given a {type(stages).__name__}; expected a pipeline stage, a schedule or a list of them"
        )


class Method:
    """An attribute of a stage that hides a method and marks its calls in ``recordings``, which run."""

    def __init__(self, stage: Any, name: str) -> None:
        method = getattr(stage, name)
        functools.update_wrapper(self, method)
        self._stage, self._name = stage, name
        self.recordings = weakref.WeakSet["Recording"]()
        self.before: Callable[..., Any] | None = vars(stage).get(name)
        self._own = self.before if self.before is not None or hasattr(type(stage), name) else method
        self._signature = inspect.signature(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # By its class, now: zbpipe's patch and whoever else changes the class between two calls must be met.
        method = self._own or functools.partial(getattr(type(self._stage), self._name), self._stage)
        with lock:  # another thread may begin or end one
            recordings = list(self.recordings)
        if not recordings:
            return method(*args, **kwargs)
        arguments = self._signature.bind(*args, **kwargs).arguments
        microbatch = arguments.get("fwd_chunk_id", arguments.get("bwd_chunk_id"))
        kind, stage = METHODS[self._name](arguments), self._stage.stage_index
        with contextlib.ExitStack() as phases:
            for recording in recordings:
                phases.enter_context(recording.phase(kind, stage=stage, microbatch=microbatch))
            return method(*args, **kwargs)
