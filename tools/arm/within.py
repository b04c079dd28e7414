"""A plugin of pytest for tools/arm: files in alphabetical order until MINUTES are over, and the names of those left.

It leaves out the tests that emulated.txt names, for the emulator's sake.
"""

import os
import time
from pathlib import Path

import pytest

BEGAN = time.monotonic()
LISTED = (Path(__file__).parent / "emulated.txt").read_text().splitlines()
EMULATED = [line.split()[0] for line in LISTED if line and not line.startswith("#")]
waiting: dict[str, int] = {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if item.nodeid.startswith(tuple(EMULATED))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted((item for item in items if item not in left_out), key=lambda item: item.path)
    for item in items:
        waiting[item.location[0]] = waiting.get(item.location[0], 0) + 1


def pytest_runtest_logreport(report):
    if report.when == "teardown":
        waiting[report.location[0]] -= 1


def pytest_runtest_teardown(item):
    if time.monotonic() - BEGAN > 60 * float(os.environ["MINUTES"]):
        item.session.shouldstop = f"{os.environ['MINUTES']} minutes are over"


def pytest_terminal_summary(terminalreporter):
    left = {file: count for file, count in waiting.items() if count}
    terminalreporter.line(f"not run: {sum(left.values())} tests of {len(left)} files")
    for file, count in left.items():
        terminalreporter.line(f"  {count} of {file}")
