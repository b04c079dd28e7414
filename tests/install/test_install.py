"""pip install in every way that people use, with torch and without."""

import base64
import hashlib
import importlib.metadata
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

PATCHED = "import torch.distributed.pipelining.stage as s; print(s.stage_backward.__module__)"
IDLE = "import sys; print({'torch', 'zbpipe', '_zbpipe_hook'} & set(sys.modules))"


def test_isolated_install_uses_the_torch_that_is_there(environment, project):
    said = environment.pip("install", ".", cwd=project)
    assert "Downloading torch" not in said
    assert not list(environment.site.glob("torch*"))
    assert environment.zbpipe() == "42\n"

    # The hook came with it: silent unless asked for, and then a script needs no edit.
    assert environment.zbpipe(IDLE) == "set()\n"
    assert environment.zbpipe(IDLE, ZBPIPE_PATCH="1") == "{'_zbpipe_hook'}\n"
    assert environment.zbpipe(PATCHED) == "torch.distributed.pipelining._backward\n"
    assert environment.zbpipe(PATCHED, ZBPIPE_PATCH="1") == "zbpipe._patch\n"

    environment.remove_zbpipe()
    assert not list(environment.site.glob("*zbpipe*"))


def test_uv_installs_it_too(environment, project):
    environment.pip("install", "setuptools>=77.0.3", "ninja", cwd=project)
    # It looks for what is required among the environment's own packages alone, and torch is none of them here.
    done = environment.uv("pip", "install", "--no-deps", project)
    assert done.returncode == 0, done.stdout
    assert environment.zbpipe() == "42\n"
    assert environment.zbpipe(PATCHED, ZBPIPE_PATCH="1") == "zbpipe._patch\n"
    assert environment.uv("pip", "uninstall", "zbpipe").returncode == 0
    assert not list(environment.site.glob("*zbpipe*"))


def test_the_source_tree_in_front_of_an_install_says_where_that_is(environment, project):
    environment.pip("install", ".", cwd=project)
    said = environment.run("-c", "import zbpipe", cwd=project).stdout.splitlines()[-1]
    assert said == (
        f"ImportError: zbpipe was never built in {project / 'zbpipe'}, its compiled part zbpipe._C is not there: a built "
        f"zbpipe is installed in {environment.site / 'zbpipe'}, and {project} comes before it on sys.path: run Python from "
        f"another directory, or build the source tree, too: in {project}, run "
        "`pip install --force-reinstall --no-deps --editable .`."
    )
    assert environment.zbpipe() == "42\n"
    environment.remove_zbpipe()


def test_what_pythonpath_finds_patches_too(environment, project, tmp_path):
    target = tmp_path / "libraries"
    environment.pip("install", "--no-deps", "--target", target, ".", cwd=project)
    assert environment.zbpipe(IDLE, PYTHONPATH=str(target), ZBPIPE_PATCH="1") == "set()\n"
    assert environment.zbpipe(PATCHED, PYTHONPATH=str(target)) == "torch.distributed.pipelining._backward\n"
    assert environment.zbpipe(PATCHED, PYTHONPATH=str(target), ZBPIPE_PATCH="1") == "zbpipe._patch\n"
    said = environment.zbpipe("import zbpipe\n" + PATCHED, PYTHONPATH=str(target), ZBPIPE_PATCH="1")
    assert said == "zbpipe._patch\n"


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_no_compiler_is_one_sentence(environment, project, variable):
    environment.pip("install", "setuptools>=77.0.3", "ninja", cwd=project)
    done = environment.run("setup.py", "build", cwd=project, **{variable: "no-such-compiler -O2"})
    assert done.returncode == 1
    said = [
        line for line in done.stdout.splitlines(True) if "No CUDA runtime is found" not in line
    ]  # torch's, of itself
    assert "".join(said) == (
        "zbpipe: there is no compiler 'no-such-compiler', and zbpipe is C and C++: install gcc and g++ (Debian: apt-get "
        f"install build-essential), or name another in {variable}, then install zbpipe again.\n"
    )


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ("None", "no setuptools"),
        ("types.SimpleNamespace(__version__='65.5.0')", "setuptools 65.5.0"),
        ("types.SimpleNamespace(__version__='77.0.2.post1')", "setuptools 77.0.2.post1"),
    ],
)
def test_no_setuptools_or_an_old_one_is_one_sentence(there, found, environment, project):
    code = (
        f"import sys, types; sys.modules['setuptools'] = {there}; sys.path[:0] = ['build_backend']; import zbpipe_build"
    )
    done = environment.run("-c", code, cwd=project)
    assert done.returncode == 1
    assert done.stdout == (
        f"zbpipe: this build runs without isolation, and {environment.path} has {found}: install "
        "setuptools>=77.0.3 and ninja there, then install zbpipe again.\n"
    )


