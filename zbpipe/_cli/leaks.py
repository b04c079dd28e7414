"""python -m zbpipe leaks script.py ...: what a training script leaves behind step by step, and who holds it.

The script runs as if Python had been given it. The end of each of its steps is seen from outside: a call of a pipeline
schedule's `step`, of an optimizer's, or of :func:`zbpipe.leaks.step`, or a line that is reached. During the steps that
are watched the garbage collector is off, so that what only it would free counts as growth.
"""

import argparse
import functools
import gc
import json
import os
from pathlib import Path
from typing import Any

import torch

from zbpipe._cli import ranks
from zbpipe._cli.arguments import add_script, natural, refuse_files, refuse_script, run_given
from zbpipe._cli.steps import KINDS, Steps
from zbpipe._formatting import table
from zbpipe._version import __version__
from zbpipe.leaks import Growth
from zbpipe.leaks._alike import numbered_spans
from zbpipe.leaks._draw import refusal_of
from zbpipe.leaks._grown import Grown, lines_of, told
from zbpipe.leaks._growth import FEWEST, report_of

DESCRIPTION = """\
Run a training script, and show the tensors and bytes that live after each of
its steps, what grew, and who holds it.

A step is a call of zbpipe.leaks.step() in the script; without any, a call of
the step() of a schedule of torch.distributed.pipelining; without any, an
optimizer's. Where there are several schedules or optimizers, the first that
steps counts. Where nothing steps, as in evaluation and inference, or where a
step is something else, name a line of the script, the first in the body of
its loop: whenever it is reached, a step has ended. The garbage collector is
off while steps are watched. Options come before the script:

    python -m zbpipe leaks --steps 20 train.py --lr 1e-3
    python -m zbpipe leaks --step-at serve.py:31 serve.py
    torchrun --nproc-per-node 2 -m zbpipe leaks --error train.py

Under torchrun there is one report over all ranks.

Exit status: the script's own if that is not 0; 3 if something grew and --error
is given, but not for a window that is not full yet; 4 if there were too few
steps to tell; 2 for a wrong command line; else 0.
"""
NEEDED = (
    "needed. A step is a call of a pipeline schedule's step() or an optimizer's. Where there is none (evaluation, "
    "inference), give --step-at FILE:LINE, the first line in the body of the loop, or call zbpipe.leaks.step() at its "
    "end."
)
GREW = 3  # exit statuses; 1 and others are the script's own, 2 is a wrong command line
TOO_FEW = 4  # steps to tell
SCHEMA = 3  # of --json; 2 had no "verdict", "nodes" and "filling"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=_steps_to_watch, metavar="N", help="watch N steps, then end the script (default: all)"
    )
    parser.add_argument(
        "--warmup", type=natural, default=2, metavar="N", help="steps that are not watched (default: %(default)s)"
    )
    parser.add_argument(
        "--step-at", type=_line, metavar="FILE:LINE", help="a step ends whenever this line is about to run"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers and holders to FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw who holds what grew: .dot, .svg or .png")
    parser.add_argument("--error", action="store_true", help="exit with status 3 if anything grew")
    add_script(parser)
    parser.set_defaults(run=run, parser=parser)


def run(given: argparse.Namespace) -> int:
    refuse_script(given)
    if given.picture and (refusal := refusal_of(given.picture)):
        given.parser.error(f"--picture {refusal}")
    refuse_files(given, "json", "picture")
    return run_given(given, _Steps(given.warmup, given.steps, given.step_at), _report)


def _steps_to_watch(text: str) -> int:
    if (number := natural(text)) < FEWEST:
        raise argparse.ArgumentTypeError(f"it must be {FEWEST} or more to tell what grows")
    return number


def _line(text: str) -> tuple[str, int]:
    file, _, line = text.rpartition(":")
    if not Path(file).is_file() or not line.isascii() or not line.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not FILE:LINE of a file that is there")
    return os.path.realpath(file), int(line)


class _Steps(Steps):
    """Looks at what lives after each of a script's steps, once the warm-up is over."""

    growth: Growth | None = None
    has_failed = False

    def fail(self, error: BaseException) -> None:
        self.has_failed = True

    def restart(self) -> None:
        if self.growth is not None:
            self.growth.close()
        self.growth = None
        self.found: list[Grown] = []  # what grew at the last look
        self.looked_at = 0
        super().restart()

    def begin(self) -> None:
        gc.collect()
        self.growth = Growth()

    def ended(self, is_last: bool) -> None:
        assert self.growth is not None
        self.growth.step()
        # While the script's variables are there to be named; ever less often, for a search takes its time.
        is_time = is_last or (self.growth.looked_at == self.watched >= max(FEWEST, 2 * self.looked_at))
        if is_time:
            self.found, self.looked_at = self.growth.grown(), self.watched

    def judged(self) -> Growth | None:
        """The counts, closed, when what was found is what still grows; None if there were too few steps to tell."""
        growth, is_enough = self.growth, self.watched >= FEWEST
        if growth is None:
            return None
        if not growth.rising():
            self.found, growth.filling, growth.cycles = [], [], []
        elif is_enough and not self.found and not growth.filling and self.looked_at < self.watched:
            self.found, self.looked_at = growth.grown(), self.watched
        growth.close()
        return growth if is_enough else None


def _report(steps: _Steps, given: argparse.Namespace) -> int:
    """Print, and write what files were asked for. Returns the exit status that the steps deserve."""
    growth, kind = steps.judged(), KINDS[steps.kind]
    if growth is None:
        what = f"{steps.seen} steps ({kind}) were seen{steps.whose}" if steps.seen else "no step was seen"
        head = f"zbpipe leaks: {what}; to tell what grows {steps.warmup} of warm-up and {FEWEST} more are {NEEDED}"
    else:
        head = f"zbpipe leaks: {steps.watched} steps ({kind}) after {steps.warmup} of warm-up{steps.whose}"
        if given.json:
            ranks.file_of(given.json).write_text(json.dumps(_data(steps, growth, given), indent=1) + "\n")
        if given.picture and steps.found:
            report_of(steps.found, growth.cycles).draw(ranks.file_of(given.picture))
    text = functools.partial(text_of, world=ranks.count())
    ranks.say_together(of_rank(head, growth, steps.found, steps.looked_at), text, steps.has_failed)
    return TOO_FEW if growth is None else GREW if given.error and steps.found else 0


def _data(steps: _Steps, growth: Growth, given: argparse.Namespace) -> dict[str, Any]:
    rows = zip(growth.counts, growth.bytes, growth.nodes, strict=True)
    return {
        "schema": SCHEMA,
        "zbpipe": __version__,
        "torch": torch.__version__,
        "command": [given.script, *given.args],
        "rank": ranks.rank(),
        "world_size": ranks.count(),
        "kind": KINDS[steps.kind],
        "warmup": steps.warmup,
        "steps": [{"tensors": count, "bytes": size, "nodes": nodes} for count, size, nodes in rows],
        "looked_at": steps.looked_at,
        "verdict": "grew" if steps.found else "a window that is not full yet" if growth.filling else "nothing grew",
        "grown": report_of(steps.found, growth.cycles).as_dict(),
        "filling": report_of(growth.filling, []).as_dict(),
    }


# ---- the report of a rank, as data; and that of all of them, as text


def of_rank(head: str, growth: Growth | None, grown: list[Grown], looked_at: int) -> dict[str, Any]:
    """For json.dumps: this rank's headline, its numbers after each step, and what grew."""
    if growth is None:
        return {"head": head, "counts": [], "bytes": [], **told([], [], [])}
    numbers = {"counts": growth.counts, "bytes": growth.bytes, "table": growth.counts_table(), "looked_at": looked_at}
    return {"head": head, **numbers, **told(grown, growth.filling, growth.cycles)}


def text_of(reports: dict[int, dict[str, Any]], missing: list[int], world: int) -> str:
    """The reports of some of `world` ranks; of those that are missing it says so."""
    counted = [report for report in reports.values() if report["counts"]]
    if world == 1:
        lines = [report["head"] for report in reports.values()] + [report["table"] for report in counted]
    else:
        heads = {rank: report["head"].removeprefix("zbpipe leaks: ") for rank, report in reports.items()}
        lines = ranks.heading("leaks", heads, world)
        lines += ["", _table_of_ranks(reports)] if counted else []
        lines += ["", ranks.told_by_themselves(missing)] if missing else []
    if not counted:
        return "\n".join(lines)
    said = lines_of(reports, ranks.numbered if world > 1 else None)
    if said and world == 1:
        said.append(f"(as of step {counted[0]['looked_at']})")
    return "\n".join([*lines, "", *(said or ["nothing grew"])])


def _table_of_ranks(reports: dict[int, dict[str, Any]]) -> str:
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, report in sorted(reports.items()):
        counts, sizes = report["counts"] or [0], report["bytes"] or [0]
        row = (str(len(report["counts"])), str(counts[0]), str(counts[-1]), str(sizes[0]), str(sizes[-1]))
        ways = len(report["grown"]) + len(report["filling"])
        alike.setdefault((*row, f"{ways} ways" if ways else "nothing"), []).append(rank)
    header = ["rank", "steps", "tensors, first", "last", "bytes, first", "last", "grew"]
    return table(header, [[numbered_spans(ranks), *row] for row, ranks in alike.items()])
