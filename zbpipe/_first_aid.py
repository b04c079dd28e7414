"""``zbpipe doctor`` where zbpipe cannot be imported: the doctor itself lies behind that import.

So an error of the import (no torch or another one, no compiled part, an unknown ZBPIPE_POLICY) becomes a fault here.
It is printed beside the facts that need no import.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path
from types import TracebackType

from zbpipe._version import __version__

HERE = Path(__file__).resolve().parent


def watch_import() -> None:
    """Called as zbpipe's import begins; ``import_is_done`` ends it."""
    if _is_doctor():
        sys.excepthook = _say


def import_is_done() -> None:
    if sys.excepthook is _say:
        sys.excepthook = sys.__excepthook__


def find_numpy(faults: list[str]) -> str:
    """Where numpy is. Its absence is a fault."""
    spec = importlib.util.find_spec("numpy")
    if spec is None:
        faults.append("numpy is not installed, and torch's schedules send the stages' shapes by it: pip install numpy")
        return "not installed"
    return str(spec.origin)


def line(name: str, text: str) -> None:
    print(f"{name + ':':<24}{text}")


def _is_doctor() -> bool:
    program, *arguments = getattr(sys, "argv", None) or [""]
    if program == "-m":  # while the package of the module is imported
        program = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    return arguments[:1] == ["doctor"] and Path(program).stem == "zbpipe"


def _say(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, Exception):
        sys.__excepthook__(kind, error, traceback)
        return
    faults = [f"zbpipe cannot be imported: {error if isinstance(error, ImportError) else f'{kind.__name__}: {error}'}"]
    line("zbpipe", f"{__version__}, {HERE.parent}")
    line("Python", f"{sys.version.split()[0]}, {sys.executable}")
    line("machine", platform.machine())
    line("torch", _find_torch())
    line("numpy", find_numpy(faults))
    for name in sorted(name for name in os.environ if name.startswith("ZBPIPE_")):
        line(name, repr(os.environ[name]))
    for fault in faults:
        print(f"FAULT: {fault}")
    print("something would not work", flush=True)


def _find_torch() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
