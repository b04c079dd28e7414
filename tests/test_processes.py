"""What the tests fork is as what they would start: its status, its output, its end."""

import os
import subprocess
import sys
import time

import pytest
from support.processes import environment, forks, in_own_process


@pytest.fixture
def run(tmp_path):
    """Forks processes that run these texts, and returns their statuses and what they printed."""

    def run(*texts, timeout=60, variables=None):
        files = [tmp_path / f"output.{number}" for number in range(len(texts))]
        processes = [
            {"argv": ["-c", "word"], "code": text, "output": [str(file)] * 2, "variables": variables or {}}
            for text, file in zip(texts, files)
        ]
        statuses = forks().run(processes, timeout)
        return statuses, [file.read_text() for file in files]

    return run


def test_statuses_are_those_of_processes(run):
    statuses, said = run("pass", "import sys; sys.exit(3)", "1 / 0", "import os; os.abort()")
    assert statuses == [0, 3, 1, -6] and said[2].endswith("ZeroDivisionError: division by zero\n")


def test_they_are_their_own_main_and_see_their_arguments_variables_and_end(run):
    text = (
        "import atexit, os, sys\natexit.register(print, 'end')\ndef f(): pass\n"
        "print(sys.argv, os.environ['OF_MINE'], sys.modules['__main__'].f is f, sys.stdin.read() == '')\n"
        "print('error', file=sys.stderr, flush=True)"
    )
    statuses, (said,) = run(text, variables={"OF_MINE": "7"})
    assert statuses == [0]
    assert sorted(said.splitlines()) == ["['-c', 'word'] 7 True True", "end", "error"]


def test_nothing_of_one_is_in_the_next(run):
    run("import torch\ntorch.manual_seed(7); torch.mine = 1; torch.ones(2, requires_grad=True).sum().backward()")
    text = "import random, torch\nprint(hasattr(torch, 'mine'), torch.initial_seed(), random.random())"
    _, said = run(text, text)
    assert [line.split()[0] for line in said] == ["False", "False"]
    assert said[0].split()[1] != said[1].split()[1] and said[0].split()[2] != said[1].split()[2]


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_takes_too_long_is_killed_with_all_others(run, tmp_path):
    hang = f"import os, time\nopen({str(tmp_path)!r} + f'/{{os.getpid()}}.id', 'w').close()\ntime.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired):
        run("pass", hang, hang, timeout=3)
    ids = [int(file.stem) for file in tmp_path.glob("*.id")]
    assert len(ids) == 2 and not any(map(is_alive, ids))
    assert run("print(1)") == ([0], ["1\n"])


def test_a_process_that_crashes_fails_its_test():
    with pytest.raises(AssertionError, match="exit status -11"):
        in_own_process("import ctypes; ctypes.string_at(0)")
    with pytest.raises(AssertionError, match="nothing of the kind"):
        in_own_process("assert False, 'nothing of the kind'")


def test_none_outlives_the_tests(tmp_path):
    """Of tests that are killed."""
    code = (
        "import threading, os, time\nfrom support.processes import forks\n"
        "sleep = {'argv': ['-c'], 'code': 'import os, time; print(os.getpid(), flush=True); time.sleep(600)',"
        f" 'output': [{str(tmp_path / 'output')!r}] * 2}}\n"
        "threading.Thread(target=forks().run, args=([sleep], 600), daemon=True).start()\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=environment()) as tests:
        end = time.monotonic() + 60
        while not (tmp_path / "output").exists() or not (tmp_path / "output").read_text():
            assert time.monotonic() < end
            time.sleep(0.1)
        tests.kill()
    forked = int((tmp_path / "output").read_text())
    while is_alive(forked):
        assert time.monotonic() < end
        time.sleep(0.1)
