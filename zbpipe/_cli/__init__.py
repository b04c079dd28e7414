"""python -m zbpipe COMMAND"""

import argparse
from collections.abc import Sequence

from zbpipe._cli import doctor, leaks, memory


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m zbpipe",
        description="zbpipe's commands",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # the others wrap the version, which is one line
    )
    parser.add_argument("--version", action="version", version=doctor.version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    doctor.add_arguments(
        commands.add_parser(
            "doctor",
            help="say what is installed here, whether this torch is known, and whether all would work",
            description=doctor.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )

    leaks.add_arguments(
        commands.add_parser(
            "leaks",
            help="run a training script and show what grows from step to step, and who holds it",
            description=leaks.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    memory.add_arguments(
        commands.add_parser(
            "memory",
            help="run a training script up to the end of one step, and show its memory phase by phase",
            description=memory.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    return int(given.run(given))