def test_a_module_that_is_gone_is_not_installed_again(environment, project):
    environment.pip("install", "setuptools>=77.0.3", "ninja", cwd=project)
    for there in (True, False):
        extra = project / "zbpipe" / "extra.py"
        extra.touch() if there else extra.unlink()
        environment.pip("install", "--no-build-isolation", "--force-reinstall", "--no-deps", ".", cwd=project)
        assert (environment.site / "zbpipe" / "extra.py").exists() == there
    assert not list(project.glob("*.egg-info"))
    environment.remove_zbpipe()


def test_editable_install_and_a_torch_that_changed_since(environment, project):
    environment.pip("install", "-e", ".", cwd=project)
    in_the_tree = environment.run("-c", "import zbpipe", cwd=project)  # as README's commands run
    assert in_the_tree.returncode == 0, in_the_tree.stdout
    assert environment.zbpipe("import zbpipe; print(zbpipe.__file__)") == f"{project / 'zbpipe' / '__init__.py'}\n"
    assert environment.zbpipe() == "42\n"
    assert environment.zbpipe(PATCHED, ZBPIPE_PATCH="1") == "zbpipe._patch\n"

    info = project / "zbpipe" / "_build_info.py"
    written = info.read_text()
    assert f"torch_version = '{torch.__version__}'" in written
    mend = "pip install --force-reinstall --no-deps --editable ."

    def complaint():
        return environment.zbpipe().splitlines()[-1]

    for built, words in [
        (f"torch_version = '{torch.__version__}'", ("torch_version = '2.10.0'", "torch 2.10.0", torch.__version__)),
        (f"torch_git_version = '{torch.version.git_version}'", ("torch_git_version = 'abc'", "git abc", "git ")),
        ("torch_cxx11_abi = True", ("torch_cxx11_abi = False", "C++11 ABI 0", "C++11 ABI 1")),
        (f"'{sys.implementation.cache_tag}'", ("'cpython-39'", "Python cpython-39", sys.implementation.cache_tag)),
        ("zbpipe_version = '", ("zbpipe_version = '9.", "zbpipe 9.", "this process has zbpipe")),
    ]:
        assert built in written
        info.write_text(written.replace(built, words[0]))
        said = complaint()
        assert said.startswith("ImportError: zbpipe was built with ")
        assert all(word in said for word in [*words[1:], mend])

    info.write_text(written)
    (extension,) = project.glob("zbpipe/_C*.so")
    extension.rename(project / "elsewhere.so")
    assert re.match(r"ImportError: zbpipe's compiled part zbpipe._C is gone from ", complaint())
    info.unlink()
    said = complaint()
    assert said.startswith("ImportError: zbpipe was never built in ")
    assert mend in said
    (environment.site / "sees_torch.pth").rename(environment.path / "kept")
    try:
        said = complaint()
    finally:
        (environment.path / "kept").rename(environment.site / "sees_torch.pth")
    assert said.startswith("ImportError: zbpipe needs torch, and the Python at ")
    environment.remove_zbpipe()


