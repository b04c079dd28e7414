"""Commands that run a script, in this process."""

import contextlib
import sys

from support.leaks import collects, records
from zbpipe._cli import main


@contextlib.contextmanager
def running(command, tmp_path, monkeypatch, capsys):
    """A function that runs the command on a script, and gives the exit status and what was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def run(source, *arguments, options=()):
        (tmp_path / "train.py").write_text(source)
        status = main([command, *options, "train.py", *arguments])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    yield run
    assert collects() and not records()
