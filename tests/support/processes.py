"""Starts processes, the ranks of a job on one script and code that may crash, and reads what ranks left."""

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
QUICK = "ZBPIPE_UNDER" not in os.environ  # a sanitizer looks for leaks at the interpreter's end


def environment(**variables):
    """This process's, in which Python finds what it finds here, and further `variables`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}


def python(*arguments, cwd=None, timeout=120, **variables):
    """What a new Python did with these arguments: a CompletedProcess with its output as text."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


class Forks:
    """A process of support/forks.py, which forks others in the environment that it was started in."""

    def __init__(self, env):
        command = [sys.executable, "-m", "support.forks"]
        self.process = subprocess.Popen(
            command, env=env, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self.close)

    def run(self, processes, timeout):
        """Their exit statuses. Raises subprocess.TimeoutExpired if one had to be killed for the time it took."""
        self.process.stdin.write(json.dumps({"processes": processes, "timeout": timeout}) + "\n")
        self.process.stdin.flush()
        statuses = json.loads(self.process.stdout.readline())
        if None in statuses:
            raise subprocess.TimeoutExpired(processes[statuses.index(None)]["argv"], timeout)
        return statuses

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@functools.cache
def forks_of(env):
    return Forks(dict(env))


def forks(**variables):
    """What forks processes in this one's environment, with further `variables`."""
    env = environment(OMP_NUM_THREADS="1", **variables)
    env.pop("PYTEST_CURRENT_TEST", None)
    return forks_of(tuple(sorted(env.items())))


def run_ranks(script, world, folder, *arguments, timeout=150, started_anew=False, **variables):
    """`script`, named from tests/ on, once per rank, with (rank, world, folder, *arguments) and further environment
    `variables`; what rank r prints goes to output.r in `folder`. Started anew, a rank has imported nothing before.

    Raises subprocess.TimeoutExpired if one has not ended after `timeout` seconds. None is left running.
    """
    path = str(TESTS / script)
    ranks = []
    for rank in range(world):
        output = str(folder / f"output.{rank}")
        ranks.append(
            {"argv": [path, str(rank), str(world), str(folder), *arguments], "output": [output, output], "quick": QUICK}
        )
    if started_anew:
        start_ranks(ranks, timeout, environment(OMP_NUM_THREADS="1", **variables))
    else:
        forks(**variables).run(ranks, timeout)


def start_ranks(ranks, timeout, env):
    end = time.monotonic() + timeout
    with contextlib.ExitStack() as files:
        started = []
        for rank in ranks:
            output = files.enter_context(open(rank["output"][0], "a"))
            command = [sys.executable, *rank["argv"]]
            started.append(subprocess.Popen(command, env=env, cwd=TESTS, stdout=output, stderr=output))
        try:
            for process in started:
                process.wait(max(0, end - time.monotonic()))
        finally:
            for process in started:
                process.kill()
                process.wait()


def results(folder, name, world):
    """What each rank left as NAME.RANK. Where one left nothing the test fails, with what the ranks said instead."""
    files = [folder / f"{name}.{rank}" for rank in range(world)]
    if not all(file.exists() for file in files):
        failed = [file for rank in range(world) if (file := folder / f"{name}.{rank}.failed").exists()]
        said = failed or [folder / f"output.{rank}" for rank in range(world)]
        pytest.fail("\n".join([f"{name} did not finish", *(file.read_text()[-3000:] for file in said)]))
    return [torch.load(file) for file in files]


def in_own_process(body, timeout=200, started_anew=False):
    """A crash of the process is a failure of the test. Started anew, it has imported nothing of torch that `body` does not."""
    start = """
        import sys, time
        import torch
        from support.oracle import zb

        torch.set_num_threads(1)

        def passes(out, x, weights):
            (dinput,), groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], weights)
            assert all(w.grad is None for w in weights)
            zb.stage_backward_weight(weights, groups)
            return dinput
    """
    script = textwrap.dedent(start) + textwrap.dedent(body) + "\nprint('finished')\n"
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        if started_anew:
            with output.open("w") as out, errors.open("w") as err:
                command = [sys.executable, "-c", script]
                status = subprocess.run(command, env=environment(), stdout=out, stderr=err, timeout=timeout).returncode
        else:
            process = {"argv": ["-c"], "code": script, "output": [str(output), str(errors)], "quick": QUICK}
            (status,) = forks().run([process], timeout)
        assert status == 0, f"exit status {status}\n{errors.read_text()[-2000:]}"
        assert "finished" in output.read_text()
