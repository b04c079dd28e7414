"""Chains of holders in words: who holds what comes next, and how.

Each holder is told by its type, by what comes next and, if it is a part of something, by what came before it. Parts (a
dictionary of attributes, the tuple of a closure) have no words of their own.
"""

from __future__ import annotations

import collections
import datetime
import functools
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch

from zbpipe import _C
from zbpipe._torch.modules import REGISTERED
from zbpipe.leaks import _python
from zbpipe.leaks._heap import NOBODY
from zbpipe.leaks._python import NOTHING, callable_name, code_place, key_text, namespace_of, type_name
from zbpipe.leaks._results import CONTEXT_VARIABLE, Holder
from zbpipe.leaks._ways import LEFT_OUT, Ways

_SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_FINALIZED = vars(weakref.finalize)["_Info"]
_SEQUENCES = (list, tuple, collections.deque)

# What is told by itself: of which classes, as what kind, in which words.
_PLAIN: tuple[tuple[tuple[Any, ...], str, Any], ...] = (
    ((set, frozenset), "list", lambda thing: f"member of a {type_name(thing)}"),
    ((types.CellType,), "cell", lambda thing: "the cell of a closure"),
    ((types.MethodType,), "function", lambda thing: f"bound method {callable_name(thing)}"),
    ((types.FunctionType,), "function", lambda thing: f"function {callable_name(thing)}"),
    ((functools.partial,), "function", callable_name),
    ((weakref.ReferenceType,), "object", lambda thing: "the callback of a weak reference"),
    (_SUSPENDED, "frame", lambda thing: f"suspended {thing.__qualname__}()"),
    ((ContextVar,), "attribute", lambda thing: f"{CONTEXT_VARIABLE}{thing.name}"),
    ((type(datetime.datetime_CAPI),), "object", lambda thing: "a DLPack capsule on its memory"),
)


