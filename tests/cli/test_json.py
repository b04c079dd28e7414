"""What the commands write with --json has the keys that docs/command_line.md says."""

import json
import re
import sys
from pathlib import Path

import pytest
from support.commands import running

from zbpipe._cli import main

PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"
MODEL = "import torch\n\n\ndef stage():\n    return torch.nn.Linear(4, 4), torch.randn(2, 4)\n"
TRAINING = """
import torch

net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(8):
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def documented(command):
    """The schema's number, and the keys of the object itself: not those in brackets or behind a colon."""
    row = re.search(rf"^\| `{command}` \| (\d+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    parts = (re.sub(r"\([^)]*\)", "", part).partition(":")[0] for part in row[2].split(";"))
    return int(row[1]), {key for names in parts for key in re.findall(r"`(\w+)`", names)}


@pytest.fixture
def written(tmp_path, monkeypatch, capsys):
    def written(command, *asked):
        if command in ("leaks", "memory"):
            with running(command, tmp_path, monkeypatch, capsys) as run:
                status, said = run(TRAINING, options=asked)
        else:
            (tmp_path / "model.py").write_text(MODEL)
            monkeypatch.chdir(tmp_path)
            monkeypatch.setattr(sys, "path", list(sys.path))
            status, said = main([command, *asked]), ""
        assert status == 0, said
        (file,) = tmp_path.glob("*.json")
        return json.loads(file.read_text())

    yield written
    sys.modules.pop("model", None)


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ("explain", ["--json", "seen.json", "model.py:stage"]),
        ("leaks", ["--json", "seen.json"]),
        ("memory", ["--json", "seen.json"]),
    ],
)
def test_keys_are_those_of_the_page(command, asked, written):
    number, keys = documented(command)
    seen = written(command, *asked)
    assert seen["schema"] == number
    assert seen.keys() == keys | {"schema"}
