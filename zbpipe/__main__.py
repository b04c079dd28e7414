"""python -m zbpipe COMMAND"""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zbpipe", description="zbpipe's commands")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    from zbpipe.leaks import command as leaks

    leaks.add_arguments(
        commands.add_parser(
            "leaks",
            help="run a training script and show what grows from step to step, and who holds it",
            description=leaks.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    given = parser.parse_args(arguments)
    return int(given.run(given))


if __name__ == "__main__":
    sys.exit(main())
