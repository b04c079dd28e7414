"""Starts processes, the ranks of a job on one script and code that may crash, and reads what ranks left."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]


def environment(**variables):
    """This process's, in which Python finds what it finds here, and further `variables`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}


def run_ranks(script, world, folder, *arguments, timeout=150, **variables):
    """`script`, named from tests/ on, once per rank, with (rank, world, folder, *arguments) and further environment
    `variables`; what rank r prints goes to output.r in `folder`.

    Raises subprocess.TimeoutExpired for a rank that has not ended after `timeout` seconds. None is left running.
    """
    env = environment(OMP_NUM_THREADS="1", **variables)
    path = str(TESTS / script)
    ranks = []
    for rank in range(world):
        with open(folder / f"output.{rank}", "w") as output:
            command = [sys.executable, path, str(rank), str(world), str(folder), *arguments]
            ranks.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
    try:
        for rank in ranks:
            rank.wait(timeout=timeout)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def folder_of(script, world, **options):
    """A module's fixture: where the ranks of `script` leave their results. They run once, for its first test."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory):
        folder = tmp_path_factory.mktemp(Path(script).stem)
        run_ranks(script, world, folder, **options)
        return folder

    return folder


def results(folder, name, world, load=torch.load):
    """What each rank left as NAME.RANK. Where one left nothing the test fails, with what the ranks said instead."""
    files = [folder / f"{name}.{rank}" for rank in range(world)]
    if not all(file.exists() for file in files):
        failed = [file for rank in range(world) if (file := folder / f"{name}.{rank}.failed").exists()]
        said = failed or [folder / f"output.{rank}" for rank in range(world)]
        pytest.fail("\n".join([f"{name} did not finish", *(file.read_text()[-3000:] for file in said)]))
    return [load(file) for file in files]


def from_json(file):
    return json.loads(file.read_text())


def together(folder, name, world):
    """What the ranks left, each a dictionary of its own part, as one."""
    return {what: value for part in results(folder, name, world) for what, value in part.items()}


def assert_close(got, wanted):
    """Of dictionaries of tensors."""
    assert got.keys() == wanted.keys(), f"on one side alone: {got.keys() ^ wanted.keys()}"
    for what, value in wanted.items():
        torch.testing.assert_close(got[what], value, msg=lambda text, what=what: f"{what}: {text}")


def in_own_process(body, timeout=200):
    """A crash of the process is a failure of the test."""
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
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert run.returncode == 0, f"exit status {run.returncode}\n{run.stderr[-2000:]}"
    assert "finished" in run.stdout
