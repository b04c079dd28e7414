"""What a recording and a leak check with `trace=True` cost per block of CPU memory: an empty tensor, made and dropped.

A call of `torch.empty` alone is the measure. Microseconds per block, the least of the rounds: what else runs on the
machine adds to all others.

    python benchmarks/recorder.py --blocks 20000 --json recorder.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from zbpipe import memory
from zbpipe._text import table
from zbpipe.leaks import check_tensor_leak

ROUNDS = 15

CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "record()": memory.record,
    "record(max_events=0)": lambda: memory.record(max_events=0),
    "check_tensor_leak()": lambda: check_tensor_leak(action="record"),
    "check_tensor_leak(trace=True)": lambda: check_tensor_leak(action="record", trace=True),
}


def microseconds(context: Callable[[], AbstractContextManager[Any]], blocks: int) -> float:
    least = float("inf")
    for _ in range(ROUNDS):
        with context():
            begin = time.perf_counter()
            for _ in range(blocks):
                torch.empty(64)
            least = min(least, time.perf_counter() - begin)
    return 1e6 * least / blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    taken = {name: microseconds(context, args.blocks) for name, context in CONTEXTS.items()}
    alone = taken["nothing"]
    rows = [[name, f"{us:.2f}", f"{us - alone:+.2f}"] for name, us in taken.items()]
    print(f"torch {torch.__version__}, {platform.machine()}, {args.blocks} blocks")
    print(table(["under", "us per block", "more than alone"], rows))
    if args.json:
        args.json.write_text(json.dumps({"blocks": args.blocks, "microseconds": taken}, indent=2))


if __name__ == "__main__":
    main()
