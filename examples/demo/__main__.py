"""The demo's command line: trains a small language model on torch's own module, then on zbpipe, and compares."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from pathlib import Path

import torch

from demo.config import SCHEDULES, Config
from demo.launch import launch

DEFAULT = Config()
DESCRIPTION = """\
Trains a small language model on the text of a book by pipeline parallelism
over several processes, with each schedule first on torch's own split backward
and then on zbpipe, and compares losses, gradients, time and memory. The last
stage, with a large head, costs about three times as much as another one.
Interleaved 1F1B splits no backward; in the last run every block is
checkpointed.

    make demo
    cd examples
    python -m demo --schedules zbv --steps 4 --json demo.json
    torchrun --nproc-per-node 2 -m demo
"""
EPILOG = """\
exit status:
  0  zbpipe's losses and gradients are right
  1  they are not, or a rank failed
  2  the command line is wrong, or a package is missing
  130  interrupted
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=DEFAULT.ranks, help="processes, two stages each (%(default)s)")
    parser.add_argument("--steps", type=int, help=f"training steps of each run ({DEFAULT.steps}; quick: 4)")
    parser.add_argument(
        "--schedules",
        nargs="+",
        choices=list(SCHEDULES),
        default=list(SCHEDULES),
        metavar="NAME",
        help=f"which of: {' '.join(SCHEDULES)} (all)",
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT.out, help="the picture, a PNG file or a folder for it (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: cuda (NCCL) where there is a GPU for each rank, else cpu (gloo)",
    )
    parser.add_argument("--seed", type=int, default=DEFAULT.seed, help="of weights and batches (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps: a few seconds, for tests")
    return launch(_config(parser, parser.parse_args()))


def _config(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Config:
    """The configuration of a command line. A wrong one ends the process with status 2 and a message."""
    error = parser.error
    missing = [name for name in ("numpy", "tqdm", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        error(f"the demo also needs {', '.join(missing)}: pip install {' '.join(missing)}")
    if given.ranks < 1:
        error(f"--ranks {given.ranks}: give 1 or more")
    if given.steps is not None and given.steps < 2:
        error(f"--steps {given.steps}: give 2 or more, for the loss to fall")
    if given.out.is_dir():
        given.out /= DEFAULT.out
    for option, path in (("out", given.out), ("json", given.json)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            error(f"--{option} {path}: name a file in an existing folder")
    config = Config(
        ranks=given.ranks,
        schedules=tuple(dict.fromkeys(given.schedules)),
        out=given.out,
        json=given.json,
        device=_device(parser, given),
        seed=given.seed,
        microbatches=max(DEFAULT.microbatches, 2 * DEFAULT.ranks * given.ranks),
    )
    if given.quick:
        config = dataclasses.replace(
            config, steps=4, width=32, heads=2, blocks_per_stage=1, head_width=128, context=32, microbatch_size=2
        )
    return config if given.steps is None else dataclasses.replace(config, steps=given.steps)


def _device(parser: argparse.ArgumentParser, given: argparse.Namespace) -> str:
    if given.device == "cpu":
        return "cpu"
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= given.ranks
    if given.device == "cuda" and not enough:
        parser.error(
            f"--device cuda: {given.ranks} ranks need {given.ranks} GPUs, torch sees {torch.cuda.device_count()}"
        )
    return "cuda" if enough else "cpu"


if __name__ == "__main__":
    sys.exit(main())
