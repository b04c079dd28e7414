"""Runs a script in this process as ``python SCRIPT`` or ``python -m MODULE`` would.

Its globals are those of ``__main__`` and stay when it has ended: they go where Python lets them go, when the
interpreter ends. Dropped before, as runpy's public functions do, what they hold would be destroyed while others still
run: a DDP model's reducer joins gloo's thread, which may be waiting for the GIL.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from zbpipe._cli.files import search_first


def run(script: str, arguments: list[str], is_module: bool) -> int:
    """Runs a file, or a module or package by its name. Returns its exit status; its other exceptions pass."""
    sys.argv[:] = ["-m" if is_module else script, *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")  # at the place where Python's own is, and goes
    search_first(os.getcwd() if is_module else str(Path(script).resolve().parent))
    try:
        if is_module:
            runpy._run_module_as_main(script)  # type: ignore[attr-defined] # as python -m does
            return 0
        loader = main.__loader__ = SourceFileLoader("__main__", script)
        main.__file__, main.__cached__ = os.path.abspath(script), None  # type: ignore[attr-defined]
        # The source's bytecode is cached nowhere.
        exec(loader.source_to_code(loader.get_data(script), script), vars(main))
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)  # as Python itself has it
        return 1
    return 0
