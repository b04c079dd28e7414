"""python -m zbpipe COMMAND, or zbpipe COMMAND. A command's --help is its module's docstring."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zbpipe._cli import doctor, explain, leaks

_AS_WRITTEN = argparse.RawDescriptionHelpFormatter  # the others wrap, also the version, which is one line
EPILOG = """\
The passes themselves need no command: zbpipe.patch() in the script, or
ZBPIPE_PATCH=1 in the environment, gives them to torch's schedules.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="zbpipe" if Path(sys.argv[0]).name == "zbpipe" else "python -m zbpipe",
        description="What is installed, what waits for W, what leaks.\nEach command has its --help.",
        epilog=EPILOG,
        formatter_class=_AS_WRITTEN,
    )
    parser.add_argument("--version", action="version", version=doctor.version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command, words in (
        ("doctor", doctor, "say what is installed here, whether this torch is known, and what would not work"),
        ("explain", explain, "say which gradients of a stage W computes, and why I computes the others"),
        ("leaks", leaks, "run a training script and show what grows from step to step, and who holds it"),
    ):
        command.add_arguments(
            commands.add_parser(name, help=words, description=command.__doc__, formatter_class=_AS_WRITTEN)
        )
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    return int(given.run(given))
