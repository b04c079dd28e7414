"""pip install in every way that people use, with torch and without."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

RELEASE = torch.__version__.partition("+")[0]
FOLDER = "zbpipe/_native/torch_" + "_".join(RELEASE.split(".")[:2])
DESCRIBED = f"{FOLDER}/{sys.implementation.cache_tag}.json"
PATCHED = "import torch.distributed.pipelining.stage as s; print(s.stage_backward.__module__)"
IDLE = "import sys; print({'torch', 'zbpipe', '_zbpipe_hook'} & set(sys.modules))"
INSTALL = ("install", "--no-build-isolation", "--no-deps", "--force-reinstall")


def mend(project):
    install = "pip install --no-build-isolation --no-deps --force-reinstall --editable ."
    return f"build it: in {project}, run `{install}`; or run Python elsewhere, if zbpipe is installed too."


@pytest.fixture
def builds(environment, project):
    """The environment with what a build needs; zbpipe leaves it again."""
    environment.pip("install", "setuptools>=77.0.3", "ninja", cwd=project)
    yield environment
    environment.remove_zbpipe()
    assert not list(environment.site.glob("*zbpipe*"))


def test_an_install_uses_the_torch_that_is_there(builds, project):
    said = builds.pip(*INSTALL, ".", cwd=project)
    assert "Downloading torch" not in said
    assert builds.zbpipe() == "42\n"
    # The hook came with it: silent unless asked for, and then a script needs no edit.
    for patch in ("0", "1"):
        assert builds.zbpipe(IDLE, ZBPIPE_PATCH=patch) == "set()\n"
    assert builds.zbpipe(PATCHED) == "torch.distributed.pipelining._backward\n"
    assert builds.zbpipe(PATCHED, ZBPIPE_PATCH="1") == "zbpipe._patch\n"
    assert builds.zbpipe("import zbpipe\n" + PATCHED, ZBPIPE_PATCH="1") == "zbpipe._patch\n"
    autoload = {"ZBPIPE_PATCH": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert builds.zbpipe(PATCHED, **autoload) == "torch.distributed.pipelining._backward\n"


@pytest.mark.parametrize("how", [".", "--editable=."])
def test_commands_run_from_the_clone_its_parent_and_elsewhere(builds, project, tmp_path, how):
    clone = shutil.copytree(project, tmp_path / "zbpipe")  # as git calls it: seen from its parent a namespace package
    builds.pip(*INSTALL, how, cwd=clone)
    (tmp_path / "elsewhere").mkdir()
    for folder in (clone, tmp_path, tmp_path / "elsewhere"):
        for *command, said in (
            ("-c", "import zbpipe; print(zbpipe.answer())", "42\n"),
            ("-m", "zbpipe", "doctor", "['doctor'] 42\n"),
            (clone / "examples" / "script.py", "42\n"),
        ):
            assert builds.run(*command, cwd=folder).stdout == said, (folder, command)
    shutil.rmtree(clone / FOLDER)
    said = builds.run("-c", "import zbpipe", cwd=clone).stdout.splitlines()[-1]
    assert said == (
        f"ImportError: zbpipe has no compiled part for torch {RELEASE} and {sys.implementation.cache_tag} in "
        f"{clone / 'zbpipe' / '_native'} (none there): {mend(clone)}"
    )


def test_what_pythonpath_finds_patches_too(builds, project, tmp_path):
    target = tmp_path / "libraries"
    builds.pip("install", "--no-build-isolation", "--no-deps", "--target", target, ".", cwd=project)
    assert builds.zbpipe(PATCHED, PYTHONPATH=str(target)) == "torch.distributed.pipelining._backward\n"
    assert builds.zbpipe(PATCHED, PYTHONPATH=str(target), ZBPIPE_PATCH="1") == "zbpipe._patch\n"
    builds.pip(*INSTALL, ".", cwd=project)


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_no_compiler_is_one_sentence(environment, project, variable):
    environment.pip("install", "setuptools>=77.0.3", "ninja", cwd=project)
    done = environment.run("setup.py", "build", cwd=project, **{variable: "no-such-compiler -O2"})
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == (
        "zbpipe: there is no compiler 'no-such-compiler': install gcc and g++ (Debian: apt-get install build-essential), "
        f"or name another in {variable}."
    )


def test_no_headers_of_python_is_one_sentence(environment, project):
    environment.pip("install", "setuptools>=77.0.3", "ninja", cwd=project)
    (project / "setup.py").write_text(
        "import sysconfig\nsysconfig.get_path = lambda name, **_: '/nowhere'\n" + (project / "setup.py").read_text()
    )
    done = environment.run("setup.py", "build", cwd=project)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == (
        "zbpipe: there is no Python.h in /nowhere: install the headers of this Python (Debian: apt-get install python3-dev)."
    )


def test_an_old_python_is_told_first(environment, project):
    text = (project / "setup.py").read_text()
    (project / "setup.py").write_text("import sys\nsys.version_info = (3, 9, 18)\n" + text)
    done = environment.run("setup.py", "build", cwd=project)
    assert done.returncode == 1 and "Traceback" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("zbpipe needs Python 3.10 or newer, and ")


def test_a_module_that_is_gone_is_not_installed_again(builds, project):
    for there in (True, False):
        extra = project / "zbpipe" / "extra.py"
        extra.touch() if there else extra.unlink()
        builds.pip(*INSTALL, ".", cwd=project)
        assert (builds.site / "zbpipe" / "extra.py").exists() == there
    assert not list(project.glob("*.egg-info"))


def test_editable_install_and_a_torch_that_changed_since(builds, project):
    builds.pip(*INSTALL, "--editable", ".", cwd=project)
    in_the_tree = builds.run("-c", "import zbpipe", cwd=project)  # as README's commands run
    assert in_the_tree.returncode == 0, in_the_tree.stdout
    assert builds.zbpipe("import zbpipe; print(zbpipe.__file__)") == f"{project / 'zbpipe' / '__init__.py'}\n"
    assert builds.zbpipe() == "42\n"
    assert builds.zbpipe(PATCHED, ZBPIPE_PATCH="1") == "zbpipe._patch\n"
    described = project / DESCRIBED
    written = json.loads(described.read_text())
    assert written["torch"] == RELEASE
    for changed, words in [
        ({"torch": "2.99.1"}, "torch 2.99.1 (git"),
        ({"git": "abcdef"}, f"torch {RELEASE} (git abcdef), and"),
        ({"hip": True}, ", ROCm), and this process has"),
        ({"zbpipe": "9.0"}, "zbpipe 9.0, torch "),
    ]:
        described.write_text(json.dumps(written | changed))
        said = builds.zbpipe().splitlines()[-1]
        assert said.startswith("ImportError: zbpipe's compiled part is of zbpipe ")
        assert words in said and said.endswith(mend(project))

    # What another Python or another torch has built is no help.
    described.write_text(json.dumps(written))
    described.rename(described.with_name("cpython-39.json"))
    said = builds.zbpipe().splitlines()[-1]
    assert f"(torch {RELEASE}, cpython-39 there): {mend(project)}" in said
    (builds.site / "sees_torch.pth").rename(builds.path / "kept")
    try:
        said = builds.zbpipe().splitlines()[-1]
    finally:
        (builds.path / "kept").rename(builds.site / "sees_torch.pth")
    assert said.startswith("ImportError: zbpipe needs torch, and the Python at ")


def source_distribution(builds, project, folder):
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    done = builds.run("-c", code, folder, cwd=project)
    assert done.returncode == 0, done.stdout
    (archive,) = folder.glob("*.tar.gz")
    return archive


def test_source_distribution_builds_the_same_wheel(builds, project, tmp_path):
    stale = project / "zbpipe/_native/torch_2_99/cpython-39.json"
    stale.parent.mkdir()
    stale.write_text("{}")
    archive = source_distribution(builds, project, tmp_path)
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"_zbpipe_hook/__init__.py", "csrc/core/base/zbp_answer.h", "zbpipe/_native/__init__.py"} <= names
    assert not [name for name in names if name.endswith(".json")]

    builds.pip("wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, archive, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        metadata = file.read("zbpipe-0.1.0.dist-info/METADATA").decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and ";" not in line]
    assert required == ["Requires-Dist: torch>=2.11", "Requires-Dist: numpy"]
    library = next(name for name in names if name.endswith(".so"))
    assert library.startswith(f"{FOLDER}/_C.cpython-")
    assert {"_zbpipe_hook/__init__.py", "_zbpipe_hook/plugin.py", DESCRIBED, "zbpipe/py.typed"} <= names
    assert not [name for name in names if Path(name).suffix in (".c", ".h", ".cpp", ".pth") or "torch_2_99" in name]
    builds.pip("install", "--no-deps", wheel, cwd=tmp_path)
    assert builds.zbpipe() == "42\n"


def test_uv_builds_it_for_the_torch_that_will_run(builds, project, index, tmp_path):
    """As docs/install.md has it; another torch, newer, is in the index."""
    source_distribution(builds, project, index.of("zbpipe"))
    page = (Path(__file__).parents[2] / "docs" / "install.md").read_text()
    (told,) = re.findall(r"```text\n(\[tool.uv.extra-build-dependencies\]\n.*?)```", page, re.DOTALL)
    app = tmp_path / "app"
    app.mkdir()
    needed = f'dependencies = ["torch=={torch.__version__}", "zbpipe"]\nrequires-python = ">=3.10"\n'
    (app / "pyproject.toml").write_text(f'[project]\nname = "app"\nversion = "0"\n{needed}\n{told}')
    command = ["sync", "--no-cache", "--default-index", index.url(), "--python", builds.python]
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("ZBPIPE_", "PYTHONPATH", "UV_"))}
    done = subprocess.run(
        [Path(sys.executable).with_name("uv"), *map(str, command)],
        cwd=app, env=outer, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    code = "import zbpipe; print(zbpipe.answer())"
    assert subprocess.check_output([app / ".venv/bin/python", "-c", code], env=outer, text=True) == "42\n"


def test_torch_and_the_wheel_in_one_command(builds, bare_environment, project, index, tmp_path):
    done = builds.run("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, project)
    assert done.returncode == 0, done.stdout
    (wheel,) = tmp_path.glob("*.whl")
    pip = ("-m", "pip", "--no-cache-dir", "install", "--index-url", index.url(), f"torch=={torch.__version__}", wheel)
    done = bare_environment.run(*pip, PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="")
    assert done.returncode == 0, done.stdout
    assert bare_environment.zbpipe(PATH="/nowhere") == "42\n"


def test_one_wheel_carries_what_was_built_in_place_and_needs_no_compiler(builds, bare_environment, project, tmp_path):
    assert builds.run("setup.py", "build_ext", "--inplace", cwd=project).returncode == 0
    library, described = next(project.glob(f"{FOLDER}/*.so")), project / DESCRIBED
    other = project / "zbpipe/_native/torch_2_99"
    other.mkdir()
    for path in (library, described):
        (other / path.name).write_bytes(path.read_bytes())
    (other / "cpython-39.json").touch()  # another Python's, which has a wheel of its own

    options = ("--plat-name", "manylinux_2_36_x86_64", "-d", tmp_path)
    done = builds.run("setup.py", "bdist_wheel", *options, cwd=project, ZBPIPE_PACK="1", CC="none", CXX="none")
    assert done.returncode == 0, done.stdout
    (wheel,) = tmp_path.glob("*.whl")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert wheel.name == f"zbpipe-0.1.0-{tag}-{tag}-manylinux_2_36_x86_64.whl"
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if "/torch_" in name}
    assert packed == {
        f"{folder}/{name}"
        for folder in (FOLDER, "zbpipe/_native/torch_2_99")
        for name in (library.name, described.name)
    }
    builds.pip("install", "--no-deps", wheel, cwd=tmp_path)
    assert builds.zbpipe(PATH="/nowhere") == "42\n"

    # Where the wheel has none for the torch that runs, the import says how to build one.
    (bare_environment.site / "torch.py").write_text("__version__ = '2.98.0+cu130'\n")
    assert bare_environment.run("-m", "pip", "install", "--no-deps", "--no-index", wheel).returncode == 0
    said = bare_environment.zbpipe().splitlines()[-1]
    assert re.match(
        rf"ImportError: zbpipe has no compiled part for torch 2.98.0 and .* \(torch {RELEASE}, .*; .* there\): build it: in "
        r"the sources of zbpipe 0.1.0, run `pip install --no-build-isolation .* \.`, or `make wheels` for a wheel with a "
        r"library for each tested torch\.$",
        said,
    )


def test_the_wheel_of_one_torch_says_which(builds, project, tmp_path):
    options = ("wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, project)
    done = builds.run("-m", "pip", *options, ZBPIPE_LOCAL="+torch2.13.0")
    assert done.returncode == 0, done.stdout
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("zbpipe-0.1.0+torch2.13.0-cp")
    builds.pip("install", "--no-deps", wheel, cwd=tmp_path)
    assert builds.zbpipe() == "42\n"


def test_a_build_without_torch_is_one_sentence_and_downloads_none(bare_environment, project):
    said = bare_environment.pip("install", "--no-deps", ".", cwd=project, fails=True)
    (sentence,) = {line.strip() for line in said.splitlines() if "zbpipe: " in line}
    assert re.fullmatch(
        r"zbpipe: the Python that builds \(.*\) has no torch: install torch 2.11 or newer, setuptools and ninja, then "
        r"zbpipe with --no-build-isolation \(uv: docs/install.md\)\.",
        sentence,
    )
    assert "Traceback" not in said and "Collecting torch" not in said


def test_warnings_in_c_stop_a_strict_build(environment, project):
    (project / "csrc" / "core" / "base" / "zbp_answer.c").write_text(
        '#include "core/base/zbp_answer.h"\nint zbp_answer(void) { long class = 42; return class; }\n'
    )
    environment.pip("install", "setuptools>=77.0.3", "ninja", cwd=project)
    done = environment.run("setup.py", "build_ext", cwd=project, ZBPIPE_WERROR="1")
    assert done.returncode != 0
    assert "-Werror=conversion" in done.stdout
