"""Command line of the demo: ``python -m demo --help``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from .config import SCHEDULES, Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses ``arguments`` (default: the command line's) and runs the demo. Returns the exit status."""
    missing = [name for name in ("numpy", "tqdm", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"The demo also needs {', '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    config = parse(arguments)
    from .launch import launch

    return launch(config)


def parse(arguments: Sequence[str] | None) -> Config:
    """Turns the command line into a ``Config``; ends the process with status 2 and a message if it makes no sense."""
    default = Config()
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="Trains a small language model by pipeline parallelism over several processes, with each schedule "
        "first on torch's own split backward and then on zbpipe, and compares losses, gradients, time and memory. "
        "The exit status is 0 if zbpipe's losses and gradients are right.",
    )
    parser.add_argument("--ranks", type=int, default=default.ranks, help="processes, two stages each (%(default)s)")
    parser.add_argument("--steps", type=int, help=f"training steps of each run ({default.steps}; quick: 4)")
    parser.add_argument(
        "--schedules",
        nargs="+",
        choices=list(SCHEDULES),
        default=list(SCHEDULES),
        metavar="NAME",
        help=f"which of: {' '.join(SCHEDULES)} (all)",
    )
    parser.add_argument(
        "--out", type=Path, default=default.out, help="the picture, a PNG file or a folder for it (%(default)s)"
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: cuda (NCCL) where there is a GPU for each rank, else cpu (gloo)",
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="of weights and batches (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps: a few seconds, for tests")
    given = parser.parse_args(arguments)

    if given.ranks < 1:
        parser.error("--ranks must be 1 or more")
    if given.steps is not None and given.steps < 2:
        parser.error("--steps must be 2 or more: the loss is to fall")
    if given.out.is_dir():
        given.out /= default.out
    if not given.out.resolve().parent.is_dir():
        parser.error(f"--out: no folder {given.out.resolve().parent}")
    config = Config(
        ranks=given.ranks,
        schedules=tuple(dict.fromkeys(given.schedules)),
        out=given.out.resolve(),
        device=_device(parser, given.device, given.ranks),
        seed=given.seed,
        microbatches=max(default.microbatches, 2 * default.ranks * given.ranks),
    )
    if given.quick:
        config = dataclasses.replace(
            config, steps=4, width=32, heads=2, blocks_per_stage=1, context=32, microbatch_size=2
        )
    return config if given.steps is None else dataclasses.replace(config, steps=given.steps)


def _device(parser: argparse.ArgumentParser, wanted: str, ranks: int) -> str:
    if wanted == "cpu":
        return "cpu"
    import torch

    enough = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    if wanted == "cuda" and not enough:
        parser.error(f"--device cuda: {ranks} ranks need {ranks} GPUs, torch sees {torch.cuda.device_count()}")
    return "cuda" if enough else "cpu"


if __name__ == "__main__":
    sys.exit(main())
