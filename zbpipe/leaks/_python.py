"""Names and places of Python's objects, by their types alone: no repr, no equality, no property of them runs."""

from __future__ import annotations

import functools
import gc
import sys
import types
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
            return _source.place(code.co_filename, _source.definition_line(code.co_filename, code.co_firstlineno))
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
    return filename if isinstance(filename, str) else None


def is_of_a_library(module: str) -> bool:
    """Whether a module is the standard library's or an installed package's."""
    if module.partition(".")[0] in sys.stdlib_module_names and module != "__main__":
        return True
    filename = module_file(module_namespace(sys.modules.get(module)))
    return filename is not None and _source.library_path(filename) is not None


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
    """The dictionary of a class, or of an object by the descriptor that its class has for it; a property of that name
    is not run. None without one."""
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
        line = filename and _source.binding_line(filename, _QUALNAME.__get__(base), attribute)
        if filename and line:
            return _source.place(filename, line)
    return None