def test_source_distribution_builds_the_same_wheel(environment, bare_environment, project, tmp_path):
    (project / "zbpipe" / "_build_info.py").write_text("a leftover of another build")
    code = "import sys; sys.path[:0] = ['build_backend']; import zbpipe_build as b; b.build_sdist(sys.argv[1])"
    environment.pip("install", "setuptools>=77.0.3", "ninja", cwd=project)
    done = environment.run("-c", code, tmp_path, cwd=project)
    assert done.returncode == 0, done.stdout
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
        described = next(name for name in file.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO"))
        assert b"\nRequires-Dist: torch>=2.11\n" in file.extractfile(described).read()
    assert {
        "build_backend/zbpipe_build.py",
        "hook/zbpipe.pth",
        "hook/_zbpipe_hook.py",
        "csrc/core/base/zbp_answer.h",
    } <= names
    assert "zbpipe/_build_info.py" not in names

    environment.pip("wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, archive, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        record = [line.split(",") for line in file.read("zbpipe-0.1.0.dist-info/RECORD").decode().splitlines()]
        for name, digest, size in record:
            if digest:  # its own line has none
                assert (digest, size) == (digest_of(file.read(name)), str(file.getinfo(name).file_size)), name
        metadata = file.read("zbpipe-0.1.0.dist-info/METADATA").decode()
    assert sorted(names) == sorted(name for name, _, _ in record)
    assert len(names) == len(set(names))
    wanted = f"torch=={importlib.metadata.version('torch')}"
    assert [line for line in metadata.splitlines() if "Requires-Dist: torch" in line] == [f"Requires-Dist: {wanted}"]
    assert {"zbpipe.pth", "_zbpipe_hook.py", "zbpipe_pytest.py", "zbpipe/_build_info.py", "zbpipe/py.typed"} <= set(
        names
    )
    assert not [name for name in names if Path(name).suffix in (".c", ".h", ".cpp") or name.startswith("build_backend")]

    # pip knows where it can be installed: here, and not beside another torch.
    environment.pip("install", wheel, cwd=tmp_path)
    environment.pip("check", "zbpipe", cwd=tmp_path)
    assert environment.zbpipe() == "42\n"
    environment.remove_zbpipe()
    other = bare_environment.site / "torch-2.10.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0\n")
    install = ["-m", "pip", "install", "--isolated", "--no-index", wheel]
    done = bare_environment.run(*install, PIP_CONFIG_FILE=os.devnull)
    assert done.returncode == 1
    assert f"No matching distribution found for {wanted}" in done.stdout


def digest_of(data):
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def test_no_torch_is_one_sentence_and_downloads_none(bare_environment, project):
    said = bare_environment.pip("install", ".", cwd=project, fails=True)
    sentence = [line.strip() for line in said.splitlines() if "zbpipe: torch" in line]
    assert sentence == [
        f"zbpipe: torch is not installed in {bare_environment.path}, and zbpipe is built against the torch that will "
        "import it: install torch 2.11 or newer there, then install zbpipe again."
    ]
    assert "Traceback" not in said
    assert "Collecting torch" not in said

    (bare_environment.site / "torch").mkdir()
    (bare_environment.site / "torch-2.6.0.dist-info").mkdir()
    (bare_environment.site / "torch" / "__init__.py").touch()
    (bare_environment.site / "torch-2.6.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.6.0\n")
    said = bare_environment.pip("install", ".", cwd=project, fails=True)
    assert "zbpipe: torch 2.6.0 is installed in " in said
    assert "Collecting torch" not in said


@pytest.mark.parametrize("prefix", ["/tmp/build-env-abc123", "/home/me/.cache/uv/builds-v0/.tmpAbC"])
def test_a_hidden_torch_gets_its_own_sentence(monkeypatch, prefix):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "build_backend")
    import zbpipe_build

    monkeypatch.setattr(zbpipe_build, "see_environment", lambda: None)
    monkeypatch.setattr(zbpipe_build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(zbpipe_build.sys, "prefix", prefix)
    with pytest.raises(
        SystemExit, match=rf"isolated environment \({prefix}\) that hides the torch .*--no-build-isolation"
    ):
        zbpipe_build.require_torch()


def test_warnings_in_c_stop_a_strict_build(environment, project):
    (project / "csrc" / "core" / "base" / "zbp_answer.c").write_text(
        '#include "core/base/zbp_answer.h"\nint zbp_answer(void) { long class = 42; return class; }\n'
    )
    environment.pip("install", "setuptools>=77.0.3", "ninja", cwd=project)
    done = environment.run("setup.py", "build_ext", cwd=project, ZBPIPE_WERROR="1")
    assert done.returncode != 0
    assert "-Werror=conversion" in done.stdout
