"""core <- shim <- bindings, one direction; greps what each file of csrc/ includes."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+["<]([^">]+)[">]', re.MULTILINE)
TORCH = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/")
PYTHON = ("Python.h", "structmember.h", "frameobject.h", "cpython/", "internal/")

# What a file of each layer may take from the others' folders.
MAY_USE = {"core": {"core"}, "shim": {"core", "shim"}, "bindings": {"core", "shim", "bindings"}}


def violations(layer, includes):
    """Yield each include that a file of `layer` must not have."""
    for include in includes:
        is_torch, is_python = include.startswith(TORCH), include.startswith(PYTHON)
        folder = include.split("/")[0]
        if (
            (is_torch and layer != "shim")
            or (is_python and layer == "core")
            or (folder in MAY_USE and folder not in MAY_USE[layer])
            or ".." in include
        ):
            yield include


def files(layer):
    return sorted(path for path in (CSRC / layer).rglob("*") if path.suffix in (".c", ".h", ".cpp"))


@pytest.mark.parametrize("layer", MAY_USE)
def test_each_layer_includes_only_what_it_may(layer):
    assert files(layer), f"csrc/{layer} holds no source"
    found = {
        f"{path.relative_to(CSRC)}: {include}"
        for path in files(layer)
        for include in violations(layer, INCLUDE.findall(path.read_text()))
    }
    assert not found


def test_headers_of_the_shim_that_bindings_include_are_plain_c():
    wanted = {i for path in files("bindings") for i in INCLUDE.findall(path.read_text()) if i.startswith("shim/")}
    assert wanted
    for header in wanted:
        assert not [i for i in INCLUDE.findall((CSRC / header).read_text()) if i.startswith(TORCH) or "." not in i]


def test_core_is_c_and_shim_alone_is_cpp():
    assert not [path for path in CSRC.rglob("*.cpp") if path.parent.name != "shim"]
    assert not list((CSRC / "shim").glob("*.c"))


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("core", "#include <Python.h>"),
        ("core", "# include <torch/torch.h>"),
        ("core", '#include "shim/zbp_shim.h"'),
        ("core", '#include "../shim/zbp_shim.h"'),
        ("shim", '#include "bindings/module.h"'),
        ("bindings", "#include <c10/core/Device.h>"),
    ],
)
def test_the_detector_catches_a_planted_fault(layer, line):
    assert list(violations(layer, INCLUDE.findall(f"int x;\n{line}\n")))
