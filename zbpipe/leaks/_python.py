"""Names of Python's objects and places in their source, by types alone: no repr, no equality, no property of them runs,
and nothing is imported."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import linecache
import os
import re
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

_CLONE = os.path.join(Path(__file__).parents[2], "")
_OURS = tuple(os.path.join(_CLONE, package, "") for package in ("zbpipe", "_zbpipe_hook"))
_STANDARD = {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")}
_PACKAGES = re.compile(r".*[/\\](site|dist)-packages[/\\]")
_files: dict[str, str] = {}  # by what was shown of their names
# A metaclass may have properties of these names.
_MODULE, _QUALNAME, _MRO, _DICT = (vars(type)[name] for name in ("__module__", "__qualname__", "__mro__", "__dict__"))
_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))
_CODE = (
    (types.FunctionType, "__code__"),
    (types.GeneratorType, "gi_code"),
    (types.CoroutineType, "cr_code"),
    (types.AsyncGeneratorType, "ag_code"),
)
_LONGEST_KEY = 60
# The scopes of attributes of any class or module, and of what a name does not tell.
_OF_CLASSES, _OF_OTHERS = ".self", ".other"
_OF_ARGUMENTS = ".argument"  # of any function
NOTHING = object()


def type_name(thing: Any) -> str:
    return class_name(type(thing))


def class_name(cls: type) -> str:
    """With its module unless it is built in or the script's own."""
    return _full_name(_MODULE.__get__(cls), _QUALNAME.__get__(cls), ("builtins", "__main__"))


def _full_name(module: Any, name: str, unsaid: tuple[str, ...] = ("__main__",)) -> str:
    return name if type(module) is not str or module in unsaid else f"{module}.{name}"


def callable_name(thing: Any) -> str:
    if type(thing) is types.MethodType:
        return callable_name(thing.__func__)
    if type(thing) is functools.partial:
        return f"partial of {callable_name(thing.func)}"
    if type(thing) is types.FunctionType:
        return _full_name(thing.__module__, thing.__qualname__)
    return f"a {type_name(thing)}"


def code_place(thing: Any) -> str | None:
    """``file:line`` of a function, method, partial, generator or coroutine; None for what has no code of its own."""
    if type(thing) is types.MethodType:
        return code_place(thing.__func__)
    if type(thing) is functools.partial:
        return code_place(thing.func)
    for cls, name in _CODE:
        if type(thing) is cls:
            code = getattr(thing, name)
            return place(code.co_filename, definition_line(code.co_filename, code.co_firstlineno))
    return None


def code_name(code: types.CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)


def module_of_class(cls: type) -> str:
    module = _MODULE.__get__(cls)
    return module if type(module) is str else ""


def module_namespace(module: Any) -> dict[str, Any]:
    """The globals of what may be a module, whatever it says when it is asked; empty of anything else."""
    return types.ModuleType.__getattribute__(module, "__dict__") if issubclass(type(module), types.ModuleType) else {}


def module_name(namespace: dict[str, Any]) -> str:
    name = dict.get(namespace, "__name__")
    return name if type(name) is str else "(without a name)"


def module_file(namespace: dict[str, Any]) -> str | None:
    filename = dict.get(namespace, "__file__")
    return filename if type(filename) is str else None


def is_of_a_library(module: str) -> bool:
    """Whether a module is the standard library's or an installed package's."""
    if module.partition(".")[0] in sys.stdlib_module_names and module != "__main__":
        return True
    filename = module_file(module_namespace(sys.modules.get(module)))
    return filename is not None and library_path(filename) is not None


def array_type() -> Any:
    """numpy.ndarray, if the program has imported it."""
    return dict.get(module_namespace(sys.modules.get("numpy")), "ndarray")


def key_text(key: Any, quoted: bool = False) -> str:
    if key is NOTHING:
        return "as a key"
    if not any(type(key) is plain for plain in _PLAIN_KEYS):
        return f"at key {type_name(key)}"
    text = repr(key) if quoted or type(key) is not str else key
    return text if len(text) <= _LONGEST_KEY else text[: _LONGEST_KEY - 3] + "..."


def namespace_of(thing: Any) -> Any:
    """The ``__dict__`` of a class or an object, or None. A property of that name is not run."""
    if issubclass(type(thing), type):
        namespace = gc.get_referents(_DICT.__get__(thing))[0]  # which is behind a proxy
    else:
        descriptors = (dict.get(namespace_of(base) or {}, "__dict__") for base in _MRO.__get__(type(thing)))
        descriptor = next((one for one in descriptors if type(one) is types.GetSetDescriptorType), None)
        namespace = None if descriptor is None else descriptor.__get__(thing)
    return namespace if issubclass(type(namespace), dict) else None


