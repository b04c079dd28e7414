"""What a schedule gets in the place of a backend's work. It answers as the work does, and can outlive the work."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_Work: Any = getattr(dist, "Work", object)  # a torch without torch.distributed can import this module, but not use it


class Transfer(_Work):  # type: ignore[misc]
    """Stands for a work, and passes all questions but ``wait`` on to it; see ``_asked``."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work

    def __getattr__(self, name: str) -> Any:
        """Attributes that only works of this backend have."""
        if name == "work" or self.work is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return getattr(self.work, name)

    def answer_afterwards(self, question: str) -> Any:
        """The answer once the work is gone."""
        raise NotImplementedError


def _asked(question: str) -> Callable[..., Any]:
    def ask(self: Transfer, *args: Any, **kwargs: Any) -> Any:
        work = self.work
        return self.answer_afterwards(question) if work is None else getattr(work, question)(*args, **kwargs)

    ask.__name__ = question
    return ask


for _question in dir(_Work):
    if not _question.startswith(("__", "_pybind11")) and _question not in ("wait", "unbox"):
        setattr(Transfer, _question, _asked(_question))


def wait_for(work: Any, timeout: timedelta | None) -> Any:
    return work.wait(timeout) if timeout else work.wait()  # to most works a timeout of 0 is none
