"""Instructions of one split backward: what `benchmarks/split.py --only host_time` times, counted by valgrind.

torch.utils.benchmark runs each side in its own process under callgrind, on one thread. It counts the instructions of a
backward, without the forward before. They vary by some thousandths from run to run, whatever else the machine does.
They do not show waits for memory.

    python benchmarks/instructions.py --blocks 16 64 --json instructions.json
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from bench.results import add_argument, write
from torch.utils.benchmark import Timer

from zbpipe._formatting import table

RUNS = 3  # in one process, after one that is not counted
SET_UP = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
import zbpipe
from bench.host_time import Stage
torch.set_num_threads(1)
passes = store = None
{{passes}}
stage = Stage({{blocks}}, store, {{weights!r}})
"""
# Each side's call, and the import of its passes: imports are slow under callgrind.
SPLITS = {
    "zbpipe": "passes = zbpipe",
    "torch": "from torch.distributed.pipelining import _backward as passes",
    "store": "from bench.store import Store; passes = store = Store()",
}


def count(side: str, blocks: int, weights: str) -> float:
    """Instructions of one call."""
    print(f"counting {side} of {blocks} blocks, {weights}", file=sys.stderr, flush=True)
    timer = Timer(
        "stage.split(passes)" if side in SPLITS else f"stage.{side}()",
        setup=SET_UP.format(blocks=blocks, weights=weights, passes=SPLITS.get(side, "")),
    )
    return timer.collect_callgrind(number=RUNS, collect_baseline=False).counts() / RUNS


# The sides of each kind of weights: torch's module raises with tied ones, a store knows plain ones.
SIDES = {
    "plain": tuple(SPLITS),
    "tied": ("zbpipe",),
    "hooked": ("zbpipe", "torch"),
    **dict.fromkeys(("autocast", "einsum", "view"), ("zbpipe",)),
}


def measure(blocks: int, weights: str) -> dict[str, float]:
    """Instructions of a backward, on each side."""
    splits = SIDES[weights]
    counts = {side: count(side, blocks, weights) for side in ("forward", "unsplit", *splits)}
    return {side: counts[side] - counts["forward"] for side in ("unsplit", *splits)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 64], metavar="N", help="depths (default: 16 64)")
    parser.add_argument("--weights", nargs="+", default=list(SIDES), choices=list(SIDES), help="default: all")
    add_argument(parser)
    given = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("there is no valgrind, which counts: install it (Debian: apt-get install valgrind)", file=sys.stderr)
        return 1
    # callgrind runs the first python on the path.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    plain = given.blocks if "plain" in given.weights else []
    measured = {str(blocks): measure(blocks, "plain") for blocks in plain}
    fewest = min(given.blocks)
    others = [weights for weights in given.weights if weights != "plain"]
    measured |= {f"{fewest}, {weights}": measure(fewest, weights) for weights in others}
    rows = [
        [
            stack,
            f"{counts['unsplit'] / 1e6:.2f}",
            *(f"{counts[side] / counts['unsplit']:.3f}x" if side in counts else "" for side in SPLITS),
        ]
        for stack, counts in measured.items()
    ]
    print(table(["blocks", "unsplit, M", *SPLITS], rows))
    write(given.json, "instructions", measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
