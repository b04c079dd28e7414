"""Runs one script in several processes, as the ranks of a job."""

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(script, world, folder, *arguments, timeout=150, **variables):
    """`script` (a path, or a name in this folder), once per rank, with (rank, world, folder, *arguments) and further
    environment `variables`; what rank r prints goes to output.r in `folder`.

    Raises subprocess.TimeoutExpired for a rank that has not ended after `timeout` seconds. None is left running.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", **variables}
    path = str(Path(__file__).parent / script)
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
