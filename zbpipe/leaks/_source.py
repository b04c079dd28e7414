"""Where things were written: lines of source, looked up without importing or running anything."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_OURS = os.path.join(Path(__file__).parents[1], "")


def place(filename: str, line: int) -> str:
    """``file:line``, the file as short as it is from here; a library's as it is imported."""
    return f"{_shown(filename)}:{line}"


def is_library(where: str) -> bool:
    """Whether a place that :func:`place` gave is the standard library's, an installed package's or zbpipe's."""
    return where.rpartition(":")[0] in _of_libraries


_full: dict[str, str] = {}  # of what was shortened
_of_libraries: set[str] = set()


@functools.lru_cache(maxsize=1)
def _standard() -> tuple[str, ...]:
    return tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})


@functools.lru_cache(maxsize=1024)
def _shown(filename: str) -> str:
    inside = library_path(filename)
    shown = _relative(filename) if inside is None else inside
    _full[shown] = filename
    if inside is not None:
        _of_libraries.add(shown)
    return shown


def library_path(filename: str) -> str | None:
    """The path of a library's file from the folder that it is imported from; None for another's file."""
    for folder in (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"):
        _, found, inside = filename.rpartition(folder)
        if found:
            return inside
    for folder in _standard():
        if filename.startswith(folder):
            return filename[len(folder) :]
    if filename.startswith(_OURS):
        return os.path.join("zbpipe", filename[len(_OURS) :])
    return filename if filename.startswith("<frozen ") else None


def _relative(filename: str) -> str:
    try:
        relative = os.path.relpath(filename)
    except (ValueError, OSError):  # another drive, a working directory that is gone
        return filename
    return filename if relative.startswith("..") else relative


def line_at(where: str | None) -> str:
    """The source line at a ``file:line``, stripped; empty if there is none."""
    if where is None:
        return ""
    shown, _, line = where.rpartition(":")
    return linecache.getline(_full.get(shown, shown), int(line)).strip() if line.isdigit() else ""


def global_line(filename: str, name: str) -> int | None:
    """The line on which a module first binds a name at its top level."""
    return _globals(filename).get(name)


def attribute_line(filename: str, qualname: str, name: str) -> int | None:
    """The line on which a class first binds ``name``, in its body or as an attribute of a method's first argument."""
    return _attributes(filename).get((qualname, name))


def assignment_line(filename: str, name: str, first: int, now: int, last: int) -> int | None:
    """Where in a function, from line ``first`` to ``last``, a local was bound last when it is at line ``now``."""
    lines = [line for line, bound in _bindings(filename) if bound == name and first <= line <= last]
    # Leaving a with block, a function is at the line where that begins.
    return max((line for line in lines if line <= now), default=max(lines, default=None))


def definition_line(filename: str, first: int) -> int:
    """The line of a function's ``def``; its code begins at line ``first``, with its decorators if it has any."""
    return _decorated(filename).get(first, first)


def forget() -> None:
    """Drops what was parsed."""
    _full.clear()
    _of_libraries.clear()
    for cache in (_shown, _tree, _globals, _attributes, _bindings, _decorated):
        cache.cache_clear()


@functools.lru_cache(maxsize=64)
def _tree(filename: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


@functools.lru_cache(maxsize=64)
def _globals(filename: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for line, name in _bound_in(_tree(filename)):
        found.setdefault(name, line)
    return found


@functools.lru_cache(maxsize=64)
def _bindings(filename: str) -> tuple[tuple[int, str], ...]:
    return tuple(
        (node.lineno, node.id)
        for node in ast.walk(_tree(filename))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


@functools.lru_cache(maxsize=64)
def _decorated(filename: str) -> dict[int, int]:
    return {
        node.decorator_list[0].lineno: node.lineno
        for node in ast.walk(_tree(filename))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.decorator_list
    }


@functools.lru_cache(maxsize=64)
def _attributes(filename: str) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    todo: list[tuple[str, ast.AST]] = [("", _tree(filename))]
    while todo:
        prefix, scope = todo.pop()
        for child in ast.iter_child_nodes(scope):
            name = getattr(child, "name", None)
            inside = prefix
            if isinstance(child, ast.ClassDef):
                inside = f"{prefix}{name}."
                for line, bound in _bound_in(child):
                    found.setdefault((f"{prefix}{name}", bound), line)
                for node in ast.walk(child):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                        key = (f"{prefix}{name}", node.attr)
                        found[key] = min(found.get(key, node.lineno), node.lineno)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside = f"{prefix}{name}.<locals>."
            todo.append((inside, child))
    return found


def _bound_in(scope: ast.Module | ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Names that a body binds, not those within its functions and classes."""
    todo: list[ast.AST] = list(reversed(scope.body))
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.alias):
            yield node.lineno, (node.asname or node.name).partition(".")[0]
        if not isinstance(node, ast.Lambda):
            todo += reversed(list(ast.iter_child_nodes(node)))
