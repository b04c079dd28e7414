"""Copies of the sources, in which faults are planted, and their builds."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))

needs_a_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def copy(tree):
    """All that a build needs, without what was built."""
    tree.mkdir()
    for name in ("csrc", "zbpipe", "_zbpipe_hook", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tree / name)
    for built in tree.glob("zbpipe/_native/torch_*"):
        shutil.rmtree(built)
    return tree


def plant(file, before, after):
    """The text that the file had."""
    text = with_place(file, before)
    file.write_text(text.replace(before, after))
    return text


def with_place(file, before):
    """The text of a file in which a fault can be planted."""
    text = file.read_text()
    assert text.count(before) == 1, f"{file.name} has changed: plant the fault anew"
    return text


def build(tree):
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=tree,
        env={**os.environ, "ZBPIPE_WERROR": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def run(tree, *arguments):
    """What Python did with these arguments, in the folder of the tests, on the tree's zbpipe."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT / "tests",
        env={**os.environ, "PYTHONPATH": str(tree), "ZBPIPE_UNDER": str(tree)},
        capture_output=True,
        text=True,
    )
