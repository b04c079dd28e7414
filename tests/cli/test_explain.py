"""python -m zbpipe explain, and zbpipe as a command of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import environment

import zbpipe
from zbpipe._cli import main

PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"
MODEL = """
import beside_the_model_of_a_test
import torch
from torch import nn

def stage():
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32)), torch.randn(8, 16)

def nothing():
    return 3

def failing():
    raise LookupError("no weights here")

value = 3
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    (tmp_path / "model_of_a_test.py").write_text(MODEL)
    (tmp_path / "beside_the_model_of_a_test.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("model_of_a_test", None)


@pytest.mark.parametrize("where", ["model_of_a_test.py", "model_of_a_test"])
def test_a_stage_is_explained(model, capsys, where):
    assert main(["explain", f"{where}:stage", "--json", "plan.json"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("W computes the gradients of 2 of 4 parameters in 2 groups: ")
    data = json.loads((model / "plan.json").read_text())
    assert {"schema": 1, "zbpipe": zbpipe.__version__, "what": f"{where}:stage", "groups": 2}.items() <= data.items()
    said = PAGE.read_text().partition("`explain --json` writes")[2].partition("\n\n")[0]
    assert data.keys() == set(re.findall(r"`(\w+)`", said))
    assert [(p["name"], p["runs_in"]) for p in data["parameters"]][2:] == [("1.weight", "W"), ("1.bias", "W")]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("model_of_a_test.py", "names no function"),
        ("model_of_a_test.py:", "names no function"),
        ("gone.py:stage", "there is no file gone.py"),
        ("gone.deeper:stage", "there is no module gone.deeper; a file ends in .py"),
        ("model_of_a_test.py:gone", "has no function gone"),
        ("model_of_a_test.py:value", "has no function value"),
        ("model_of_a_test.py:nothing", "nothing() gave a int; expected a pair, a torch.nn.Module and its inputs"),
    ],
)
def test_what_cannot_be_explained_is_refused(model, capsys, what, words):
    with pytest.raises(SystemExit) as ended:
        main(["explain", what])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_what_the_function_raises_passes(model):
    with pytest.raises(LookupError, match="no weights here"):
        main(["explain", "model_of_a_test.py:failing"])


def installed_command():
    """The script beside this Python, if what is tested was installed there with one."""
    path = Path(sys.executable).parent / "zbpipe"
    return path if path.exists() else None


@pytest.mark.slow
@pytest.mark.skipif(installed_command() is None, reason="zbpipe's command is not installed beside this Python")
def test_the_command_of_its_own_runs_a_script_as_python_does(tmp_path):
    (tmp_path / "train.py").write_text("import os, sys\nprint(__name__, sys.argv, os.path.basename(sys.path[0]))\n")
    env = environment(OMP_NUM_THREADS="1", PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        [installed_command(), "leaks", "train.py", "--lr", "1"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert f"__main__ ['train.py', '--lr', '1'] {tmp_path.name}\n" in done.stdout
    done = subprocess.run([installed_command(), "--help"], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("usage: zbpipe [-h]")
