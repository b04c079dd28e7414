"""Run a training script, and show the tensors and bytes that live after each of
its steps, what grew, and who holds it.

A step is a call of the step() of a schedule of torch.distributed.pipelining;
without a schedule, of an optimizer's. Of several, the first that steps counts.
For a loop without either (evaluation, inference), name the first line of the
loop's body by --step-at: a step ends whenever the script reaches that line.
The garbage collector is off while steps are watched, so growth includes what
only the collector would free. Options come before the script:

    python -m zbpipe leaks --steps 20 train.py --lr 1e-3
    python -m zbpipe leaks --step-at serve.py:31 serve.py
    torchrun --nproc-per-node 2 -m zbpipe leaks --error train.py

Under torchrun there is one report over all ranks.

Exit status: the script's own if that is not 0; 3 if something grew and --error
is given, but not for a window that is not full yet; 4 if there were too few
steps to tell; 2 for a wrong command line; else 0.
"""

import argparse
import contextlib
import functools
import os
import sys
import types
from pathlib import Path
from typing import NoReturn

from zbpipe._cli import ranks, script
from zbpipe._cli.files import file_to_write
from zbpipe._cli.steps import OPTIMIZER, Steps
from zbpipe.leaks import Growth
from zbpipe.leaks._collector import collector
from zbpipe.leaks._grown import lines_of
from zbpipe.leaks._report import Report, refusal_of
from zbpipe.leaks._verdict import FEWEST, rises

GREW, TOO_FEW = 3, 4  # exit statuses; 1 and others are the script's own, 2 is a wrong command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=functools.partial(_number, least=FEWEST),
        metavar="N",
        help="watch N steps, then end the script (default: all)",
    )
    parser.add_argument(
        "--warmup", type=_number, default=2, metavar="N", help="steps that are not watched (default: %(default)s)"
    )
    parser.add_argument(
        "--step-at", type=_line, metavar="FILE:LINE", help="a step ends whenever this line is about to run"
    )
    parser.add_argument("--picture", type=_picture, metavar="FILE", help="draw who holds what grew: .dot, .svg or .png")
    parser.add_argument("--error", action="store_true", help=f"exit with status {GREW} if anything grew")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    parser.set_defaults(run=run, parser=parser)


def _number(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps; give {least} or more")
    return int(text)


def _line(text: str) -> tuple[str, int]:
    file, _, line = text.rpartition(":")
    if not Path(file).is_file() or not line.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not FILE:LINE of a file that is there")
    try:
        codes = [compile(Path(file).read_bytes(), file, "exec")]
    except SyntaxError as error:
        raise argparse.ArgumentTypeError(f"{file} is no Python: {error}") from None
    for code in codes:  # which becomes longer meanwhile
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    if int(line) not in {number for code in codes for _, _, number in code.co_lines() if number}:
        raise argparse.ArgumentTypeError(f"at {text} no statement begins, so no step would end there")
    return os.path.realpath(file), int(line)


def _picture(text: str) -> Path:
    path = file_to_write(text)
    if refusal := refusal_of(path):
        raise argparse.ArgumentTypeError(refusal)
    return path.with_stem(f"{path.stem}.rank{ranks.rank()}") if ranks.count() > 1 else path


def run(given: argparse.Namespace) -> int:
    """The exit status: the script's own, or what its steps deserve. The script's exceptions pass, after the report."""
    if not given.module and not Path(given.script).is_file():
        given.parser.error(f"there is no file {given.script}; options of the script come after its name")
    steps = Steps(given.warmup, given.steps, given.step_at)
    stdout = sys.stdout  # the script may close it, or put something else in its place
    process, has_failed, has_said, judged = os.getpid(), True, False, 0
    end_at_once = os._exit

    def report() -> None:
        nonlocal judged, has_said
        if os.getpid() == process and not has_said:  # a child that the script forked has nothing to report
            has_said = True
            with collector:  # whose run over all leaks takes longer than the text
                text, judged = _report(steps, given)
            ranks.say_together(text, stdout, has_failed)

    def report_and_end(status: int) -> NoReturn:
        """In the place of os._exit, which lets nothing else run."""
        with contextlib.suppress(Exception):
            report()
        end_at_once(status or judged)

    vars(os)["_exit"] = report_and_end
    try:
        with steps.seen_from_outside():
            status = script.run(given.script, given.args, given.module)
        has_failed = False
    finally:
        vars(os)["_exit"] = end_at_once
        report()
    return status or judged


def _report(steps: Steps, given: argparse.Namespace) -> tuple[str, int]:
    """The report, and the exit status that the steps deserve. Draws the picture, too."""
    growth, whose = steps.judged(), ""
    if steps.steppers > 1:
        what = "optimizers" if steps.kind == OPTIMIZER else "schedules"
        whose = f"; {steps.steppers} {what} have stepped, and one's steps count"
    if growth is None:
        seen = f"{steps.seen} steps ({steps.kind}) were seen{whose}" if steps.seen else "no step was seen"
        needed = f"to tell what grows {steps.warmup} of warm-up and {FEWEST} more are needed"
        what = (
            "A step ends whenever the line of --step-at is about to run"
            if given.step_at
            else "A step is a call of a pipeline schedule's step() or an optimizer's. Where there is none (evaluation, "
            "inference), give --step-at FILE:LINE, the first line in the body of the loop"
        )
        return f"zbpipe leaks: {seen}; {needed}. {what}.", TOO_FEW
    head = f"zbpipe leaks: {len(growth.counts)} steps ({steps.kind}) after {steps.warmup} of warm-up{whose}"
    said = lines_of(steps.found, growth.filling, growth.cycles)
    times = max(rises(growth.counts), rises(growth.bytes))
    nothing = "nothing grew" + (f"; memory rose {times} times in the later half: watch more steps" if times > 1 else "")
    said = [*said, f"({_as_of(steps, growth)})"] if said else [nothing]
    if given.picture and steps.found:
        leaks = sorted((leak for grown in steps.found for leak in grown.leaks), key=lambda leak: -leak.bytes)
        try:
            Report(leaks, growth.cycles if leaks else []).draw(given.picture)
        except Exception as failed:
            said.append(f"the picture was not drawn: {failed}")
    return "\n\n".join([head, growth.counts_table(), "\n".join(said)]), GREW if given.error and steps.found else 0


def _as_of(steps: Steps, growth: Growth) -> str:
    watched, newer = len(growth.counts), growth.since_the_search()
    more = f"; {newer} more since, for whose holders give --steps {watched}"
    return f"as of step {steps.looked_at}" + (more if newer and steps.looked_at < watched else "")
