"""Chains of holders in words. Looks at objects by their types alone: no repr, no equality, no property of theirs runs."""

from __future__ import annotations

import collections
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from zbpipe.leaks import _source
from zbpipe.leaks._report import Holder

Step = tuple[str, Any, str, "str | None"]
"""As zbp_search_holders (csrc/shim/zbp_holders.h) gives them: kind, object or None, name, edge."""

_KEYS = (str, int, float, bool, bytes, type(None))
_LONGEST = 60
_HOOKS = ("hooks", "_hooks")


def in_words(steps: list[Step], threads: dict[int, str], bytes_of: Callable[[Any], int] = lambda _: 0) -> list[Holder]:
    """Holders for the steps. ``threads``: names of threads by the identities of their frames."""
    holders: list[Holder] = []
    at = 0
    while at < len(steps):
        try:
            holder, taken = _describe(steps, at, threads)
        except Exception:  # of an object that is odd beyond what is foreseen here
            holder, taken = Holder("unknown", f"something of type {type_name(steps[at][1])}"), 1
        if holder is not None:
            holders.append(holder)
        at += taken
    return holders


def type_name(thing: Any) -> str:
    kind = type(thing)
    module = type.__getattribute__(kind, "__module__")
    name = type.__getattribute__(kind, "__qualname__")
    return name if not isinstance(module, str) or module in ("builtins", "__main__") else f"{module}.{name}"


def function_name(function: Any) -> str:
    module = function.__module__
    name: str = function.__qualname__
    return f"{module}.{name}" if isinstance(module, str) and module != "__main__" else name


def _describe(steps: list[Step], at: int, threads: dict[int, str]) -> tuple[Holder | None, int]:
    """The holder at a step, and how many steps it takes up."""
    kind, thing, name, edge = steps[at]
    after = steps[at + 1][1] if at + 1 < len(steps) else None
    if kind == "storage":
        return Holder("tensor", f"{_prefix(edge)}a storage, as a Python object"), 1
    if kind == "tensor":
        return _tensor(thing, name, edge, steps[at - 1] if at else None), 1
    if kind == "node":
        kind = "accumulator" if name == "torch::autograd::AccumulateGrad" else "node"
        where = _class_place(thing) if thing is not None else None
        return Holder(kind, f"{_prefix(edge)}{name.rpartition('::')[2]}", where), 1
    if kind == "group":
        return Holder("group", f"{_prefix(edge)}parameter group of zbpipe", None, _bytes_held(thing)), 1
    if issubclass(type(thing), types.ModuleType):
        return _module(steps, at)
    if isinstance_exactly(thing, types.FrameType):
        return _frame(steps, at, threads)
    if edge is not None and edge.partition(" ")[2].startswith("hooks") or edge in ("tensor hooks", "post-accumulate hooks"):
        return _hooks(steps, at)
    if isinstance_exactly(thing, types.FunctionType):
        return _function(steps, at)
    if issubclass(type(thing), dict):
        return _dict(steps, at)
    if isinstance_exactly(thing, types.CellType):
        return Holder("cell", f"{_prefix(edge)}a closure's cell"), 1
    if issubclass(type(thing), type):
        return _instance(steps, at, f"class {type_of_class(thing)}", "class attribute")
    if isinstance_exactly(thing, types.MethodType):
        return Holder("function", f"{_prefix(edge)}bound method {function_name(thing.__func__)}", _code_place(thing.__func__)), 1
    if isinstance_exactly(thing, functools.partial):
        return Holder("function", f"{_prefix(edge)}partial of {_callable_name(thing.func)}"), 1
    if issubclass(type(thing), (list, tuple, collections.deque)):
        return _sequence(thing, after, edge), 1
    if issubclass(type(thing), (set, frozenset)):
        return Holder("list", f"{_prefix(edge)}item of a {type_name(thing)}"), 1
    if issubclass(type(thing), weakref.ReferenceType):
        return Holder("object", f"{_prefix(edge)}the callback of a weak reference"), 1
    if isinstance_exactly(thing, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType):
        return Holder("frame", f"{_prefix(edge)}suspended {thing.__qualname__}", _code_place_of(_code_of(thing))), 1
    if isinstance_exactly(thing, types.TracebackType):
        frame = thing.tb_frame
        where = _source.place(frame.f_code.co_filename, thing.tb_lineno)
        return Holder("frame", f"{_prefix(edge)}the traceback of an exception, in {frame.f_code.co_name}", where), 1
    return _instance(steps, at, type_name(thing), "attribute")


def _prefix(edge: str | None) -> str:
    return f"{edge}: " if edge else ""


def isinstance_exactly(thing: Any, *kinds: type) -> bool:
    return any(type(thing) is kind for kind in kinds)


