"""core <- shim <- bindings, one direction: what each file of csrc/ includes, and what the C files' objects ask of each
other; rooms of the package and which may import which; and one door to torch's private names."""

import ast
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from support.layers import circle, symbols_of

CSRC = Path(__file__).parents[1] / "csrc"
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+["<]([^">]+)[">]', re.MULTILINE)
TORCH = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/")
PYTHON = ("Python.h", "structmember.h", "frameobject.h", "cpython/", "internal/")

# What a file of each layer may take from the others' folders.
MAY_USE = {
    "core": {"core"},
    "shim": {"core", "shim"},
    "pass": {"core", "shim", "pass"},
    "holders": {"core", "shim", "holders"},
    "bindings": {"core", "shim", "pass", "holders", "bindings"},
}


def violations(layer, includes):
    """Yield each include that a file of `layer` must not have."""
    for include in includes:
        is_torch, is_python = include.startswith(TORCH), include.startswith(PYTHON)
        folder = include.split("/")[0]
        if (
            (is_torch and layer != "shim")
            or (is_python and layer in ("core", "pass", "holders"))
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


# Includes of the shim that run back up, by the folder that has them; each would close a circle between folders.
BACK = {
    ("torch", "shim/pass/group.h"): "streams and what is unpacked are those of a group and its tasks",
    ("pass", "shim/work/work.h"): "W runs what others have handed over",
}


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


def test_folders_of_the_shim_have_no_circle_but_what_is_listed():
    edges, used = {}, set()
    for file, includes in shim_includes().items():
        folder = folder_of(file)
        back = {(folder, include) for include in includes} & BACK.keys()
        used |= back
        onward = includes - {include for _, include in back}
        edges.setdefault(folder, set()).update({folder_of(include) for include in onward} - {folder})
    assert circle(edges) == []
    assert used == BACK.keys(), "listed, and gone"
    for folder, include in BACK:
        closed = {**edges, folder: edges[folder] | {folder_of(include)}}
        assert circle(closed), f"{include} in {folder} closes no circle: it need not be listed"


@pytest.fixture(scope="module")
def compile_c(tmp_path_factory):
    """Compiles (name, source) to objects."""
    compiler = os.environ.get("CC", "cc").split()
    if shutil.which(compiler[0]) is None or shutil.which("nm") is None:
        pytest.skip("needs a C compiler and nm")

    def compile_all(sources):
        folder, objects = tmp_path_factory.mktemp("objects"), {}
        for number, (name, source) in enumerate(sorted(sources.items())):
            objects[name] = folder / f"{number}.o"
            command = [*compiler, "-std=c11", "-O0", f"-I{CSRC}", f"-I{sysconfig.get_path('include')}"]
            command += ["-c", source, "-o", objects[name]]
            subprocess.run(command, check=True)
        return objects

    return compile_all


def test_objects_of_c_refer_in_one_direction(compile_c):
    """The shim's, too: tests/test_units.py."""
    sources = [
        path for layer in ("core", "pass", "holders", "bindings") for path in files(layer) if path.suffix == ".c"
    ]
    edges = symbols_of(compile_c({path.relative_to(CSRC).as_posix(): path for path in sources}))
    assert edges["pass/weight_pass.c"] >= {"core/base/zbp_map.c", "core/pass/zbp_book.c"}, "the detector sees nothing"
    assert circle(edges) == []
    assert {
        file: of for file, of in edges.items() if file.startswith("core/") and any("core/" not in o for o in of)
    } == {}
    folders = {}
    for file, of in edges.items():
        folder = file.rpartition("/")[0]
        folders.setdefault(folder, set()).update({o.rpartition("/")[0] for o in of} - {folder})
    assert circle(folders) == []


def test_a_circle_of_objects_is_found(compile_c, tmp_path):
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.c").write_text(f"int {other}(void);\nint {name}(void) {{ return {other}(); }}\n")
    edges = symbols_of(compile_c({path.name: path for path in tmp_path.glob("*.c")}))
    assert circle(edges) == ["a.c", "b.c", "c.c", "a.c"]


def test_no_native_file_is_longer_than_one_reads_nor_a_line_wider_than_a_window():
    sources = [path for layer in MAY_USE for path in files(layer)]
    assert {path.name: n for path in sources if (n := len(path.read_text().splitlines())) > 450} == {}
    assert {path.name for path in sources if max(map(len, path.read_text().splitlines())) > 120} == set()


def test_headers_of_the_shim_that_bindings_include_are_plain_c():
    wanted = {i for path in files("bindings") for i in INCLUDE.findall(path.read_text()) if i.startswith("shim/")}
    assert wanted
    for header in wanted:
        assert not [i for i in INCLUDE.findall((CSRC / header).read_text()) if i.startswith(TORCH) or "." not in i]


def test_core_is_c_and_shim_alone_is_cpp():
    assert not [path for path in CSRC.rglob("*.cpp") if "shim" not in path.relative_to(CSRC).parts]
    assert not list((CSRC / "shim").rglob("*.c"))


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("core", "#include <Python.h>"),
        ("core", "# include <torch/torch.h>"),
        ("core", '#include "shim/pass/zbp_shim.h"'),
        ("core", '#include "../shim/zbp_shim.h"'),
        ("shim", '#include "bindings/module.h"'),
        ("bindings", "#include <c10/core/Device.h>"),
        ("pass", "#include <Python.h>"),
        ("pass", "#include <c10/core/Device.h>"),
        ("holders", "#include <Python.h>"),
        ("holders", '#include "pass/zbp_pass.h"'),
        ("shim", '#include "pass/zbp_pass.h"'),
    ],
)
def test_the_detector_catches_a_planted_fault(layer, line):
    assert list(violations(layer, INCLUDE.findall(f"int x;\n{line}\n")))


