import sys

import pytest
from support.leaks import collects, records

from zbpipe._cli import main
from zbpipe.leaks import _growth  # whose searches become rare in a large process


@pytest.fixture(autouse=True)
def _searches_often(monkeypatch):
    """Whatever other tests have left in this process."""
    monkeypatch.setattr(_growth, "_MANY", sys.maxsize)


@pytest.fixture(autouse=True)
def _nothing_kept(request):
    """What a test has put into its module's KEPT is let go of after it."""
    yield
    getattr(request.module, "KEPT", []).clear()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs `zbpipe leaks` on a script in this process: a function that gives the exit status and what was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def run(source, *arguments, options=()):
        (tmp_path / "train.py").write_text(source)
        status = main(["leaks", *options, "train.py", *arguments])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    yield run
    assert collects() and not records()
