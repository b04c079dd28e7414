"""Runs a script in this process as ``python SCRIPT`` or ``python -m MODULE`` would.

Its globals are those of ``__main__`` and stay when it has ended: they go where Python lets them go, when the
interpreter ends. Dropped before, as runpy does, what they hold would be destroyed while others still run: a DDP model's
reducer joins gloo's thread, which may be waiting for the GIL.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType

_FIRST_OF_COMPILED = importlib.util.MAGIC_NUMBER


def run_script(script: str, arguments: list[str]) -> None:
    """Run a file, or a folder or zip archive with a ``__main__.py``. What it raises passes."""
    main = ModuleType("__main__")
    if Path(script).is_file() and not _is_archive(script):
        search_first(str(Path(script).resolve().parent))
        code = _code_of(script, main)
    else:
        archive = os.path.abspath(script)
        search_first(archive, is_archive=True)
        spec = PathFinder.find_spec("__main__", [archive])
        if spec is None:
            raise ImportError(f"can't find '__main__' module in {script!r}")
        code = _code_of_spec(spec, main)
    _run(code, main, script, arguments)


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module, or the ``__main__`` of a package, by its name. What it raises passes."""
    main = ModuleType("__main__")
    search_first(os.getcwd())
    sys.argv[:] = ["-m", *arguments]  # while its packages are imported
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None:
        raise ImportError(f"No module named {name}, or none that can be run", name=name)
    _run(_code_of_spec(spec, main), main, spec.origin or name, arguments)


def search_first(folder: str, is_archive: bool = False) -> None:
    """Puts the folder of what is run where Python would: in the place of the folder that it put first for us. Under
    -P, -I and PYTHONSAFEPATH it puts none there, but for a folder or archive with a ``__main__.py``."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = folder
    elif is_archive:
        sys.path.insert(0, folder)


def _is_archive(script: str) -> bool:
    return PathFinder.find_spec("__main__", [script]) is not None


def _code_of(script: str, main: ModuleType) -> CodeType:
    main.__file__ = os.path.abspath(script)
    with open(script, "rb") as file:
        is_compiled = file.read(len(_FIRST_OF_COMPILED)) == _FIRST_OF_COMPILED
    if is_compiled:
        compiled = SourcelessFileLoader("__main__", script)
        main.__loader__ = compiled
        code = compiled.get_code("__main__")
        assert code is not None
        return code
    loader = SourceFileLoader("__main__", script)
    main.__loader__ = loader
    code = loader.source_to_code(loader.get_data(script), script)  # its bytecode is cached nowhere
    assert isinstance(code, CodeType)
    return code


def _code_of_spec(spec: ModuleSpec, main: ModuleType) -> CodeType:
    main.__spec__, main.__package__, main.__loader__ = spec, spec.parent, spec.loader
    if spec.origin is not None:
        main.__file__ = spec.origin
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if not isinstance(code, CodeType):
        raise ImportError(f"No code object available for {spec.name}", name=spec.name)
    return code


def _run(code: CodeType, main: ModuleType, name: str, arguments: list[str]) -> None:
    sys.argv[:] = [name, *arguments]
    vars(main).setdefault("__cached__", getattr(main.__spec__, "cached", None))
    sys.modules["__main__"] = main  # at the place where Python's own is, and goes
    exec(code, vars(main))
