"""core <- shim <- bindings, one direction: what each file of csrc/ includes (what their objects ask of each other:
test_units.py); how long files are; the exception barrier. Which module of the package imports which, and that one
package alone says private names of torch's, is import-linter's and ruff's to check (pyproject.toml)."""

import re
from pathlib import Path

import pytest
from support.layers import circle

CSRC = Path(__file__).parents[1] / "csrc"
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+["<]([^">]+)[">]', re.MULTILINE)
TORCH = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/")
PYTHON = ("Python.h", "structmember.h", "frameobject.h", "cpython/", "internal/")

# What a file of each layer may take from the others' folders.
MAY_USE = {
    "core": {"core"},
    "shim": {"core", "shim"},
    "pass": {"core", "shim", "pass"},
    "bindings": {"core", "shim", "pass", "bindings"},
    "instruments/core": {"core", "instruments/core"},
    "instruments/shim": {"core", "shim", "instruments/core", "instruments/shim"},
    "instruments/bindings": {"core", "shim", "bindings", "instruments/core", "instruments/shim"},
}


def layer_of(include):
    """The layer whose file is included, or what is before the first slash."""
    folders = include.split("/")
    return "/".join(folders[:2]) if folders[0] == "instruments" else folders[0]


def violations(layer, includes):
    """Yield each include that a file of `layer` must not have."""
    for include in includes:
        is_torch, is_python = include.startswith(TORCH), include.startswith(PYTHON)
        of = layer_of(include)
        if (
            (is_torch and not layer.endswith("shim"))
            or (is_python and layer in ("core", "pass", "instruments/core"))
            or (of in MAY_USE and of not in MAY_USE[layer])
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


def shim_includes():
    """The shim's files, each with what it includes of the shim."""
    return {
        path.relative_to(CSRC).as_posix(): {i for i in INCLUDE.findall(path.read_text()) if i.startswith("shim/")}
        for path in files("shim")
    }


def folder_of(file):
    return file.split("/")[1]


def test_no_header_of_the_shim_includes_itself_by_others():
    headers = {file: includes for file, includes in shim_includes().items() if file.endswith(".h")}
    assert len(headers) > 20
    assert circle(headers) == []


def test_folders_of_the_shim_have_no_circle():
    edges = {}
    for file, includes in shim_includes().items():
        edges.setdefault(folder_of(file), set()).update({folder_of(i) for i in includes} - {folder_of(file)})
    assert edges["weight"] >= {"engine", "group", "torch"}, "the detector sees nothing"
    assert circle(edges) == []


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c", "d"}, "d": {"a"}}) == ["a", "b", "d", "a"]
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_no_folder_of_the_passes_is_larger_than_one_looks_through():
    folders = [path for path in (CSRC / "shim").iterdir() if path.is_dir()]
    assert {path.name: n for path in folders if (n := len(list(path.iterdir()))) > 20} == {}


def test_no_native_file_is_longer_than_one_reads_nor_a_line_wider_than_a_window():
    sources = [path for layer in MAY_USE for path in files(layer)]
    assert {path.name: n for path in sources if (n := len(path.read_text().splitlines())) > 400} == {}
    assert {path.name for path in sources if max(map(len, path.read_text().splitlines())) > 100} == set()


def test_headers_of_the_shim_that_bindings_include_are_plain_c():
    wanted = {i for path in files("bindings") for i in INCLUDE.findall(path.read_text()) if i.startswith("shim/")}
    assert wanted
    for header in wanted:
        assert not [i for i in INCLUDE.findall((CSRC / header).read_text()) if i.startswith(TORCH) or "." not in i]


def test_core_is_c_and_shim_alone_is_cpp():
    assert not [path for path in CSRC.rglob("*.cpp") if "shim" not in path.relative_to(CSRC).parts]
    assert not list((CSRC / "shim").rglob("*.c")) + list((CSRC / "instruments/shim").rglob("*.c"))


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("core", "#include <Python.h>"),
        ("core", "# include <torch/torch.h>"),
        ("core", '#include "shim/input/zbp_shim.h"'),
        ("core", '#include "../shim/zbp_shim.h"'),
        ("shim", '#include "bindings/module.h"'),
        ("bindings", "#include <c10/core/Device.h>"),
        ("pass", "#include <Python.h>"),
        ("pass", "#include <c10/core/Device.h>"),
        ("shim", '#include "pass/weight_pass.h"'),
        ("shim", '#include "instruments/shim/handle.h"'),
        ("instruments/core", "#include <Python.h>"),
    ],
)
def test_the_detector_catches_a_planted_fault(layer, line):
    assert list(violations(layer, INCLUDE.findall(f"int x;\n{line}\n")))


PACKAGE = Path(__file__).parents[1] / "zbpipe"


def test_no_module_is_longer_than_one_reads():
    sources = PACKAGE.rglob("*.py")
    assert {path.name: n for path in sources if (n := len(path.read_text().splitlines())) > 350} == {}


# A function of the shim's C interface. Python must never see a C++ exception.
FUNCTION = re.compile(
    r"^(?!struct|class|static)[\w:*<> ]+?\*?\s?\b(zbp_\w+)\(([^;{]*)\)\s*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL
)
BARRIER = re.compile(r"\b(guarded|guarded_object|kept_in|in_memory|barrier\.end)\(")
# Behind no barrier: they free, read a flag or a clock, or hold a lock for that; called where no Python error may be set.
OF_GROUPS = ("release", "close", "again", "free", "traverse", "clear")
OF_TAPS = ("stop", "adopt", "adopt_storage", "feeds", "blocks", "tally")
OF_TRACES = ("start", "stop", "here")
CANNOT_THROW = {"zbp_add_handle", "zbp_add_storages", "zbp_error_clear", "zbp_error_raise", "zbp_weight_key"}
CANNOT_THROW |= {f"zbp_group_{name}" for name in OF_GROUPS} | {f"zbp_tap_{name}" for name in OF_TAPS}
CANNOT_THROW |= {f"zbp_trace_{name}" for name in OF_TRACES}


def unguarded(source):
    return {name for name, _, body in FUNCTION.findall(source) if not BARRIER.search(body)}


def test_every_function_of_the_c_interface_is_behind_the_exception_barrier():
    sources = [path.read_text() for path in (*files("shim"), *files("instruments/shim")) if path.suffix == ".cpp"]
    declared = {
        name
        for path in (*files("shim"), *files("instruments/shim"))
        if path.name.startswith("zbp_")
        for name in re.findall(r"\b(zbp_\w+)\([^)]*\);", path.read_text())
    }
    defined = {name for source in sources for name, _, _ in FUNCTION.findall(source)}
    assert declared, "no header declares a function"
    declared.remove("zbp_pass_weights")  # C's, which the shim calls
    assert declared <= defined, "the pattern misses definitions"
    found = set().union(*(unguarded(source) for source in sources))
    assert found & declared == CANNOT_THROW


def test_a_function_without_the_barrier_is_found():
    assert unguarded("int zbp_new(void) {\n  return std::vector<int>(1).size();\n}\n") == {"zbp_new"}