def type_of_class(cls: type) -> str:
    module = type.__getattribute__(cls, "__module__")
    name: str = type.__getattribute__(cls, "__qualname__")
    return name if module in ("builtins", "__main__") or not isinstance(module, str) else f"{module}.{name}"


# ---- torch's


def _tensor(thing: Any, name: str, edge: str | None, before: Step | None) -> Holder:
    kind = "Tensor" if thing is None or type(thing) is torch.Tensor else type_name(thing).rpartition(".")[2]
    text = f"{kind} {name}".rstrip()
    if edge is not None and edge.startswith("saved_"):
        return Holder("saved", f"{edge.removeprefix('saved_')}, saved: {text}")
    return Holder("tensor", f"{_prefix(edge)}{text}")


def _bytes_held(group: Any) -> int:
    held = group.bytes_held
    return held if isinstance(held, int) else 0


def _hooks(steps: list[Step], at: int) -> tuple[Holder, int]:
    """A dictionary of hooks and the hook in it, which may be wrapped in a tuple or a partial."""
    _, thing, _, edge = steps[at]
    kind = (edge or "hooks").rstrip("0123456789 ").removesuffix("s")
    after = steps[at + 1][1] if at + 1 < len(steps) else None
    if isinstance_exactly(after, types.FunctionType):
        return Holder("hook", f"{kind} {function_name(after)}", _code_place(after)), 1
    if isinstance_exactly(after, types.MethodType):
        return Holder("hook", f"{kind} {function_name(after.__func__)}", _code_place(after.__func__)), 1
    return Holder("hook", f"{kind} of type {type_name(after)}" if after is not None else f"dictionary of {kind}s"), 1


# ---- Python's


def _module(steps: list[Step], at: int) -> tuple[Holder, int]:
    module = steps[at][1]
    if at + 2 < len(steps) and isinstance_exactly(steps[at + 1][1], dict):
        return _global(steps, at + 1)[0], 2
    return Holder("module", f"module {_module_name(types.ModuleType.__getattribute__(module, '__dict__'))}"), 1


def _module_name(namespace: dict[str, Any]) -> str:
    name = dict.get(namespace, "__name__")
    return name if type(name) is str else "(without a name)"


def _is_namespace(thing: Any) -> bool:
    return type(thing) is dict and type(dict.get(thing, "__name__")) is str and "__builtins__" in thing


def _global(steps: list[Step], at: int) -> tuple[Holder, int]:
    namespace = steps[at][1]
    after = steps[at + 1][1] if at + 1 < len(steps) else None
    key = _key_of(namespace, after)
    filename = dict.get(namespace, "__file__")
    line = _source.global_line(filename, key) if type(filename) is str and type(key) is str else None
    where = _source.place(filename, line) if line else None
    name = f"{_module_name(namespace)}.{key}" if type(key) is str else _module_name(namespace)
    return Holder("module", f"module global {name}", where), 1


def _frame(steps: list[Step], at: int, threads: dict[int, str]) -> tuple[Holder | None, int]:
    from zbpipe import _C

    frame = steps[at][1]
    after = steps[at + 1][1] if at + 1 < len(steps) else None
    if after is frame.f_globals:
        return None, 1
    code = frame.f_code
    variable, taken = None, 1
    for name, value in _C.frame_variables(frame):
        if value is after:
            variable = name
            taken = 2 if type(value) is types.CellType else 1
            break
    line = frame.f_lineno or code.co_firstlineno
    bound = _source.assignment_line(code.co_filename, variable, code.co_firstlineno, line) if variable else None
    thread = threads.get(id(frame))
    what = f"variable {variable} of {_qualname(code)}()" if variable else f"a frame of {_qualname(code)}()"
    where = _source.place(code.co_filename, bound or line)
    if thread is not None:
        return Holder("thread", f"thread {thread}: {what}", where), taken
    return Holder("frame", what, where), taken


def _qualname(code: types.CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)


def _function(steps: list[Step], at: int) -> tuple[Holder | None, int]:
    function, edge = steps[at][1], steps[at][3]
    after = steps[at + 1][1] if at + 1 < len(steps) else None
    if after is function.__globals__:
        return None, 1
    where = _code_place(function)
    name = function_name(function)
    if after is function.__closure__ and at + 2 < len(steps):
        cell = steps[at + 2][1]
        for variable, candidate in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if candidate is cell:
                return Holder("cell", f"{_prefix(edge)}closure variable {variable} of {name}", where), 3
    if after is function.__defaults__ or after is function.__kwdefaults__:
        return Holder("function", f"{_prefix(edge)}default argument of {name}", where), 2
    return Holder("function", f"{_prefix(edge)}function {name}", where), 1


def _code_place(function: Any) -> str | None:
    code = getattr(function, "__code__", None) if type(function) is types.FunctionType else None
    return _code_place_of(code)


