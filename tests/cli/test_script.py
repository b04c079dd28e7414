"""zbpipe leaks and explain search for modules where Python itself would, also under PYTHONSAFEPATH."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import zbpipe

SAYS_PATH = "import json, sys\nprint('path:', json.dumps(sys.path))\n"
RUNNER = """
import sys
from zbpipe._cli import script, explain
found = list(sys.path)
for what, is_module in ("train.py", False), ("package", True):
    sys.path[:] = found
    script.run(what, [], is_module)
for what in ["train.py", "package.train"]:
    sys.path[:] = found
    explain._imported(what, print)
"""


def paths(command, folder, **environment):
    # The tests' own path first: without site an editable install is found by its folder alone.
    path = os.pathsep.join([str(folder / "library"), str(Path(zbpipe.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, *command], env={**os.environ, "PYTHONPATH": path, **environment}, cwd=folder,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line.removeprefix("path: ") for line in done.stdout.splitlines() if line.startswith("path: ")]
    return [json.loads(line) for line in said]


@pytest.mark.parametrize("is_safe", [False, True])
def test_the_path_of_a_script_is_that_which_python_gives_it(tmp_path, is_safe):
    if is_safe and sys.version_info < (3, 11):
        pytest.skip("PYTHONSAFEPATH came with Python 3.11")
    environment = {"PYTHONSAFEPATH": "1"} if is_safe else {}
    (tmp_path / "library").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for name in ("train.py", "package/__main__.py", "package/train.py"):
        (tmp_path / name).write_text(SAYS_PATH)
    if is_safe:  # where modules are, for python -m finds none here
        (tmp_path / "library" / "package").symlink_to(tmp_path / "package")

    plain = [["train.py"], ["-m", "package"], ["train.py"], ["-m", "package.train"]]
    expected = [absolute(path, tmp_path) for command in plain for path in paths(command, tmp_path, **environment)]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "runner.py").write_text(RUNNER)
    found = paths(["elsewhere/runner.py"], tmp_path, **environment)
    assert [absolute(path, tmp_path) for path in found] == expected


def absolute(path, folder):
    return [os.path.realpath(folder / entry) for entry in path]
