"""The chains of one search, as holders."""

from __future__ import annotations

import collections
import datetime
import functools
import threading
import types
import weakref
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from zbpipe import _C
from zbpipe._torch.modules import REGISTERED
from zbpipe.leaks import _source
from zbpipe.leaks._results import Holder
from zbpipe.leaks._words.of_python import (
    NOTHING,
    array_type,
    attribute_place,
    callable_name,
    class_name,
    code_place,
    is_of_a_library,
    key_text,
    module_name,
    module_of_class,
    namespace_of,
    namespace_of_class,
    qualname,
    said,
    slot_of,
    type_name,
)
from zbpipe.leaks._words.of_torch import hook, is_work, node, tensor


class Step(NamedTuple):
    """``kind`` is "python", "group", a handle's, or "more" for the left out middle of a chain (``name``: how many
    steps). ``thing`` is its Python object or None, ``name`` says what a handle's is. ``edge`` says how the step before
    holds it, where C++ knows."""

    kind: str
    thing: Any
    name: str
    edge: str | None


_ALONE = ("node", "tensor", "storage")  # kinds that are described by their class, name and edge, whatever is around
_Ordered = collections.OrderedDict
_Capsule = type(datetime.datetime_CAPI)
_SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


class Words:
    """Puts the chains of one search into words.

    What it looks up in a container it keeps for the next chain through it, by identities, and the container with it.
    """

    def __init__(self, threads: dict[int, str]) -> None:
        self._threads = threads
        self._places: dict[int, tuple[Any, dict[int, Any]]] = {}
        self._of_modules: dict[int, tuple[Any, bool]] = {}
        self._told: dict[Any, tuple[Any, Holder | None, int]] = {}
        self._alike: dict[Holder, Holder] = {}  # one for all that are equal
        self._sized: dict[tuple[int, int], tuple[Holder, Holder]] = {}

    def holders(self, steps: list[Step]) -> list[Holder]:
        """The steps as holders; some that only make sense together are one."""
        return [holder for _, holder in self.placed_holders(steps)]

    def placed_holders(self, steps: list[Step]) -> list[tuple[int, Holder]]:
        """Likewise, each with the place of its first step."""
        found, at = [], 0
        while at < len(steps):
            kind, thing, name, edge = steps[at]
            if kind in _ALONE:
                around: Any = type(thing)
                key: Any = kind, name, edge, id(around)
            else:
                begin = at - 1 if at and issubclass(type(thing), dict) else at
                around = steps[begin : at + _looks_ahead(thing)]
                key = begin == at, *map(id, around)
            if key not in self._told:
                self._told[key] = around, *self._describe_whole(steps, at)
            _, holder, taken = self._told[key]
            if holder is not None:
                found.append((at, holder))
            at += taken
        return found

    def _describe_whole(self, steps: list[Step], at: int) -> tuple[Holder | None, int]:
        try:
            holder, taken = self._describe(steps, at)
            if holder is not None and _is_librarys(steps[at][1], holder):
                holder = replace(holder, is_library=True)
        except Exception:  # an object that is odd beyond what is foreseen here
            holder, taken = Holder("unknown", "an object that does not let itself be described"), 1
        if holder is None:
            return None, taken
        return self._one_for_all(_printable(holder)), taken

    def _one_for_all(self, holder: Holder) -> Holder:
        """The same object for all holders that are equal."""
        return self._alike.setdefault(holder, holder)

    def sized(self, holder: Holder, size: int) -> Holder:
        """With a size in bytes, likewise."""
        known = self._sized.get((id(holder), size))
        if known is None:  # the first of the two is kept for its identity
            known = self._sized[id(holder), size] = holder, self._one_for_all(replace(holder, bytes=size))
        return known[1]

    def _describe(self, steps: list[Step], at: int) -> tuple[Holder | None, int]:
        """The holder at a step, if it is worth a word, and how many steps it takes up."""
        kind, thing, name, edge = steps[at]
        if kind == "more":
            return Holder("more", f"... {name} more ..."), 1
        if kind == "tensor":
            return tensor(thing, name, edge), 1
        if kind == "node":
            return node(thing, name, edge), 1
        if kind == "storage":
            return Holder("tensor", f"{said(edge)}a storage that Python holds"), 1
        if kind == "group":
            size = thing.bytes_held
            return Holder("group", f"{said(edge)}parameter group of zbpipe", None, size if type(size) is int else 0), 1
        return self._describe_python(steps, at)

    def _describe_python(self, steps: list[Step], at: int) -> tuple[Holder | None, int]:
        _, thing, _, edge = steps[at]
        after = _object_at(steps, at + 1)
        cls = type(thing)
        if edge is not None and " hooks" in edge:
            return hook(after, edge), 1
        if issubclass(cls, types.ModuleType):
            return self._module(steps, at)
        if cls is types.FrameType:
            return self._frame(thing, after)
        if cls is types.FunctionType:
            return self._function(steps, at)
        if issubclass(cls, dict):
            return self._dict(steps, at), 1
        if issubclass(cls, (list, tuple, collections.deque)):
            return Holder("list", f"{said(edge)}{type_name(thing)}{self._item(thing, after)}"), 1
        if issubclass(cls, (set, frozenset)):
            return Holder("list", f"{said(edge)}member of a {type_name(thing)}"), 1
        if cls is types.CellType:
            return Holder("cell", f"{said(edge)}the cell of a closure"), 1
        if cls is types.MethodType:
            return Holder("function", f"{said(edge)}bound method {callable_name(thing)}", code_place(thing)), 1
        if cls is functools.partial:
            return Holder("function", f"{said(edge)}{callable_name(thing)}", code_place(thing)), 1
        if issubclass(cls, weakref.ReferenceType):
            return Holder("object", f"{said(edge)}the callback of a weak reference"), 1
        if any(cls is suspended for suspended in _SUSPENDED):  # not "in": a metaclass may have an __eq__
            return Holder("frame", f"{said(edge)}suspended {thing.__qualname__}()", code_place(thing)), 1
        if cls is types.TracebackType:
            code = thing.tb_frame.f_code
            where = _source.place(code.co_filename, thing.tb_lineno)
            return Holder("traceback", f"{said(edge)}the traceback of an exception, in {qualname(code)}()", where), 1
        array = array_type()
        if array is not None and issubclass(cls, array):
            return Holder("object", f"{said(edge)}{_of_array(thing, array)}"), 1
        if cls is ContextVar:
            return Holder("attribute", f"context variable {thing.name}"), 1
        if cls is _Capsule:
            return Holder("object", f"{said(edge)}a DLPack capsule on its memory"), 1
        if is_work(cls):
            return Holder("work", f"{said(edge)}a {type_name(thing)}"), 1
        return self._instance(steps, at)

    # ---- namespaces

    def _module(self, steps: list[Step], at: int) -> tuple[Holder, int]:
        namespace = types.ModuleType.__getattribute__(steps[at][1], "__dict__")
        if _object_at(steps, at + 1) is namespace:
            return self._global(namespace, _object_at(steps, at + 2)), 2
        return Holder("module", f"module {module_name(namespace)}"), 1

    def _global(self, namespace: dict[str, Any], value: Any) -> Holder:
        key = self._key(namespace, value)
        if type(key) is not str:
            return Holder("module", f"the globals of module {module_name(namespace)}")
        filename = dict.get(namespace, "__file__")
        where = None
        if isinstance(filename, str):
            line = _source.global_line(filename, key)
            where = _source.place(filename, line) if line else None
        return Holder("module", f"module global {module_name(namespace)}.{key}", where)

    def _frame(self, frame: types.FrameType, after: Any) -> tuple[Holder | None, int]:
        if after is frame.f_globals:
            return None, 1
        code = frame.f_code
        line = frame.f_lineno or code.co_firstlineno
        variable, taken = None, 1
        for name, value in _C.frame_variables(frame):
            if value is after:
                variable, taken = name, 2 if type(value) is types.CellType else 1
        bound = None
        if variable is not None:
            last = max((number for _, _, number in code.co_lines() if number is not None), default=line)
            bound = _source.assignment_line(code.co_filename, variable, code.co_firstlineno, line, last)
        where = _source.place(code.co_filename, bound or line)
        text = f"variable {variable} of {qualname(code)}()" if variable else f"a call of {qualname(code)}()"
        thread = self._threads.get(id(frame))
        if thread is not None:
            return Holder("thread", f"thread {thread}: {text}", where), taken
        return Holder("frame", text, where), taken

    def _function(self, steps: list[Step], at: int) -> tuple[Holder | None, int]:
        _, function, _, edge = steps[at]
        after = _object_at(steps, at + 1)
        if after is function.__globals__:
            return None, 1
        name, where = callable_name(function), code_place(function)
        cell = _object_at(steps, at + 2)
        if after is not None and after is function.__closure__:
            for variable, candidate in zip(function.__code__.co_freevars, function.__closure__, strict=False):
                if candidate is cell:
                    return Holder("cell", f"{said(edge)}closure variable {variable} of {name}", where), 3
        if after is not None and (after is function.__defaults__ or after is function.__kwdefaults__):
            return Holder("function", f"{said(edge)}default argument of {name}", where), 2
        return Holder("function", f"{said(edge)}function {name}", where), 1

    def _dict(self, steps: list[Step], at: int) -> Holder:
        _, thing, _, edge = steps[at]
        after = _object_at(steps, at + 1)
        before = steps[at - 1][0] if at else ""
        if before in ("tensor", "node") and edge is None:
            owner = "the tensor" if before == "tensor" else "its context"
            return Holder("attribute", f"attribute {key_text(self._key(thing, after))} of {owner}")
        if type(thing) is dict and self._is_of_a_module(thing):
            return self._global(thing, after)
        return Holder("dict", f"{said(edge)}{type_name(thing)} item {key_text(self._key(thing, after), quoted=True)}")

    def _instance(self, steps: list[Step], at: int) -> tuple[Holder, int]:
        """A class or an object of any other, with the attribute that leads on, by way of its dictionary or not."""
        _, thing, _, edge = steps[at]
        after, taken = _object_at(steps, at + 1), 1
        is_class = issubclass(type(thing), type)
        namespace = namespace_of_class(thing) if is_class else namespace_of(thing)
        if namespace is not None and after is namespace:
            after, taken = _object_at(steps, at + 2), 2
        name = class_name(thing) if is_class else type_name(thing)
        attribute = self._key(namespace, after) if namespace is not None else NOTHING
        is_librarys = False
        if type(attribute) is not str:
            attribute, owner = slot_of(thing, after)
            is_librarys = is_of_a_library(module_of_class(owner))
        if attribute is None:
            return Holder("object", f"{said(edge)}{'class' if is_class else 'a'} {name}"), 1
        kind = "class attribute" if is_class else "attribute"
        if (
            attribute in REGISTERED
            and issubclass(type(thing), torch.nn.Module)
            and (type(after) is dict or type(after) is _Ordered)
        ):
            key = self._key(after, _object_at(steps, at + taken + 1))
            if type(key) is str:
                kind, attribute, taken = REGISTERED[attribute], key, taken + 1
        cls = thing if is_class else type(thing)
        where = attribute_place(cls, attribute)
        if where is None and (is_librarys or module_of_class(cls) == "builtins"):
            # _objects of a ctypes array, fget of a property: nobody's place
            return Holder("object", f"{said(edge)}{kind} {attribute} of {name}"), taken
        return Holder("attribute", f"{said(edge)}{kind} {attribute} of {name}", where), taken

    # ---- places in containers, by identity

    def _key(self, mapping: Any, value: Any) -> Any:
        """The key under which a dictionary holds a value; NOTHING if it does not."""
        if value is None:
            return NOTHING
        if id(mapping) not in self._places:
            self._places[id(mapping)] = mapping, {id(held): key for key, held in dict.items(mapping)}
        return self._places[id(mapping)][1].get(id(value), NOTHING)

    def _is_of_a_module(self, mapping: dict[Any, Any]) -> bool:
        """Without a look-up, which may compare the name with odd keys."""
        if id(mapping) not in self._of_modules:
            names = {key for key in mapping if type(key) is str and key in ("__name__", "__builtins__")}
            self._of_modules[id(mapping)] = mapping, len(names) == 2
        return self._of_modules[id(mapping)][1]

    def _item(self, sequence: Any, value: Any) -> str:
        if id(sequence) not in self._places:
            base = next(b for b in (list, tuple, collections.deque) if issubclass(type(sequence), b))
            places = {id(item): index for index, item in enumerate(base.__iter__(sequence))}
            self._places[id(sequence)] = sequence, places
        index = self._places[id(sequence)][1].get(id(value)) if value is not None else None
        return "" if index is None else f" item {index}"


