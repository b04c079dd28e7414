"""python -m zbpipe leaks under torchrun, over training on two ranks: quiet where nothing leaks, and right where one rank does."""

import re

import pytest
from support.processes import TESTS, python

JOBS = ["ddp", "fsdp", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]
LONG = pytest.param(200, marks=pytest.mark.long)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def run_job(*arguments):
    command = (*TORCHRUN, "-m", "zbpipe", "leaks", "--error", "leaks/jobs.py", *arguments)
    return python(*command, cwd=TESTS, timeout=300, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("steps", [60, LONG])
@pytest.mark.parametrize("name", JOBS)
def test_nothing_grows(name, steps):
    done = run_job(name, steps)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ranks 0 to 1 of 2")
    assert f": {steps - 2} steps (" in done.stdout
    assert done.stdout.endswith("\n\nnothing grew\n"), done.stdout


@pytest.mark.parametrize(
    ("name", "steps"),
    [("fsdp", 20), ("ScheduleZBVZeroBubble", 20), *(pytest.param(name, 200, marks=pytest.mark.long) for name in JOBS)],
)
def test_a_leak_on_one_rank_is_found(name, steps):
    done = run_job(name, steps, "leak")
    assert re.search(r"rank +: 1 .*\n +exitcode +: 3 ", done.stderr), done.stderr
    quiet, _, grown = done.stdout.partition("\n\nrank 1 of 2:\n")
    assert quiet.startswith("rank 0 of 2:\n") and quiet.endswith("\n\nnothing grew"), done.stdout
    head, *chain = grown.partition("\n\ngrew, and is held by\n")[2].splitlines()
    pattern = r"  \d+ tensors? \(\d+ bytes\) from steps 2 to \d+, held by a list that was never cleared:"
    assert re.fullmatch(pattern, head), done.stdout
    blamed = next(line for line in chain if ">>" in line)
    assert "attribute history of Trainer (leaks/jobs.py:" in blamed, done.stdout
