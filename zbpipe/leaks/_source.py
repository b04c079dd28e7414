"""Where things were written: lines of source, looked up without importing or running anything."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import os
import re
import sysconfig
from pathlib import Path

_OURS = os.path.join(Path(__file__).parents[1], "")
_STANDARD = {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")}
_PACKAGES = re.compile(r".*[/\\](site|dist)-packages[/\\]")
_files: dict[str, str] = {}  # by what was shown of their names


def place(filename: str, line: int) -> str:
    """``file:line``, the file as short as it is from here; a library's as it is imported."""
    shown = library_path(filename)
    if shown is None:
        shown = filename
        with contextlib.suppress(ValueError, OSError):  # another drive, a working directory that is gone
            relative = os.path.relpath(filename)
            shown = filename if relative.startswith("..") else relative
    _files[shown] = filename
    return f"{shown}:{line}"


@functools.lru_cache(maxsize=1024)
def library_path(filename: str) -> str | None:
    """The path of a library's file from the folder that it is imported from; None for another's file."""
    if packages := _PACKAGES.match(filename):
        return filename[packages.end() :]
    for folder in _STANDARD:
        if filename.startswith(folder):
            return filename[len(folder) :]
    if filename.startswith(_OURS):
        return os.path.join("zbpipe", filename[len(_OURS) :])
    return filename if filename.startswith("<frozen ") else None


def is_library(where: str) -> bool:
    """Whether a place that :func:`place` gave is the standard library's, an installed package's or zbpipe's."""
    return library_path(_files[where.rpartition(":")[0]]) is not None


def line_at(where: str | None) -> str:
    """The source line at a ``file:line``, stripped; empty if there is none."""
    shown, _, line = (where or "").rpartition(":")
    return linecache.getline(_files.get(shown, shown), int(line)).strip() if line.isdigit() else ""


def binding_line(filename: str, scope: str, name: str) -> int | None:
    """The line on which a class, told by its qualified name, or a module, told by "", first binds a name: in its body,
    or as an attribute of something in a class's methods."""
    return min(_bindings(filename).get((scope, name), ()), default=None)


def assignment_line(filename: str, name: str, first: int, now: int, last: int) -> int | None:
    """Where in a function, from line ``first`` to ``last``, a local was bound last when it is at line ``now``."""
    lines = [line for line in _bindings(filename).get((None, name), ()) if first <= line <= last]
    # Leaving a with block, a function is at the line where that begins.
    return max((line for line in lines if line <= now), default=max(lines, default=None))


def definition_line(filename: str, first: int) -> int:
    """The line of a function's ``def``; its code begins at line ``first``, with its decorators if it has any."""
    line = first
    text = linecache.getline(filename, line)
    if text.lstrip().startswith("@"):
        while text and not re.match(r"\s*(async )?def ", text):
            line += 1
            text = linecache.getline(filename, line)
    return line if text else first


def forget() -> None:
    """Drops what was parsed."""
    _files.clear()
    _bindings.cache_clear()


@functools.lru_cache(maxsize=64)
def _bindings(filename: str) -> dict[tuple[str | None, str], list[int]]:
    """The lines on which names are bound, by their scopes; those of variables also by None."""
    found: dict[tuple[str | None, str], list[int]] = {}

    def bind(scope: str | None, name: str, line: int) -> None:
        found.setdefault((scope, name), []).append(line)

    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    todo: list[tuple[ast.AST, str, str]] = [(tree, "", "")]  # with its scope, and the class that it is in
    while todo:
        node, scope, owner = todo.pop()
        for child in ast.iter_child_nodes(node):
            inner, inside = scope, owner
            match child:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    bind(scope, name, child.lineno)
                    inner = f"{scope}.{name}" if scope else name
                    if isinstance(child, ast.ClassDef):
                        inside = inner
                    else:
                        inner += ".<locals>"
                case ast.Name(id=name, ctx=ast.Store()):
                    bind(scope, name, child.lineno)
                    bind(None, name, child.lineno)
                case ast.alias():
                    bind(scope, (child.asname or child.name).partition(".")[0], child.lineno)
                case ast.Attribute(attr=name, ctx=ast.Store()) if owner:
                    bind(owner, name, child.lineno)
            todo.append((child, inner, inside))
    return found
