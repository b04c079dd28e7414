"""Runs a script in this process as ``python SCRIPT`` or ``python -m MODULE`` would.

Its globals are those of ``__main__`` and stay when it has ended: they go where Python lets them go, when the
interpreter ends. Dropped before, as runpy's public functions do, what they hold would be destroyed while others still
run: a DDP model's reducer joins gloo's thread, which may be waiting for the GIL.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from importlib.machinery import PathFinder, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType

_run_as_main = runpy._run_module_as_main  # type: ignore[attr-defined] # as python -m does


def run_script(script: str, arguments: list[str]) -> None:
    """Run a file, or a folder or zip archive with a ``__main__.py``. What it raises passes."""
    main = _begin([script, *arguments])
    if PathFinder.find_spec("__main__", [script]) is not None or not Path(script).is_file():
        search_first(os.path.abspath(script), is_archive=True)
        _run_as_main("__main__", alter_argv=False)
        return
    search_first(str(Path(script).resolve().parent))
    source, compiled = SourceFileLoader("__main__", script), SourcelessFileLoader("__main__", script)
    data = source.get_data(script)
    is_compiled = data.startswith(importlib.util.MAGIC_NUMBER)
    # The source's bytecode is cached nowhere.
    code = compiled.get_code("__main__") if is_compiled else source.source_to_code(data, script)
    assert code is not None
    main.__loader__ = compiled if is_compiled else source
    main.__file__, main.__cached__ = os.path.abspath(script), None  # type: ignore[attr-defined]
    exec(code, vars(main))


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module, or the ``__main__`` of a package, by its name. What it raises passes."""
    _begin(["-m", *arguments])
    search_first(os.getcwd())
    _run_as_main(name)


def search_first(folder: str, is_archive: bool = False) -> None:
    """Puts the folder of what is run where Python would: in the place of the folder that it put first for us. Under
    -P, -I and PYTHONSAFEPATH it puts none there, but for a folder or archive with a ``__main__.py``."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = folder
    elif is_archive:
        sys.path.insert(0, folder)


def _begin(argv: list[str]) -> ModuleType:
    sys.argv[:] = argv
    main = sys.modules["__main__"] = ModuleType("__main__")  # at the place where Python's own is, and goes
    return main
