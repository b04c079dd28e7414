"""Start-up hook behind ZBPIPE_PATCH=1, for scripts that import torch.distributed.pipelining and never zbpipe.

torch's import calls install(), by the entry point torch.backends in pyproject.toml. With
TORCH_DEVICE_BACKEND_AUTOLOAD=0 torch does not, and ZBPIPE_PATCH has no effect. The hook does not import zbpipe: a
finder waits for the import of torch.distributed.pipelining, and patches after it.
"""

import importlib
import logging
import os
import sys
import threading

PIPELINING = "torch.distributed.pipelining"
ON = ("1", "true", "yes")
OFF = ("", "0", "false", "no")
VARIABLES = ("ZBPIPE_PATCH", "ZBPIPE_POLICY", "ZBPIPE_RELEASE_OUTPUTS")
# Of zbpipe's own build, tests and benchmarks.
OURS = {
    *("ZBPIPE_DEVICE", "ZBPIPE_LATE_CACHE", "ZBPIPE_LOCAL", "ZBPIPE_PACK", "ZBPIPE_PROGRAMS", "ZBPIPE_SANITIZE"),
    *("ZBPIPE_TABLES", "ZBPIPE_TEST_MODULE", "ZBPIPE_UNDER", "ZBPIPE_UNITS", "ZBPIPE_WERROR"),
}


def install():
    """Installs the finder if ZBPIPE_PATCH asks for it, once. Logs a warning of variables that nothing reads.

    With a value other than 1, true, yes, 0, false, no the import of torch.distributed.pipelining raises RuntimeError.
    To ignore the value would be a silent fall-back; to raise here would stop every Python of the environment.
    """
    if unread := misspelled():
        logging.getLogger("zbpipe").warning("%s in the environment: zbpipe reads no such variable", ", ".join(unread))
    value = os.environ.get("ZBPIPE_PATCH", "").strip().lower()
    if value not in OFF and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        finder = Finder(value)
        if "zbpipe" in sys.modules:  # zbpipe's import of torch calls this, and ends with complete()
            finder.started.add("zbpipe")
        sys.meta_path.insert(0, finder)


def misspelled():
    """The variables in the environment that nothing reads, each with the nearest: "ZBPIPE_PACTH (ZBPIPE_PATCH?)"."""
    unread = sorted({name for name in os.environ if name.startswith("ZBPIPE_")} - {*VARIABLES, *OURS})
    if not unread:
        return []
    closest = importlib.import_module("difflib").get_close_matches  # few need it
    return [f"{name} ({closest(name, VARIABLES, 1, 0)[0]}?)" for name in unread]


def complete():
    """Called at the end of zbpipe/__init__.py: zbpipe cannot patch before."""
    for finder in list(sys.meta_path):
        if isinstance(finder, Finder):
            finder.tell("zbpipe")


class Finder:
    """Finds nothing itself. It makes torch.distributed.pipelining and zbpipe tell it when they have been imported."""

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
        """A module is complete: patches if both are, once."""
        with self.lock:
            self.finished.add(name)
            # If zbpipe imports torch.distributed.pipelining, patch when zbpipe is complete.
            ready = PIPELINING in self.finished and self.started <= self.finished and self in sys.meta_path
            if ready:
                sys.meta_path.remove(self)
        if ready:
            import zbpipe

            zbpipe.patch()
