"""The cost of a recording, and of a leak check with `trace=True`, per block of CPU memory: one call of `torch.empty`.

The figures are microseconds per block, the least of the rounds, since other programs slow down the rest. Then a
recording of so many events, in 100 phases, is written to each kind of file. The figures are seconds of processor and
wall time, MB of the file, and the largest growth of the process in MB.

    python benchmarks/recorder.py --blocks 20000 --events 1000000 --json recorder.json
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from bench.results import add_argument, write

from zbpipe import memory
from zbpipe._formatting import table
from zbpipe.leaks import check_tensor_leak

ROUNDS = 15
PHASES = 100

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


def recording_of(events: int) -> memory.Recording:
    with memory.record(max_events=events) as rec:
        for phase in range(PHASES):
            with rec.phase("forward", stage=1, microbatch=phase):
                for i in range(events // PHASES // 2):
                    torch.empty(64 + i % 1000)
    return rec


def written(rec: memory.Recording) -> dict[str, dict[str, float]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("step.json", "step.json.gz", "step.png"):
            path = Path(folder, name)
            write = rec.plot if name.endswith("png") else rec.export
            wall, processor = time.perf_counter(), time.process_time()
            write(path)
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            tracemalloc.start()  # in its own round, since it slows that down
            write(path)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            found[name] = {"processor": processor, "wall": wall, "MB": path.stat().st_size / 1e6, "memory": most / 1e6}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--events", type=int, default=1_000_000, help="of the recording that is written; 0: none")
    add_argument(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    taken = {name: microseconds(context, args.blocks) for name, context in CONTEXTS.items()}
    alone = taken["nothing"]
    rows = [[name, f"{us:.2f}", f"{us - alone:+.2f}"] for name, us in taken.items()]
    print(f"torch {torch.__version__}, {platform.machine()}, {args.blocks} blocks")
    print(table(["under", "us per block", "more than alone"], rows))
    files = written(recording_of(args.events)) if args.events else {}
    if files:
        rows = [[n, *(f"{f[key]:.2f}" for key in ("processor", "wall", "MB", "memory"))] for n, f in files.items()]
        print(f"\n{args.events} events")
        print(table(["file", "s of processor", "s", "MB", "MB of memory"], rows))
    write(args.json, "recorder", {"microseconds": taken, "events": args.events, "files": files})


if __name__ == "__main__":
    main()
