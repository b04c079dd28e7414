"""The package's public names: each says what it takes, gives and raises, and what it comes from."""

import builtins
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest
import torch
from support.processes import python

import zbpipe
from zbpipe import _policy, leaks, memory  # its types have no public name

MODULES = (zbpipe, memory, leaks)
NAMES = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in MODULES
    for name in module.__all__
    if not inspect.ismodule(getattr(module, name))
}
NAMES["zbpipe.compile"] = zbpipe.compile  # which is not in __all__
FUNCTIONS = {name: thing for name, thing in NAMES.items() if inspect.isfunction(thing)}


def test_the_package_has_few_names():
    """What a star does not bring counts, too."""
    assert len({*zbpipe.__all__, "compile", "leaks"}) <= 20


@pytest.mark.parametrize("name", NAMES)
def test_it_is_documented(name):
    assert len(NAMES[name].__doc__.split()) > 5


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_takes_gives_and_raises(name):
    function = FUNCTIONS[name]
    said, signature = inspect.getdoc(function), inspect.signature(function)
    parameters = [parameter for parameter in signature.parameters if parameter not in ("function", "options")]
    assert [p for p in parameters if not re.search(rf"^    (\w+, )*{p}(, \w+)*:", said, re.MULTILINE)] == []
    assert ("Returns:" in said) == (signature.return_annotation not in (None, "None"))
    assert signature.return_annotation not in (inspect.Signature.empty,)


@pytest.mark.parametrize("name", [name for name, function in FUNCTIONS.items() if "Example::" in function.__doc__])
def test_the_example_of_a_function_runs(name):
    example = re.search(r"^Example::\n\n((?: {4}.*\n)+)", inspect.getdoc(FUNCTIONS[name]) + "\n", re.MULTILINE)[1]
    given = {"torch": torch, "zbpipe": zbpipe, "stage": torch.nn.Linear(4, 4), "x": torch.ones(2, 4)}
    exec(textwrap.dedent(example), {**given, "schedule": mock.Mock(), "send": mock.Mock()})


def test_the_table_of_the_docs_has_every_function_with_its_parameters():
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)\((.*?)\)` \|", page, re.MULTILINE))
    signatures = {name: inspect.signature(function).parameters.values() for name, function in FUNCTIONS.items()}
    assert rows == {
        name: ", ".join(f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name for p in parameters)
        for name, parameters in signatures.items()
    }


@pytest.mark.parametrize("function", [zbpipe.policy, zbpipe.set_policy])
def test_the_policys_keywords_are_its_choices(function):
    assert list(_policy.Choices.__annotations__) == list(inspect.signature(zbpipe.Policy).parameters)
    assert {"defer": get_args(_policy.Defer), "checkpoint": get_args(_policy.Checkpoint)} == _policy._WORDS

    def ask():
        with function(defers="all"):
            pass

    with pytest.raises(TypeError, match="'defers' is no choice of a policy"):
        ask()


def test_names_of_modules_are_no_functions():
    """A module that a function of the same name hides cannot be imported by its name, nor patched by mock."""
    hidden = [
        name
        for module in MODULES
        for name in dir(module)
        if f"{module.__name__}.{name}" in sys.modules and not inspect.ismodule(getattr(module, name))
    ]
    assert hidden == []


def test_nothing_is_imported_for_what_is_lazy():
    code = (
        "import sys, zbpipe\nassert 'zbpipe.leaks' not in sys.modules and 'leaks' in dir(zbpipe)\n"
        "assert not hasattr(zbpipe, 'leeks')\n"
        "from zbpipe.leaks import *\nassert zbpipe.leaks.Grown and 'pytest' not in sys.modules\n"
        "assert zbpipe.leaks.TensorLeaks.__module__ == 'zbpipe.leaks.pytest_plugin'\nprint('ok')"
    )
    done = python("-c", code)
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_returns_has_a_public_name(name):
    function, module = FUNCTIONS[name], sys.modules[name.rpartition(".")[0]]
    here = vars(sys.modules[function.__module__])
    words = re.findall(r"[A-Z]\w+", str(inspect.signature(function).return_annotation))
    ours = {word for word in words if str(getattr(here.get(word), "__module__", "")).startswith("zbpipe")}
    assert ours <= set(module.__all__)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_star_hides_no_name_of_pythons(module):
    assert set(module.__all__) & set(dir(builtins)) == set()
    assert callable(zbpipe.compile)