class Words:
    """Puts the ways of one search into words."""

    def __init__(self, ways: Ways) -> None:
        self._ways, self._heap = ways, ways.heap
        self._links: dict[int, Holder | None] = {}  # by the places of what is held
        self._made: dict[tuple[Any, ...], Holder] = {}  # one for all that are equal
        # By the identities of containers and of what they hold: keys, or places in a sequence.
        self._places: dict[int, dict[int, Any]] = {}
        self._labels: dict[int, dict[int, str]] = {}  # by the places of holders
        self._of_modules: dict[int, bool] = {}

    def told(self, path: Sequence[int], first: int = 0, end: int | None = None) -> list[tuple[int, Holder]]:
        """The holders on a way, each with its place, from index ``first`` to before ``end``."""
        found: list[tuple[int, Holder]] = []
        parents, links = self._heap.parents, self._links
        for at in range(len(path))[first:end]:
            place, after = path[at], path[at + 1] if at + 1 < len(path) else LEFT_OUT
            if place == LEFT_OUT:
                count = self._ways.depth(after) - self._ways.depth(path[at - 1]) - 1
                holder: Holder | None = self.holder("more", f"... {count} more ...")
            elif after == LEFT_OUT or parents[after] != place:
                holder = self._described(path, at, after)
            else:
                if after not in links:
                    links[after] = self._described(path, at, after)
                holder = links[after]
            if holder is not None:
                found.append((place, holder))
        return found

    def holder(self, kind: str, text: str, where: str | None = None, size: int = 0, is_library: bool = False) -> Holder:
        """The same object for all that are equal. If it has a place, that tells whether it is a library's."""
        is_library = _python.is_library(where) if where is not None else is_library or kind == "function"
        key = kind, text, where, size, is_library
        holder = self._made.get(key)
        if holder is None:
            if not text.isascii():  # names may hold what no encoding has
                text = text.encode("utf-8", "backslashreplace").decode()
            holder = self._made[key] = Holder(kind, text, where, size, is_library)
        return holder

    def _described(self, path: Sequence[int], at: int, after: int) -> Holder | None:
        """None of what has no words of its own."""
        one = self._who_holds(path, at)
        two = self._who_holds(path, at - 1) if at and path[at - 1] == one else NOBODY
        try:
            return self._describe(two, one, path[at], after)
        except Exception:  # an object that is odd beyond what is foreseen here
            return self.holder("unknown", "an object that does not let itself be described")

    def _who_holds(self, path: Sequence[int], at: int) -> int:
        if at == 0:
            return NOBODY
        return path[at - 1] if path[at - 1] != LEFT_OUT else self._heap.parents[path[at]]

    def _describe(self, two: int, one: int, place: int, after: int) -> Holder | None:
        things = self._heap.things
        above, by, thing, held = (things[at] if at >= 0 else None for at in (two, one, place, after))
        held = held.object if type(held) is _C.Handle else held
        edge = self._edge(one, place)
        if type(thing) is _C.Handle:
            return self._native(thing, edge)
        if " hooks" in edge:
            kind = edge.rstrip("0123456789: ").removesuffix("s")
            text = f"the {kind}s" if held is None else f"{kind} {callable_name(held)}"
            return self.holder("hook", text, code_place(held))
        if type(by) is types.FunctionType and any(thing is part for part in _parts_of(by)):
            return self._of_function(by, thing, held, self._edge(two, one))
        if type(thing) is types.CellType and (
            type(by) is types.FrameType or (type(above) is types.FunctionType and by is above.__closure__)
        ):
            return None
        if issubclass(type(thing), dict):
            return self._of_dict(thing, held, by, above, edge, self._edge(two, one))
        return self._of_python(thing, held, edge)

    def _edge(self, one: int, place: int) -> str:
        """How one place holds another, where C++ knows, as the beginning of a text."""
        if one not in self._labels:
            self._labels[one] = self._heap.labels(one) if one >= 0 else {}
        label = self._labels[one].get(id(self._heap.things[place]))
        return f"{label}: " if label else ""

    def _native(self, thing: _C.Handle, edge: str) -> Holder:
        if thing.kind == "storage":
            return self.holder("tensor", f"{edge}a storage that Python holds")
        cls = type(thing.object)
        if thing.kind == "node":
            name, where = thing.name.rpartition("::")[2], None
            if issubclass(cls, torch.autograd.function.BackwardCFunction):
                forward = inspect.getattr_static(inspect.getattr_static(cls, "_forward_cls", None), "forward", None)
                where = code_place(forward.__func__ if type(forward) is staticmethod else forward)
            return self.holder("accumulator" if name == "AccumulateGrad" else "node", f"{edge}{name}", where)
        name = "Tensor" if thing.object is None or cls is torch.Tensor else type_name(thing.object).rpartition(".")[2]
        text = f"{name} {thing.name}".rstrip()
        if edge.startswith("saved_"):
            return self.holder("saved", f"{edge[len('saved_') : -2]}, saved: {text}")
        return self.holder("saved" if edge.startswith("saved tensor") else "tensor", f"{edge}{text}")

    def _of_python(self, thing: Any, held: Any, edge: str) -> Holder | None:
        cls = type(thing)
        if issubclass(cls, types.ModuleType):
            namespace = _python.module_namespace(thing)
            name = _python.module_name(namespace)
            of_library = _python.is_of_a_library(name)
            return None if held is namespace else self.holder("module", f"module {name}", is_library=of_library)
        if cls is types.FrameType:
            return self._of_frame(thing, held)
        if cls is types.FunctionType and any(held is part for part in (thing.__globals__, *_parts_of(thing))):
            return None
        if issubclass(cls, _SEQUENCES):
            index = self._key(thing, held)
            return self.holder("list", f"{edge}{type_name(thing)}{'' if index is NOTHING else f' item {index}'}")
        for classes, kind, words in _PLAIN:
            if issubclass(cls, classes):
                return self.holder(kind, f"{edge}{words(thing)}", code_place(thing))
        if cls is types.TracebackType:
            code = thing.tb_frame.f_code
            text = f"{edge}the traceback of an exception, in {_python.code_name(code)}()"
            return self.holder("traceback", text, _python.place(code.co_filename, thing.tb_lineno))
        if cls is _C.ParamGroup:
            return self.holder("group", f"{edge}parameter group of zbpipe", size=thing.bytes_held)
        if self._heap.array is not None and issubclass(cls, self._heap.array):
            name = type_name(thing)
            what = "numpy array" if name == "numpy.ndarray" else f"{name} (a numpy array)"
            has_objects = self._heap.array.dtype.__get__(thing).hasobject
            return self.holder("object", edge + (f"an item of a {what}" if has_objects else f"a {what} on its memory"))
        if self._heap.work is not None and issubclass(cls, self._heap.work):
            return self.holder("work", f"{edge}a {type_name(thing)}")
        if _python.module_of_class(cls) == "builtins" and _python.class_name(cls).startswith("hamt"):  # a context's map
            return self._of_context(thing, held)
        namespace = namespace_of(thing)
        return None if held is namespace is not None else self._attribute(thing, namespace, held, edge)

    def _of_context(self, node: Any, held: Any) -> Holder | None:
        """A node of the map visits each value before its variable."""
        met = gc.get_referents(node)
        variables = (one for value, one in pairwise(met) if value is held and type(one) is ContextVar)
        variable = next(variables, None)
        return None if variable is None else self.holder("attribute", f"{CONTEXT_VARIABLE}{variable.name}")

    def _of_frame(self, frame: types.FrameType, held: Any) -> Holder | None:
        if held is frame.f_globals:
            return None
        code = frame.f_code
        line = frame.f_lineno or code.co_firstlineno
        text = f"a call of {_python.code_name(code)}()"
        bound = None
        for name, value in _C.frame_variables(frame):
            if value is held:
                text = f"variable {name} of {_python.code_name(code)}()"
                last = max((number for _, _, number in code.co_lines() if number is not None), default=line)
                bound = _python.assignment_line(code.co_filename, name, code.co_firstlineno, line, last)
        where = _python.place(code.co_filename, bound or line)
        thread = self._heap.threads.get(id(frame))
        kind, text = ("frame", text) if thread is None else ("thread", f"thread {thread}: {text}")
        return self.holder(kind, text, where)

    def _of_function(self, function: types.FunctionType, part: Any, held: Any, edge: str) -> Holder:
        name, where = callable_name(function), code_place(function)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if cell is held:
                return self.holder("cell", f"{edge}closure variable {variable} of {name}", where)
        kind = "function" if part is function.__closure__ else "default argument of"
        return self.holder("function", f"{edge}{kind} {name}", where)

    def _of_dict(self, thing: Any, held: Any, by: Any, above: Any, edge: str, of_owner: str) -> Holder | None:
        key = self._key(thing, held)
        if type(by) is _C.Handle and not edge:
            owner = "the tensor" if by.kind == "tensor" else "its context"
            return self.holder("attribute", f"attribute {key_text(key)} of {owner}")
        if _python.module_namespace(by) is thing or (type(thing) is dict and self._is_of_a_module(thing)):
            return self._global(thing, key)
        namespace = namespace_of(by)
        if namespace is thing:
            return self._attribute(by, thing, held, of_owner)
        is_part = by is not None and namespace_of(above) is by
        owner, namespace = (above, by) if is_part else (by, namespace)
        registry = self._registry(owner, namespace, thing)
        if registry is not None and type(key) is str:
            return self._attribute_of(owner, REGISTERED[registry], key, of_owner)
        return self.holder("dict", f"{edge}{type_name(thing)} item {key_text(key, quoted=True)}")

    def _global(self, namespace: dict[str, Any], key: Any) -> Holder:
        module, filename = _python.module_name(namespace), _python.module_file(namespace)
        of_library = _python.is_of_a_library(module)
        if type(key) is not str:
            return self.holder("module", f"the globals of module {module}", is_library=of_library)
        where = _python.binding_place(filename, "", key)
        return self.holder("module", f"module global {module}.{key}", where, is_library=of_library)

    def _attribute(self, owner: Any, namespace: Any, held: Any, edge: str) -> Holder | None:
        if self._registry(owner, namespace, held) is not None:
            return None
        name, of_slot = NOTHING if namespace is None else self._key(namespace, held), None
        is_class = issubclass(type(owner), type)
        if type(name) is not str:
            name, of_slot = _python.slot_of(owner, held)
        if name is None:
            what = f"class {_python.class_name(owner)}" if is_class else f"a {type_name(owner)}"
            return self.holder("object", f"{edge}{what}")
        return self._attribute_of(owner, "class attribute" if is_class else "attribute", name, edge, of_slot)

    def _attribute_of(self, owner: Any, kind: str, name: str, edge: str, of_slot: Any = None) -> Holder:
        cls = owner if issubclass(type(owner), type) else type(owner)
        if cls is _FINALIZED and (called_at := code_place(owner.func)):
            text = f"arguments of weakref.finalize's callback {callable_name(owner.func)}"
            return self.holder("attribute", text, called_at)
        where = _python.attribute_place(cls, name)
        text = f"{edge}{kind} {name} of {_python.class_name(cls)}"
        module = _python.module_of_class(cls)
        of_library = of_slot is not None and _python.is_of_a_library(_python.module_of_class(of_slot))
        if where is None and (of_library or module == "builtins"):
            return self.holder("object", text)  # _objects of a ctypes array, fget of a property: nobody's place
        is_library = _python.is_of_a_library(module)
        if where is None and is_library and module.partition(".")[0] not in sys.stdlib_module_names:
            set_at = _python.set_by_the_program(name)
            return self.holder("attribute", text, set_at[0] if len(set_at) == 1 else None, 0, not set_at)
        return self.holder("attribute", text, where, is_library=is_library)

    def _registry(self, owner: Any, namespace: Any, held: Any) -> str | None:
        """Under which name a module has a dictionary of its parameters, buffers or modules, if it is one."""
        if namespace is None or not issubclass(type(owner), torch.nn.Module) or not issubclass(type(held), dict):
            return None
        name = self._key(namespace, held)
        return name if type(name) is str and name in REGISTERED else None

    def _key(self, container: Any, value: Any) -> Any:
        """The key, or the place, under which a dictionary or a sequence holds a value; NOTHING if it does not."""
        if id(container) not in self._places:
            base = next((base for base in _SEQUENCES if issubclass(type(container), base)), None)
            items = dict.items(container) if base is None else enumerate(base.__iter__(container))
            self._places[id(container)] = {id(held): key for key, held in items}
        return NOTHING if value is None else self._places[id(container)].get(id(value), NOTHING)

    def _is_of_a_module(self, mapping: dict[Any, Any]) -> bool:
        """Without a look-up, which may compare the name with odd keys."""
        if id(mapping) not in self._of_modules:
            names = {key for key in mapping if type(key) is str and key in ("__name__", "__builtins__")}
            self._of_modules[id(mapping)] = len(names) == 2
        return self._of_modules[id(mapping)]


def _parts_of(function: types.FunctionType) -> list[Any]:
    """What only a function has."""
    parts = function.__closure__, function.__defaults__, function.__kwdefaults__
    return [part for part in parts if part is not None]
