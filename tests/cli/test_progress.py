"""What a command says while it takes long: on a terminal, on one rank, seldom."""

import contextlib
import io

import pytest

from zbpipe._cli import main, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass with each look at it."""
    times = iter(range(0, 10**6, 3))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(times)))


def on_terminal(*command):
    """What it says there."""
    with contextlib.redirect_stderr(Terminal()) as said:
        assert main(command) == 0
    return said.getvalue()


TRAINING = """
import torch
w = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.SGD([w])
for _ in range(8):
    w.sum().backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    return "train.py"


def test_steps_are_counted(script, clock):
    said = on_terminal("leaks", "--steps", "5", script).splitlines()
    assert said[0] == "zbpipe leaks: step 1 of 5"
    assert said[4] == "zbpipe leaks: step 5 of 5, looking who holds what grew"
    assert len(said) == 5


def test_a_recording_and_its_file_are_said(script, clock, tmp_path):
    said = on_terminal("memory", "--out", "step.json", script)
    assert said == f"zbpipe memory: recording step 2\nzbpipe memory: writing {tmp_path / 'step.json'}\n"


def test_explain_says_what_it_runs(tmp_path, clock):
    path = tmp_path / "stage.py"
    path.write_text("import torch\ndef stage():\n    return torch.nn.Linear(2, 2), torch.ones(1, 2)\n")
    assert on_terminal("explain", f"{path}:stage") == "zbpipe explain: running the stage, forward and backward\n"


def test_what_is_quick_says_nothing(script, monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    assert on_terminal("leaks", "--steps", "5", script) == ""


@pytest.mark.parametrize("kind", ["no terminal", "closed", "none", "another rank"])
def test_nobody_is_told_who_does_not_look(kind, monkeypatch, clock):
    said = io.StringIO() if kind == "no terminal" else None if kind == "none" else Terminal()
    if kind == "closed":
        said.close()
    if kind == "another rank":
        monkeypatch.setenv("RANK", "1")
    with contextlib.redirect_stderr(said):
        progress.Progress("leaks")("step 1")
    assert kind in ("closed", "none") or said.getvalue() == ""
