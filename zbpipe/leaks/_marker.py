"""Where a step of a training script ends."""

from collections.abc import Callable

_listeners: list[Callable[[], None]] = []


def step() -> None:
    """Say that a step of a training script ends here.

    For scripts whose steps are neither calls of a pipeline schedule nor of an optimizer, run with ``python -m zbpipe
    leaks``; anywhere else it does nothing. Call it once per step, where what the step made has been let go of. Raises
    nothing.
    """
    for listener in _listeners:
        listener()
