"""The memory that torch's CPU allocator has handed out, counted beside it, and its n-th request refused: allocations.c."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def preloading(folder):
    """Environment variables for processes that import support.allocations: builds what they preload in `folder`."""
    library = Path(folder) / "allocations.so"
    preloaded = os.environ.get("LD_PRELOAD", "")
    # make asan preloads a sanitizer, which would find the compiler's own leaks.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    source = Path(__file__).with_suffix(".c")
    subprocess.run(
        [COMPILER, "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-lpthread"], check=True, env=env
    )
    return {"LD_PRELOAD": f"{preloaded}:{library}".lstrip(":")}


def _of_process():
    library = ctypes.CDLL(None)
    if not hasattr(library, "allocations_bytes"):
        return None
    for name in ("bytes", "blocks", "refused"):
        getattr(library, f"allocations_{name}").restype = ctypes.c_long
    library.allocations_refuse.argtypes = [ctypes.c_long]
    return library


_library = _of_process()


def are_counted():
    return _library is not None


def live():
    """(bytes, blocks) that are handed out now."""
    return _library.allocations_bytes(), _library.allocations_blocks()


def refuse(n):
    """The n-th request from now on fails, 1 being the next; 0 takes that back."""
    _library.allocations_refuse(n)


def refused():
    """How many requests have been refused in this process."""
    return _library.allocations_refused()
