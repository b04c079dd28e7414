"""Bodies of tests run again and again leave nothing behind: a sample of `make repeat`, and that it sees what does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import environment

TESTS = Path(__file__).parent
SAMPLE = ["release/test_release_storage.py"]
LEAVING = """
import torch
import zbpipe

kept = []


def passes(keep):
    x, w = torch.randn(2, 3, requires_grad=True), torch.nn.Parameter(torch.randn(3, 3))
    out = (x @ w).exp()
    groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])[1]
    kept.append(groups) if keep else zbpipe.stage_backward_weight([w], groups)


def test_nothing():
    passes(False)


def test_once():
    kept or kept.append([])


def test_groups():
    passes(True)


def test_tensors():
    kept.append(torch.ones(3))


def test_objects():
    kept.append([])


def test_blocks():
    kept.append("text %d" % len(kept))
"""


def repeated(*arguments):
    command = [sys.executable, "-m", "pytest", "-c", "../pyproject.toml", "--rootdir", "..", "-p", "support.repeat"]
    env = environment(OMP_NUM_THREADS="1", PYTHONMALLOC="debug")
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
    command += ["-q", "-p", "no:cacheprovider", *map(os.fspath, arguments)]
    done = subprocess.run(command, cwd=TESTS, env=env, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_bodies_leave_nothing_behind():
    status, said = repeated(*SAMPLE)
    assert status == 0, said[-3000:]


@pytest.mark.slow
def test_what_is_left_behind_is_seen(tmp_path):
    (tmp_path / "test_leaving.py").write_text(LEAVING)
    status, said = repeated(tmp_path / "test_leaving.py")
    assert status == 1
    failed = {line.split("::")[1].split()[0] for line in said.splitlines() if line.startswith("FAILED")}
    assert failed == {"test_groups", "test_tensors", "test_objects", "test_blocks"}, said
    assert "'bytes held by groups'" in said and "'tensors'" in said