PACKAGE = Path(__file__).parents[1] / "zbpipe"
# What is private in Python and in pytest.
NOT_TORCHS = {
    "_getframe",
    "_current_frames",
    "_slotnames",
    "_asdict",
    "_make",
    "_fields",
    "_lru_cache_wrapper",
    "_pybind11",
}
NOT_TORCHS |= {"_pyfuncitem", "_obj", "_instance", "_excinfo", "_tmp_path_factory"}


def modules():
    return [path for path in PACKAGE.rglob("*.py") if "_torch" not in path.relative_to(PACKAGE).parts]


def is_private(name):
    return re.fullmatch(r"_(?!zbpipe)[A-Za-z]\w*", name) is not None


def own_names():
    """The private names that zbpipe gives: to functions, classes, attributes of self, fields and module variables."""
    names = {"_C"}
    for path in (*modules(), PACKAGE / "_C.pyi"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                names.add(node.attr)
    return names


def is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names_of_torch(text, own):
    """What a module's text says of torch's private parts."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for name in (*node.module.split("."), *(alias.name for alias in node.names)):
                if is_private(name):
                    yield f"{node.lineno}: {node.module}, {name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.") and any(map(is_private, alias.name.split("."))):
                    yield f"{node.lineno}: {alias.name}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node).startswith("torch.") or node.attr not in own | NOT_TORCHS:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            for argument in node.args[1:2]:
                name = getattr(argument, "value", None)
                if isinstance(name, str) and is_private(name) and name not in own | NOT_TORCHS:
                    yield f"{node.lineno}: {name!r}"


def test_one_package_alone_says_private_names_of_torchs():
    own = own_names()
    found = [
        f"{path.relative_to(PACKAGE)}:{where}"
        for path in modules()
        for where in private_names_of_torch(path.read_text(), own)
    ]
    assert len(modules()) > 40
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "import torch._guards",
        "from torch._guards import tracing",
        "from torch.utils import _pytree as pytree",
        "x = torch._C.anything()",
        "x = tensor._version",
        "x._base = 1",
        "x = getattr(module, '_is_fsdp_managed_module', False)",
    ],
)
def test_that_detector_catches_a_planted_fault_too(line):
    assert list(private_names_of_torch(f"import torch\n{line}\n", own_names()))


# Which room of the package, a folder or a module at its top, may import which. "zbpipe" is the package's own names.
BASE = {"_C", "_torch"}
ROOMS = {
    "_version": set(),
    "_formatting": set(),
    "_native": {"_version"},
    "_first_aid": {"_version"},
    "_torch": set(),
    "_policy": {"_formatting"},
    "_work": {"_torch"},
    "_sharers": {"_torch"},
    "release": {*BASE, "_sharers"},
    "_kernels": BASE,
    "_compile": {*BASE, "_formatting"},
    "_stage": {"_policy", "_torch"},
    "passes": {"_C", "_policy", "_stage"},
    "_patch": {"_policy", "_stage", "_formatting", "_torch", "passes"},
    "memory": {*BASE, "_formatting", "_version", "leaks", "passes"},
    "leaks": {*BASE, "_formatting"},
    "_explain": {*BASE, "_policy", "_formatting", "memory"},
    "zbpipe": {
        *("_C", "_compile", "_explain", "_first_aid", "_kernels", "_native", "_patch", "_policy"),
        *("_version", "leaks", "memory", "passes", "release"),
    },
    "_cli": {
        *("_first_aid", "_patch", "_formatting", "_torch", "_version", "leaks", "memory", "zbpipe"),
    },
    "__main__": {"_cli"},
}
# What is imported where it is needed, within a function, and why.
TIME, OPTIONAL = "takes long to import, and few need it", "need not be installed"
LATE = {
    ("__init__.py", "zbpipe.leaks"): TIME,
    ("_native/__init__.py", "torch"): "what is not there is said in one sentence",
    ("_cli/steps.py", "torch.distributed.pipelining"): TIME,
    ("_compile/__init__.py", "zbpipe._compile.backend"): TIME,  # the compilers
    ("_compile/cut.py", "networkx"): TIME,
    ("_stage/data_parallel.py", "torch.distributed.fsdp"): TIME,
    ("_torch/compiler.py", "torch._dynamo.backends.debugging"): TIME,
    ("_torch/compiler.py", "torch._inductor"): TIME,
    ("_torch/compiler.py", "torch._inductor.compile_fx"): TIME,
    ("_torch/compiler.py", "torch._inductor.utils"): TIME,
    ("_torch/fsdp.py", "torch.distributed.fsdp"): TIME,
    ("leaks/_draw/figure.py", "matplotlib.backends.backend_agg"): OPTIONAL,
    ("leaks/_draw/figure.py", "matplotlib.figure"): OPTIONAL,
    ("leaks/_draw/figure.py", "matplotlib.patches"): OPTIONAL,
    ("leaks/__init__.py", "zbpipe.leaks.pytest_plugin"): OPTIONAL,  # pytest
    ("memory/_living.py", "zbpipe.leaks._search"): TIME,
    ("memory/_out_of_memory.py", "zbpipe.leaks._search"): TIME,
    ("memory/_plot.py", "matplotlib.backends.backend_agg"): OPTIONAL,
    ("memory/_plot.py", "matplotlib.figure"): OPTIONAL,
    ("memory/_plot.py", "matplotlib.font_manager"): OPTIONAL,
    ("memory/_plot.py", "matplotlib.patches"): OPTIONAL,
}
LONGEST_MODULE = 350


def every_module():
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    return ".".join(("zbpipe", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def room_of(module):
    return module.split(".")[1] if "." in module else "zbpipe"


def imports(text):
    """The modules that a text imports, each with whether it does so within a function."""

    def found(node, within):
        if isinstance(node, ast.Import):
            yield from ((alias.name, within) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                path = PACKAGE.parent.joinpath(*node.module.split("."), alias.name)
                is_module = path.with_suffix(".py").exists() or path.is_dir() or alias.name == "_C"
                ours = node.module.split(".")[0] == "zbpipe"
                yield (f"{node.module}.{alias.name}" if ours and is_module else node.module), within
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield from ((name.value, within) for name in node.args if isinstance(name, ast.Constant))
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from found(child, within or is_function)

    return set(found(ast.parse(text), False))


def import_violations(room, modules):
    return {
        module for module in modules if module.split(".")[0] == "zbpipe" and room_of(module) not in {room, *ROOMS[room]}
    }


def test_each_room_imports_only_what_it_may():
    used = {}
    for path in every_module():
        room = room_of(name_of(path))
        modules = {module for module, _ in imports(path.read_text())}
        assert not import_violations(room, modules), path
        used.setdefault(room, set()).update(room_of(m) for m in modules if m.split(".")[0] == "zbpipe")
    assert used.keys() == ROOMS.keys()
    assert {room: ROOMS[room] - of for room, of in used.items() if ROOMS[room] - of} == {}, "allowed, and not used"


def test_no_import_runs_back_up():
    """Neither between rooms nor between modules; what is imported late counts, too."""
    assert circle(ROOMS) == []
    edges = {}
    for path in every_module():
        name = name_of(path)
        edges[name] = {m for m, _ in imports(path.read_text()) if m.split(".")[0] == "zbpipe"} - {name}
    assert len(edges) > 60
    assert circle(edges) == []


def test_what_is_imported_late_has_its_reason():
    late = {
        (path.relative_to(PACKAGE).as_posix(), module)
        for path in every_module()
        for module, within in imports(path.read_text())
        if within
    }
    assert late == LATE.keys()


def test_no_module_is_longer_than_one_reads():
    found = {path.relative_to(PACKAGE).as_posix(): len(path.read_text().splitlines()) for path in every_module()}
    assert {name: count for name, count in found.items() if count > LONGEST_MODULE} == {}


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("_stage", "from zbpipe import passes"),
        ("_torch", "import zbpipe._policy"),
        ("leaks", "from zbpipe.memory import record"),
        ("leaks", "def f():\n    from zbpipe import get_policy"),
        ("_kernels", "import importlib\nimportlib.import_module('zbpipe.release')"),
    ],
)
def test_an_import_back_up_is_found(room, line):
    assert import_violations(room, {module for module, _ in imports(line)})


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c", "d"}, "d": {"a"}}) == ["a", "b", "d", "a"]
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []


# A function of the shim's C interface. Python must never see a C++ exception.
FUNCTION = re.compile(
    r"^(?!struct|class|static)[\w:*<> ]+?\*?\s?\b(zbp_\w+)\(([^;{]*)\)\s*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL
)
BARRIER = re.compile(r"\b(guarded|guarded_object|set_of|kept_in|in_memory|barrier\.end)\(")
# Behind no barrier: they free, read a flag or a clock, or hold a lock for that; called where no Python error may be set.
CANNOT_THROW = {
    "zbp_error_clear",
    "zbp_error_raise",
    "zbp_weight_key",
    "zbp_group_reads",
    "zbp_group_recomputed_for",
    "zbp_group_forget_main_grads",
    "zbp_run_free",
    "zbp_group_release",
    "zbp_group_again",
    "zbp_call_free",
    "zbp_scene_free",
    "zbp_scene_roots",
    "zbp_task_has_work",
    "zbp_in_anomaly_mode",
    "zbp_group_free",
    "zbp_group_state",
    "zbp_group_traverse",
    "zbp_group_clear",
    "zbp_things_free",
    "zbp_things_count",
    "zbp_things_blame",
    "zbp_things_unlist",
    "zbp_tensor_storage",
    "zbp_tensor_key",
    "zbp_storage_look",
    "zbp_storage_watch",
    "zbp_storage_unwatch",
    "zbp_tap_stop",
    "zbp_tap_adopt",
    "zbp_tap_adopt_storage",
    "zbp_tap_feeds",
    "zbp_tap_mark",
    "zbp_tap_trace_start",
    "zbp_tap_trace_stop",
    "zbp_tap_collection_begins",
    "zbp_tap_collection_ends",
    "zbp_tap_forget_collections",
    "zbp_tap_serial",
    "zbp_tap_blocks",
    "zbp_tap_lock",
    "zbp_tap_unlock",
}


def unguarded(source):
    return {name for name, _, body in FUNCTION.findall(source) if not BARRIER.search(body)}


def test_every_function_of_the_c_interface_is_behind_the_exception_barrier():
    sources = [path.read_text() for path in files("shim") if path.suffix == ".cpp"]
    declared = {
        name
        for path in files("shim")
        if path.name.startswith("zbp_")
        for name in re.findall(r"\b(zbp_\w+)\([^)]*\);", path.read_text())
    }
    defined = {name for source in sources for name, _, _ in FUNCTION.findall(source)}
    assert declared, "no header declares a function"
    assert declared <= defined, "the pattern misses definitions"
    found = set().union(*(unguarded(source) for source in sources))
    assert found & declared == CANNOT_THROW


def test_a_function_without_the_barrier_is_found():
    assert unguarded("int zbp_new(void) {\n  return std::vector<int>(1).size();\n}\n") == {"zbp_new"}
