"""A small project with zbpipe's own build files and a few lines of C and C++, and environments for it.

What is tested is the build, not what it builds: a stand-in for csrc compiles in a second.
"""

import importlib.metadata
import os
import shutil
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
COPIED = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "_zbpipe_hook")
COPIED_MODULES = ("_version.py", "_native/__init__.py", "py.typed")

SOURCES = {
    "README.md": "a stand-in for zbpipe\n",
    "csrc/core/base/zbp_answer.h": '#pragma once\n#ifdef __cplusplus\nextern "C"\n#endif\nint zbp_answer(void);\n',
    # The variable's name is a C++ keyword: compiled as C++, as BuildExtension alone would, this fails.
    "csrc/core/base/zbp_answer.c": '#include "core/base/zbp_answer.h"\nint zbp_answer(void) { int class = 42; return class; }\n',
    "csrc/shim/input/zbp_shim.h": '#pragma once\n#ifdef __cplusplus\nextern "C"\n#endif\nint zbp_shim_answer(void);\n',
    "csrc/shim/input/shim.cpp": '#include "shim/input/zbp_shim.h"\n#include "core/base/zbp_answer.h"\n#include <c10/core/GradMode.h>\n'
    "int zbp_shim_answer(void) { return c10::GradMode::is_enabled() ? zbp_answer() : 0; }\n",
    "csrc/bindings/module.c": '#include <Python.h>\n#include "shim/input/zbp_shim.h"\n'
    "static PyObject *answer(PyObject *self, PyObject *args) "
    "{ (void)self; (void)args; return PyLong_FromLong(zbp_shim_answer()); }\n"
    'static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};\n'
    'static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", NULL, 0, methods, NULL, NULL, NULL, NULL};\n'
    "PyMODINIT_FUNC PyInit__C(void) { return PyModule_Create(&module); }\n",
    "zbpipe/__init__.py": "import sys\n\nfrom zbpipe import _native\n\n_native.load()\n\n"
    "from zbpipe._C import answer\nfrom zbpipe._patch import patch\n\n"
    'if "_zbpipe_hook" in sys.modules:\n    sys.modules["_zbpipe_hook"].complete()\n',
    "zbpipe/__main__.py": "import sys\n\nfrom zbpipe import answer\n\nprint(sys.argv[1:], answer())\n",
    "examples/script.py": "import zbpipe\n\nprint(zbpipe.answer())\n",
    "zbpipe/_patch.py": "from torch.distributed.pipelining import stage\n\n\n"
    "def patch():\n    stage.stage_backward = stage_backward\n\n\n"
    'def stage_backward():\n    """Stand-in."""\n',
}


def what_is_installed(seen):
    """A folder that shows all that is installed where the tests run, but for zbpipe itself."""
    seen.mkdir(exist_ok=True)
    for package in Path(torch.__file__).parents[1].iterdir():
        if "zbpipe" not in package.name and not (seen / package.name).is_symlink():
            (seen / package.name).symlink_to(package)
    return seen


class Index:
    """A folder as an index of packages, for pip and uv."""

    def __init__(self, path):
        self.path = path

    def of(self, name):
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def stand_in(self, name, shows, version=None):
        """A wheel of a few bytes under the name and version of what is installed: installed itself, it shows a folder."""
        version = version or importlib.metadata.version(name)
        described = f"{name}-{version}.dist-info"
        files = {
            f"{name}_stands_in.pth": f"{shows}\n",
            f"{described}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{described}/entry_points.txt": importlib.metadata.distribution(name).read_text("entry_points.txt") or "",
            f"{described}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        files[f"{described}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{described}/RECORD"])
        with zipfile.ZipFile(self.of(name) / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            for file, text in files.items():
                wheel.writestr(file, text)

    def url(self):
        for package in self.path.iterdir():
            links = [f'<a href="{file.name}">{file.name}</a>' for file in package.iterdir() if file.suffix != ".html"]
            (package / "index.html").write_text("\n".join(["<!DOCTYPE html><html><body>", *links, "</body></html>"]))
        return self.path.as_uri()


class Environment:
    """A virtual environment whose pip and Python can be run."""

    def __init__(self, path, sees_torch):
        venv.create(path, with_pip=True, symlinks=True)
        self.path = path
        self.python = str(path / "bin" / "python")
        self.site = next(path.glob("lib/python3*/site-packages"))
        if sees_torch:
            (self.site / "sees_torch.pth").write_text(f"{what_is_installed(path / 'seen')}\n")

    def run(self, *command, cwd="/", **environment):
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("ZBPIPE_", "PYTHONPATH", "LD_PRELOAD"))}
        return subprocess.run(
            [self.python, *map(str, command)],
            cwd=cwd,
            env={**outer, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def pip(self, *command, cwd, fails=False):
        done = self.run("-m", "pip", "--no-cache-dir", *command, cwd=cwd)
        assert (done.returncode != 0) == fails, done.stdout
        return done.stdout

    def zbpipe(self, code="import zbpipe; print(zbpipe.answer())", **environment):
        return self.run("-W", "error", "-c", code, **environment).stdout

    def remove_zbpipe(self):
        self.pip("uninstall", "-y", "zbpipe", cwd=self.path)


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment") / "with_torch", sees_torch=True)


@pytest.fixture
def bare_environment(tmp_path):
    return Environment(tmp_path / "without_torch", sees_torch=False)


@pytest.fixture
def index(tmp_path):
    """An index of wheels that stand in for what zbpipe and its build need, and of a torch that is newer."""
    index = Index(tmp_path / "index")
    for name in ("torch", "numpy", "setuptools", "ninja"):
        index.stand_in(name, what_is_installed(tmp_path / "seen"))
    index.stand_in("torch", tmp_path / "nowhere", "9.9.9")
    return index


@pytest.fixture
def project(tmp_path):
    project = tmp_path / "project"
    for name, text in SOURCES.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, project / name)
    for name in COPIED_MODULES:
        (project / "zbpipe" / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "zbpipe" / name, project / "zbpipe" / name)
    return project