def _looks_ahead(thing: Any) -> int:
    """How many steps, with its own, decide on the words for a holder; for a dictionary the one before does, too."""
    cls = type(thing)
    return 2 if cls is list or cls is tuple else 4 if issubclass(cls, torch.nn.Module) else 3


def _of_array(thing: Any, array: Any) -> str:
    name = type_name(thing)
    what = "numpy array" if name == "numpy.ndarray" else f"{name} (a numpy array)"
    holds_objects = array.dtype.__get__(thing).hasobject
    return f"an item of a {what}" if holds_objects else f"a {what} on its memory"


def _is_librarys(thing: Any, holder: Holder) -> bool:
    if holder.where is not None:
        return _source.is_library(holder.where)
    if holder.kind == "function":  # in C, or a partial of one
        return True
    if holder.kind == "module":
        return issubclass(type(thing), types.ModuleType) and is_of_a_library(
            module_name(types.ModuleType.__getattribute__(thing, "__dict__"))
        )
    if holder.kind == "attribute" and thing is not None:
        return is_of_a_library(module_of_class(thing if issubclass(type(thing), type) else type(thing)))
    return False


def _printable(holder: Holder) -> Holder:
    """Names may hold what no encoding has."""
    if holder.text.isascii():
        return holder
    return replace(holder, text=holder.text.encode("utf-8", "backslashreplace").decode())


def thread_names(frames: Iterable[tuple[int, Any]]) -> dict[int, str]:
    """Names of the threads but the main one, by the identities of the frames on their stacks."""
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found: dict[int, str] = {}
    for ident, frame in frames:
        at = frame if ident != main else None
        while at is not None:
            found[id(at)] = known.get(ident, str(ident))
            at = at.f_back
    return found


def _object_at(steps: list[Step], at: int) -> Any:
    return steps[at][1] if at < len(steps) else None
