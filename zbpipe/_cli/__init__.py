"""python -m zbpipe COMMAND"""

import argparse
from collections.abc import Sequence

from zbpipe._cli import doctor, leaks, memory

EPILOG = """\
The passes themselves need no command: zbpipe.patch() in the script, or ZBPIPE_PATCH=1 in the environment, gives them to
torch's schedules; zbpipe.explain(module, inputs) says in Python how a stage's backward is split.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m zbpipe",
        description="What is installed, what leaks, where the memory goes. Each command has a --help of its own.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # the others wrap the version, which is one line
    )
    parser.add_argument("--version", action="version", version=doctor.version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command, words in (
        ("doctor", doctor, "say what is installed here, whether this torch is known, and whether all would work"),
        ("leaks", leaks, "run a training script and show what grows from step to step, and who holds it"),
        ("memory", memory, "run a training script up to the end of one step, and show its memory phase by phase"),
    ):
        command.add_arguments(
            commands.add_parser(
                name,
                help=words,
                description=command.DESCRIPTION,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    return int(given.run(given))
