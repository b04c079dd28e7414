"""Faults planted in a copy of the sources, each of which the device that runs late must find."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))

pytestmark = [pytest.mark.long, pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

STREAMS = "csrc/shim/group/streams.h"

# What is changed, and the cases that must fail.
MUTANTS = {
    "W does not wait for its caller": (
        STREAMS,
        "order(callers_stream(stream), stream);",
        "(void)stream;",
        "streams",
    ),
    "the caller does not wait for W": (STREAMS, "order(stream, callers_stream(stream));", "(void)stream;", "streams"),
    "the other one waits": (STREAMS, "second.wait(done);", "first.wait(done);", "streams"),
    "events of the wrong stream": (STREAMS, "done.record(first);", "done.record(second);", "streams"),
    "a root's gradient is not waited for": (STREAMS, "    order(current, stream);\n", "", "streams"),
    "the allocator is not told of a root's gradient": (
        STREAMS,
        "    device.recordDataPtrOnStream(grad.storage().data_ptr(), stream);\n",
        "",
        "streams",
    ),
    "W without the engine does not join": (
        "csrc/pass/weight_pass.c",
        "status = zbp_join_streams(group, error);",
        "",
        "streams",
    ),
    "what a W that raised has added is not joined": (
        "csrc/pass/weight_pass.c",
        "            join_what_has_run(group[g]);\n",
        "            (void)join_what_has_run;\n",
        "hooks",
    ),
    "W on its caller's stream": (
        "csrc/shim/weight/gradients.cpp",
        "task.device ? std::optional",
        "task.device && !task.device ? std::optional",
        "streams",
    ),
}


def build(tree):
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=tree,
        env={**os.environ, "ZBPIPE_WERROR": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def passes(tree, cases):
    options = ("-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-q", "-x", f"late_device/{cases}_cases.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, options), "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=ROOT / "tests",
        env={**os.environ, "PYTHONPATH": str(tree), "ZBPIPE_UNDER": str(tree)},
        capture_output=True,
        text=True,
    )
    assert " passed" in done.stdout or " failed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    return " failed" not in done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = tmp_path_factory.mktemp("mutants") / "tree"
    names = ("csrc", "zbpipe", "hook", "setup.py", "pyproject.toml", "README.md", "LICENSE")
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        tree.mkdir(exist_ok=True)
        copy(ROOT / name, tree / name)
    for built in tree.glob("zbpipe/_native/torch_*"):
        shutil.rmtree(built)
    build(tree)
    return tree


def test_the_copy_is_right(tree):
    assert passes(tree, "streams")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(tree, name):
    file, before, after, cases = MUTANTS[name]
    text = (tree / file).read_text()
    assert text.count(before) == 1, f"{file} has changed: plant the fault anew"
    try:
        (tree / file).write_text(text.replace(before, after))
        build(tree)
        assert not passes(tree, cases)
    finally:
        (tree / file).write_text(text)
