"""What the commands that run a script take alike: the script, numbers of steps, files to write."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zbpipe._cli import ranks
from zbpipe._cli.script import run_module, run_script


def add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")


def natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps")
    return int(text)


def refuse_script(given: argparse.Namespace) -> None:
    """Exit if the script is not there."""
    if not given.module and not Path(given.script).exists():
        given.parser.error(f"there is no file {given.script}; options of the script come after its name")


def refuse_files(given: argparse.Namespace, *options: str) -> None:
    """Exit if a file that is asked for cannot be written; the script may change the working directory."""
    for option in options:
        path = getattr(given, option)
        if path is None:
            continue
        if path.is_dir():
            given.parser.error(f"--{option} {path} is a folder; name a file in it")
        if not path.absolute().parent.is_dir():
            given.parser.error(f"--{option} {path}: there is no folder {path.parent}; make it first")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            given.parser.error(f"--{option} {path}: it may not be written; name another file")
        setattr(given, option, path.absolute())


def run_given(given: argparse.Namespace, steps: Any, report: Callable[[Any, argparse.Namespace], int]) -> int:
    """Run the script, its steps seen, then report. Returns the exit status: the script's own, or what the report says.
    The script's exceptions pass, after the report."""
    ranks.stdout = sys.stdout
    process, judged = os.getpid(), 0
    try:
        with steps.seen_from_outside():
            status = _status_of_script(given)
    except BaseException as error:
        if os.getpid() == process:
            steps.fail(error)
        raise
    finally:
        if os.getpid() == process:  # a child that the script forked has nothing to report
            judged = report(steps, given)
    return status or judged


def _status_of_script(given: argparse.Namespace) -> int:
    try:
        (run_module if given.module else run_script)(given.script, given.args)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)  # as Python itself has it
        return 1
    return 0
