"""A process that has imported torch, and forks others, which need not: each import takes two seconds of CPU time.

    python -m support.forks

It reads jobs from its standard input and answers on its standard output, a line of JSON each. A job is processes: scripts, or
code, with their arguments and the files for what they print; the answer is their exit statuses, null for one that had to be
killed. It runs no operation of torch and has one thread: what it forks is as if started anew, but for what is imported.
A process that is "quick" leaves out the interpreter's end, which takes as long as many a test: that is test_exit.py's.
When its input ends it kills what still runs, and ends.
"""

import json
import os
import random
import select
import signal
import sys
import time
import types
from pathlib import Path

import torch
import torch.distributed.pipelining

import zbpipe  # noqa: F401

LOOK_EVERY = 0.02  # seconds


def run_jobs():
    """Returns in a forked process alone, with what that has to run."""
    threads = len(os.listdir("/proc/self/task")) - ("QEMU_CPU" in os.environ)  # the emulator of tools/arm has one, too
    assert threads == 1, f"{threads} threads: what others hold at a fork nobody gives back in what is forked"
    for line in sys.stdin:
        job = json.loads(line)
        children = []
        for process in job["processes"]:
            child = os.fork()
            if child == 0:
                return process
            children.append(child)
        answer(statuses_of(children, job["timeout"]))
    os._exit(0)


def answer(what):
    print(json.dumps(what), flush=True)


def statuses_of(children, timeout):
    statuses = dict.fromkeys(children)
    end = time.monotonic() + timeout
    try:
        while None in statuses.values() and time.monotonic() < end:
            for child in [child for child, status in statuses.items() if status is None]:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    statuses[child] = os.waitstatus_to_exitcode(status)
            if select.select([0], [], [], LOOK_EVERY)[0]:  # who asked is gone
                break
    finally:
        for child in [child for child, status in statuses.items() if status is None]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return [*statuses.values()]


def become(process):
    """This process, as if started to run that script or code."""
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [os.open(os.devnull, os.O_RDONLY), *(os.open(name, append) for name in process["output"])]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.update(process.get("variables", {}))
    random.seed()
    torch.default_generator.seed()
    sys.argv = process["argv"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if sys.argv[0] == "-c":
        exec(compile(process["code"], "<string>", "exec"), vars(main))
    else:
        path = main.__file__ = sys.argv[0]
        exec(compile(Path(path).read_text(), path, "exec"), vars(main))
    if process.get("quick"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    become(run_jobs())