def _code_place_of(code: Any) -> str | None:
    return _source.place(code.co_filename, code.co_firstlineno) if type(code) is types.CodeType else None


def _code_of(thing: Any) -> Any:
    for name in ("gi_code", "cr_code", "ag_code"):
        if name in dir(type(thing)):
            return getattr(thing, name)
    return None


def _callable_name(thing: Any) -> str:
    return function_name(thing) if type(thing) is types.FunctionType else type_name(thing)


def _dict(steps: list[Step], at: int) -> tuple[Holder, int]:
    _, thing, _, edge = steps[at]
    if _is_namespace(thing):
        return _global(steps, at)
    after = steps[at + 1][1] if at + 1 < len(steps) else None
    key = _key_of(thing, after)
    kind = "dict" if type(thing) is dict else type_name(thing)
    return Holder("dict", f"{_prefix(edge)}{kind} item {_key_text(key)}"), 1


def _key_of(mapping: Any, value: Any) -> Any:
    """The key under which a dictionary holds a value, or the value itself if it is a key; by identity."""
    for key, held in dict.items(mapping):
        if held is value:
            return key
    return _NO_KEY


_NO_KEY = object()


def _key_text(key: Any) -> str:
    if type(key) in _KEYS:
        text = repr(key)
        return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return "(unknown)" if key is _NO_KEY else f"under a {type_name(key)}"


def _sequence(thing: Any, after: Any, edge: str | None) -> Holder:
    kind = type_name(thing)
    base = next(b for b in (list, tuple, collections.deque) if issubclass(type(thing), b))
    for index, item in enumerate(base.__iter__(thing)):
        if item is after:
            return Holder("list", f"{_prefix(edge)}{kind} item {index}")
    return Holder("list", f"{_prefix(edge)}{kind}")


def _instance(steps: list[Step], at: int, name: str, how: str) -> tuple[Holder, int]:
    """An object of any class, with the attribute that leads on, by way of its dictionary or not."""
    _, thing, _, edge = steps[at]
    after = steps[at + 1][1] if at + 1 < len(steps) else None
    taken = 1
    namespace = _namespace(thing)
    if namespace is not None and after is namespace and at + 2 < len(steps):
        after, taken = steps[at + 2][1], 2
    attribute = _attribute(thing, namespace, after)
    if attribute is None:
        return Holder("object", f"{_prefix(edge)}{name}", _class_place(thing)), 1
    where = _attribute_place(thing if how == "class attribute" else type(thing), attribute)
    return Holder("object", f"{_prefix(edge)}{how} {attribute} of {name.removeprefix('class ')}", where), taken


def _namespace(thing: Any) -> Any:
    if issubclass(type(thing), type):
        # The dictionary itself is behind a proxy; its items are what it holds.
        return None
    try:
        namespace = object.__getattribute__(thing, "__dict__")
    except Exception:
        return None
    return namespace if issubclass(type(namespace), dict) else None


def _attribute(thing: Any, namespace: Any, value: Any) -> str | None:
    if value is None:
        return None
    if namespace is None and issubclass(type(thing), type):
        namespace = dict(type.__getattribute__(thing, "__dict__"))
    if namespace is not None:
        key = _key_of(namespace, value)
        if type(key) is str:
            return key
    for name, member in _slots(type(thing)):
        try:
            if member.__get__(thing) is value:
                return name
        except AttributeError:
            continue
    return None


def _slots(kind: type) -> Iterator[tuple[str, Any]]:
    for base in type.__getattribute__(kind, "__mro__"):
        for name, member in dict(type.__getattribute__(base, "__dict__")).items():
            if type(member) is types.MemberDescriptorType:
                yield name, member


def _attribute_place(kind: type, attribute: str) -> str | None:
    for base in type.__getattribute__(kind, "__mro__"):
        module = sys.modules.get(type.__getattribute__(base, "__module__"))
        filename = getattr(module, "__file__", None) if type(module) is types.ModuleType else None
        if type(filename) is not str:
            continue
        line = _source.attribute_line(filename, type.__getattribute__(base, "__qualname__"), attribute)
        if line:
            return _source.place(filename, line)
    return None


def _class_place(thing: Any) -> str | None:
    kind = type(thing)
    for value in dict(type.__getattribute__(kind, "__dict__")).values():
        function = value.__func__ if type(value) in (staticmethod, classmethod) else value
        if type(function) is types.FunctionType:
            return _code_place(function)
    return None


def thread_names(frames: Iterable[tuple[int, Any]]) -> dict[int, str]:
    """Names of the threads but the main one, by the identities of the frames on their stacks."""
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found: dict[int, str] = {}
    for ident, frame in frames:
        name = None if ident == main else known.get(ident, str(ident))
        while frame is not None and name is not None:
            found[id(frame)] = name
            frame = frame.f_back
    return found
