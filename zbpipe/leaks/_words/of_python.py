"""Names and places of Python's objects."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

from zbpipe.leaks import _source

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
NOTHING = object()


def type_name(thing: Any) -> str:
    """The class of an object, with its module unless it is built in or the script's own."""
    return class_name(type(thing))


def class_name(cls: type) -> str:
    module = _MODULE.__get__(cls)
    name: str = _QUALNAME.__get__(cls)
    return name if type(module) is not str or module in ("builtins", "__main__") else f"{module}.{name}"


def callable_name(thing: Any) -> str:
    if type(thing) is types.MethodType:
        return callable_name(thing.__func__)
    if type(thing) is functools.partial:
        return f"partial of {callable_name(thing.func)}"
    if type(thing) is types.FunctionType:
        module = thing.__module__
        return (
            thing.__qualname__ if type(module) is not str or module == "__main__" else f"{module}.{thing.__qualname__}"
        )
    return f"a {type_name(thing)}"


def code_place(thing: Any) -> str | None:
    """``file:line`` of a function, method, partial, generator or coroutine; None for what has no code of its own."""
    if type(thing) is types.MethodType:
        return code_place(thing.__func__)
    if type(thing) is functools.partial:
        return code_place(thing.func)
    name = next((name for cls, name in _CODE if type(thing) is cls), None)
    if name is None:
        return None
    code = getattr(thing, name)
    return _source.place(code.co_filename, _source.definition_line(code.co_filename, code.co_firstlineno))


def module_of_class(cls: type) -> str:
    module = _MODULE.__get__(cls)
    return module if type(module) is str else ""


def is_of_a_library(module: str) -> bool:
    """Whether a module is the standard library's or an installed package's."""
    if module.partition(".")[0] in sys.stdlib_module_names and module != "__main__":
        return True
    found = sys.modules.get(module)
    if not issubclass(type(found), types.ModuleType):
        return False
    filename = dict.get(types.ModuleType.__getattribute__(found, "__dict__"), "__file__")
    return type(filename) is str and _source.library_path(filename) is not None


def array_type() -> Any:
    """numpy.ndarray, if the program has imported it."""
    numpy = sys.modules.get("numpy")
    if not issubclass(type(numpy), types.ModuleType):
        return None
    return dict.get(types.ModuleType.__getattribute__(numpy, "__dict__"), "ndarray")


def said(edge: str | None) -> str:
    return f"{edge}: " if edge else ""


def qualname(code: types.CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)


def module_name(namespace: dict[str, Any]) -> str:
    name = dict.get(namespace, "__name__")
    return name if type(name) is str else "(without a name)"


def key_text(key: Any, quoted: bool = False) -> str:
    if key is NOTHING:
        return "as a key"
    if not any(type(key) is plain for plain in _PLAIN_KEYS):
        return f"at key {type_name(key)}"
    text = repr(key) if quoted or type(key) is not str else key
    return text if len(text) <= _LONGEST_KEY else text[: _LONGEST_KEY - 3] + "..."


def namespace_of(thing: Any) -> Any:
    """The dictionary of an object's attributes, by the descriptor that its class has for it; a property of that name
    is not run."""
    for base in _MRO.__get__(type(thing)):
        descriptor = dict.get(namespace_of_class(base), "__dict__")
        if type(descriptor) is types.GetSetDescriptorType:
            namespace = descriptor.__get__(thing)
            return namespace if issubclass(type(namespace), dict) else None
    return None


def namespace_of_class(cls: type) -> Any:
    """The dictionary itself, which is behind a proxy."""
    namespace = gc.get_referents(_DICT.__get__(cls))[0]
    return namespace if issubclass(type(namespace), dict) else None


def found_in_class(cls: type, name: str) -> Any:
    """What a class or one of its bases has under a name, as it is in their dictionaries; None if nothing."""
    for base in _MRO.__get__(cls):
        namespace = namespace_of_class(base)
        if namespace is not None and (found := dict.get(namespace, name)) is not None:
            return found
    return None


def slot_of(thing: Any, value: Any) -> tuple[str | None, type]:
    """The slot, or member in C, with that value, and the class that has it; None and the object's class if none."""
    for name, member, base in _slots(type(thing)):
        try:
            if value is not None and member.__get__(thing) is value:
                return name, base
        except AttributeError:  # not set
            continue
    return None, type(thing)


def _slots(cls: type) -> Iterator[tuple[str, Any, type]]:
    for base in _MRO.__get__(cls):
        for name, member in dict(_DICT.__get__(base)).items():
            if type(member) is types.MemberDescriptorType:
                yield name, member, base


def attribute_place(cls: type, attribute: str) -> str | None:
    for base in _MRO.__get__(cls):
        module = sys.modules.get(_MODULE.__get__(base))
        is_module = issubclass(type(module), types.ModuleType)
        filename = dict.get(types.ModuleType.__getattribute__(module, "__dict__"), "__file__") if is_module else None
        if not isinstance(filename, str):
            continue
        line = _source.attribute_line(filename, _QUALNAME.__get__(base), attribute)
        if line is not None:
            return _source.place(filename, line)
    return None
