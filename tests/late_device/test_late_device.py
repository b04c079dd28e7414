"""The passes on a device that runs late, without a GPU: every case of the *_cases.py here, and the ordinary tests of the passes.

Each file has a process of its own: a device that is registered stays so for good. Note [What runs when]
(device/schedule.h) says what the device does; support/late.py builds it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = shutil.which(os.environ.get("CXX", "c++"))

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

CASES = sorted(path.name for path in HERE.glob("*_cases.py"))


# Without Python's own end: the engine's threads of a device may outlive the interpreter.
RUN = "import os, sys, pytest; status = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(status)"


def run(*arguments):
    options = ["-c", HERE.parents[1] / "pyproject.toml", "--rootdir", HERE.parents[1], "-q", "--tb=short"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, options), "-p", "no:cacheprovider", "-p", "no:xdist", *arguments],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "ZBPIPE_DEVICE": "late"},
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize("cases", CASES)
def test_cases(cases):
    run(f"late_device/{cases}")


@pytest.mark.parametrize(
    "name", ["oracle", "groups", "hooks", "functions", "threads", "edges", "input_sums", "keeping"]
)
def test_ordinary_tests(name):
    """What tests/ asks of the CPU, asked of the device, each weight pass on a stream of its own."""
    run("-p", "support.on_device", f"passes/test_{name}.py")


@pytest.mark.long
def test_all_combinations():
    run("late_device/pairs_cases.py", "-m", "long")


@pytest.mark.long
def test_all_ordinary_tests():
    run("-p", "support.on_device", "passes", "policy", "kernels", "-m", "not long and not cuda")