def slot_of(thing: Any, value: Any) -> tuple[str | None, type]:
    """The slot, or member in C, with that value, and the class that has it; None and the object's class if none."""
    for base in _MRO.__get__(type(thing)) if value is not None else ():
        for name, member in dict(_DICT.__get__(base)).items():
            try:
                if type(member) is types.MemberDescriptorType and member.__get__(thing) is value:
                    return name, base
            except AttributeError:  # not set
                continue
    return None, type(thing)


def attribute_place(cls: type, attribute: str) -> str | None:
    for base in _MRO.__get__(cls):
        filename = module_file(module_namespace(sys.modules.get(module_of_class(base))))
        if where := binding_place(filename, _QUALNAME.__get__(base), attribute):
            return where
    return None


@functools.lru_cache(maxsize=1024)
def set_by_the_program(attribute: str) -> list[str]:
    """The lines of the program that set an attribute of another object than ``self``, the first one of each file. No
    line if a class of the program, or a module, has such an attribute: they may set that."""
    found = []
    for module in list(sys.modules.values()):
        filename = module_file(module_namespace(module)) or ""
        if library_path(filename) is None and attribute in "".join(linecache.getlines(filename)):
            if binding_place(filename, _OF_CLASSES, attribute):
                return []
            where = binding_place(filename, _OF_OTHERS, attribute)
            found += [where] if where else []
    return found


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
        return filename[len(_CLONE) :]
    return filename if filename.startswith("<frozen ") else None


def is_library(where: str) -> bool:
    """Whether a place that :func:`place` gave is the standard library's, an installed package's or zbpipe's."""
    return library_path(_files[where.rpartition(":")[0]]) is not None


def line_at(where: str | None) -> str:
    """The source line at a ``file:line``, stripped; empty if there is none."""
    shown, _, line = (where or "").rpartition(":")
    return linecache.getline(_files.get(shown, shown), int(line)).strip() if line.isdigit() else ""


def binding_place(filename: str | None, scope: str, name: str) -> str | None:
    """Where a class (its qualified name) or a module ("") first binds a name. A class may bind it in its body, or as an
    attribute of something in its methods."""
    lines = _bindings(filename).get((scope, name)) if filename else None
    return place(filename, min(lines)) if filename and lines else None


def assignment_line(filename: str, name: str, first: int, now: int, last: int) -> int | None:
    """Where in a function, from line ``first`` to ``last``, a local was bound last when it is at line ``now``."""
    bound = _bindings(filename)
    lines, arguments = (
        [line for line in bound.get((scope, name), ()) if first <= line <= last] for scope in (None, _OF_ARGUMENTS)
    )
    # Leaving a with block, a function is at the line where that begins. Functions within it have arguments, too.
    return max((line for line in lines if line <= now), default=max(lines, default=min(arguments, default=None)))


def definition_line(filename: str, first: int) -> int:
    """The line of a function's ``def``; its code begins at line ``first``, with its decorators if it has any."""
    if not linecache.getline(filename, first).lstrip().startswith("@"):
        return first
    lines = enumerate(linecache.getlines(filename)[first:], first + 1)
    return next((line for line, text in lines if re.match(r"\s*(async )?def ", text)), first)


def forget() -> None:
    """Drops what was parsed."""
    _files.clear()
    _bindings.cache_clear()
    set_by_the_program.cache_clear()


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
    namespaces = {"self"}  # and names of classes and modules
    of_module = set[tuple[str, str]]()  # names that functions have declared global
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
                        namespaces.add(name)
                    else:
                        inner += ".<locals>"
                case ast.arg(arg=name):
                    bind(_OF_ARGUMENTS, name, child.lineno)
                case ast.Global(names=names):
                    of_module.update((scope, name) for name in names)
                case (
                    ast.Name(id=name, ctx=ast.Store())
                    | ast.MatchAs(name=str(name))
                    | ast.MatchStar(name=str(name))
                    | ast.ExceptHandler(name=str(name))
                ):
                    bind("" if (scope, name) in of_module else scope, name, child.lineno)
                    bind(None, name, child.lineno)
                    if scope and scope == owner:
                        bind(_OF_CLASSES, name, child.lineno)
                case ast.alias():
                    name = (child.asname or child.name).partition(".")[0]
                    bind(scope, name, child.lineno)
                    namespaces.add(name)
                case ast.Attribute(value=target, attr=name, ctx=ast.Store()):
                    known = isinstance(target, ast.Name) and target.id in namespaces
                    bind(_OF_CLASSES if known else _OF_OTHERS, name, child.lineno)
                    if owner:
                        bind(owner, name, child.lineno)
            todo.append((child, inner, inside))
    return found
