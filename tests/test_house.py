"""How the tests' own modules find each other: what several share is in support/, which pyproject.toml's `pythonpath` shows."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MODULES = sorted(TESTS.rglob("*.py"))
# Python must meet the sitecustomize of torch_2_11/ before any other: conftest.py says for what.
CHANGES_SYS_PATH = ["conftest.py"]


def imported(text):
    """The names, with all their parts, of what a text imports, also within functions and by import_module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def imports_of_tests(text):
    tests = {path.stem for path in MODULES if path.name.startswith("test_")} | {"conftest"}
    return [name for name in imported(text) if tests & set(name.split("."))]


def is_sys_path(node):
    if isinstance(node, ast.Subscript):
        return is_sys_path(node.value)
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path"


def changes_of_sys_path(text):
    """Lines of a text that put something on sys.path, or take it off."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            method = isinstance(node.func, ast.Attribute) and is_sys_path(node.func.value) and node.func.attr != "copy"
            changed = method or ast.unparse(node.func) == "site.addsitedir"
        elif isinstance(node, (ast.Assign, ast.Delete)):
            changed = any(map(is_sys_path, node.targets))
        else:
            changed = isinstance(node, (ast.AugAssign, ast.AnnAssign)) and is_sys_path(node.target)
        if changed:
            yield node.lineno


def test_no_module_imports_a_test_module():
    assert len(MODULES) > 100
    found = {path.relative_to(TESTS).as_posix(): imports_of_tests(path.read_text()) for path in MODULES}
    assert {path: names for path, names in found.items() if names} == {}


def test_one_module_alone_changes_sys_path():
    found = {path.relative_to(TESTS).as_posix(): list(changes_of_sys_path(path.read_text())) for path in MODULES}
    assert [path for path, lines in found.items() if lines] == CHANGES_SYS_PATH
    assert len(found["conftest.py"]) == 1


def test_the_shared_package_holds_no_test():
    shared = [path for path in MODULES if path.is_relative_to(TESTS / "support")]
    assert shared
    assert not [path for path in shared if "\ndef test_" in path.read_text() or path.name.startswith("test_")]


@pytest.mark.parametrize(
    "line",
    [
        "from test_house import imported",
        "def f():\n    import tests.test_house",
        "from . import test_house",
        "import importlib\nimportlib.import_module('test_house')",
    ],
)
def test_an_import_of_a_test_module_is_found(line):
    assert imports_of_tests(line)


@pytest.mark.parametrize(
    "line",
    [
        "sys.path.insert(0, here)",
        "sys.path[:0] = [here]",
        "sys.path += [here]",
        "sys.path = [here]",
        "sys.path.append(here)",
        "site.addsitedir(here)",
    ],
)
def test_a_change_of_sys_path_is_found(line):
    assert list(changes_of_sys_path(line)) == [1]
    assert not list(changes_of_sys_path("environment = os.pathsep.join(filter(None, [*sys.path]))"))
