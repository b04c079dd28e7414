"""Start-up hook behind ZBPIPE_PATCH=1, for scripts that import torch.distributed.pipelining and never zbpipe.

torch calls install() when it is imported: an entry point in pyproject.toml, torch.backends. Where
TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set it does not, and the variable has no effect.
zbpipe is not imported here: a finder waits for torch.distributed.pipelining, and patches when that has been imported.
"""

import importlib
import os
import sys
import threading

PIPELINING = "torch.distributed.pipelining"
ON = ("1", "true", "yes")
OFF = ("", "0", "false", "no")


def install():
    """Arrange what ZBPIPE_PATCH asks for. Called again, it changes nothing.

    A value that is none of 1, true, yes, 0, false, no makes the import of torch.distributed.pipelining raise
    RuntimeError: to ignore it would be a silent fall-back, to stop every Python of the environment too much.
    """
    value = os.environ.get("ZBPIPE_PATCH", "").strip().lower()
    if value not in OFF and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        finder = Finder(value)
        if "zbpipe" in sys.modules:  # it imports torch, which calls this; it tells when it is complete
            finder.started.add("zbpipe")
        sys.meta_path.insert(0, finder)


def complete():
    """zbpipe/__init__.py calls this at its end: only then can it patch."""
    for finder in list(sys.meta_path):
        if isinstance(finder, Finder):
            finder.tell("zbpipe")


class Finder:
    """Finds nothing itself: it has torch.distributed.pipelining and zbpipe tell it when they have been imported."""

    def __init__(self, value):
        self.value = value
        self.lock = threading.Lock()
        self.started = set()
        self.finished = set()

    def find_spec(self, name, path=None, target=None):
        if name not in (PIPELINING, "zbpipe"):
            return None
        if self.value not in ON:
            if name == "zbpipe":
                return None
            raise RuntimeError(f"ZBPIPE_PATCH is {self.value!r}: set it to 1 to patch {PIPELINING}, or to 0 not to.")
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        self.watch(name, spec.loader)
                    return spec
        return None

    def watch(self, name, loader):
        exec_module = loader.exec_module

        def exec_and_tell(module):
            loader.exec_module = exec_module
            with self.lock:
                self.started.add(name)
            try:
                exec_module(module)
            except BaseException:
                with self.lock:
                    self.started.discard(name)
                raise
            self.tell(name)

        loader.exec_module = exec_and_tell

    def tell(self, name):
        """The module is complete: patch if both are, once."""
        with self.lock:
            self.finished.add(name)
            # zbpipe may be what imports torch.distributed.pipelining: then patch when zbpipe is complete.
            ready = PIPELINING in self.finished and self.started <= self.finished and self in sys.meta_path
            if ready:
                sys.meta_path.remove(self)
        if ready:
            importlib.import_module("zbpipe").patch()
