"""What the leak tools cost: a clean check, a look at a large heap, one tensor's holders, a step of Growth.

The heap has N living tensors in graphs of 4 N nodes, which have saved as many tensors, and all that Python and torch
load. Times are medians in ms; counts are exact. The reference is Python's `gc.get_referrers` of one tensor: one
level of holders, no nodes.

Large leaks are measured in processes of their own, on one thread: 20,000 cycles of a tensor each; 100,000 leaks over as
many nodes, side by side and in one chain; one leak among 1,000,000 objects. The figures are seconds of processor time
from the end of the block to the report's object, text and page; and the process's largest growth.

    python benchmarks/leak_checks.py --tensors 5000 --json leaks.json
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.pipelining  # what a training script has loaded
from bench.results import add_argument, write

from zbpipe._formatting import table
from zbpipe.leaks import Growth, check_tensor_leak, find_holders

ROUNDS = 7
GRAPHS = 500  # one graph's depth is 4 N / GRAPHS nodes


def median_ms(function: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def clean_check() -> None:
    with check_tensor_leak(action="record") as check:
        torch.ones(8)
    assert not check.report


def kept_tensors(count: int, weight: torch.Tensor) -> list[torch.Tensor]:
    """Tensors in graphs with four nodes each. The nodes save the tensors, and others on memory of their own."""
    kept: list[torch.Tensor] = []
    for i in range(count):
        before = kept[-1] if i % max(count // GRAPHS, 1) else weight
        kept.append((before * 1.5).sin().cos().exp())
    return kept


def look(count: int, in_a_cycle: bool) -> tuple[float, Any]:
    """The time from the end of the block to the report's text; the report."""
    weight = torch.ones(4, 4, requires_grad=True)
    kept: list[Any] = []
    with check_tensor_leak(action="record", allow=weight) as check:
        kept = kept_tensors(count, weight)
        if in_a_cycle:
            kept.append(kept)
            kept = []
        begin = time.perf_counter()
    text = str(check.report)
    spent = 1e3 * (time.perf_counter() - begin)
    assert text
    kept.clear()
    gc.collect()
    return spent, check.report


def measure(count: int) -> dict[str, Any]:
    result: dict[str, Any] = {"objects": len(gc.get_objects()), "tensors": count}
    result["clean check"] = median_ms(clean_check)
    for name, in_a_cycle in (("check, all held", False), ("check, all in a cycle", True)):
        spent, reports = zip(*(look(count, in_a_cycle) for _ in range(3)), strict=True)
        result[name] = statistics.median(spent)
        result["visited"], result["leaks"] = reports[-1].visited, len(reports[-1].leaks)
    weight = torch.ones(4, 4, requires_grad=True)
    kept = kept_tensors(count, weight)
    result["find_holders of one"] = median_ms(lambda: find_holders(kept[-1]))
    result["gc.get_referrers of one"] = median_ms(lambda: gc.get_referrers(kept[-1]))
    with Growth() as growth:
        result["Growth.step"] = median_ms(growth.step)
    return result


class Cyclic:
    def __init__(self) -> None:
        self.itself, self.tensor = self, torch.ones(4)


def leak(case: str, count: int) -> Any:
    """The objects to keep; nothing for cycles."""
    weight = torch.ones(4, requires_grad=True)
    if case == "cycles":
        return [None for _ in range(count) if not Cyclic()]
    if case == "nodes side by side":
        return [(weight * 2).exp() for _ in range(count // 2)]
    if case == "nodes in a chain":
        for _ in range(count):
            weight = weight.exp()
        return [weight]
    return [[[object()] for _ in range(count)], torch.ones(4)]


def most_resident() -> int:
    """The most memory that this process has had, in kB. Of getrusage's number a part is the parent's."""
    return int(re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[0])


def large(case: str, count: int) -> list[Any]:
    """A row: the case, seconds for each step, megabytes."""
    torch.set_num_threads(1)
    clean_check()
    kept: Any = None
    with check_tensor_leak(action="record") as check:
        kept = leak(case, count)
        before = most_resident()
        times = [time.process_time()]
    times.append(time.process_time())
    grew = (most_resident() - before) / 1e3
    report = check.report
    assert report
    with tempfile.TemporaryDirectory() as folder:
        str(report)
        times.append(time.process_time())
        report.draw(Path(folder, "leaks.dot"))
        times.append(time.process_time())
    del kept
    seconds = [after - earlier for earlier, after in itertools.pairwise(times)]
    return [f"{count:,} {case}", len(report.leaks), *seconds, grew]


LARGE = {"cycles": 20_000, "nodes side by side": 100_000, "nodes in a chain": 100_000, "objects, one leak": 1_000_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=5000, help="living tensors (default: %(default)s)")
    add_argument(parser)
    given = parser.parse_args()
    if given.tensors < 1:
        parser.error(f"--tensors {given.tensors}: give 1 or more")
    result = measure(given.tensors)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    print(
        f"{result['tensors']} tensors, {4 * result['tensors']} nodes, {result['objects']} other objects of Python's; "
        f"{result['visited']} things looked at, {result['leaks']} leaks"
    )
    times = ["clean check", "check, all held", "check, all in a cycle", "find_holders of one"]
    times += ["gc.get_referrers of one", "Growth.step"]
    print(table(["", "ms"], [[name, f"{result[name]:.1f}"] for name in times]))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = [pool.apply(large, item) for item in LARGE.items()]
    header = ["", "leaks", "check", "text", "picture", "MB"]
    print()
    shown = [[row[0], str(row[1]), *(f"{seconds:.2f}" for seconds in row[2:-1]), f"{row[-1]:.0f}"] for row in rows]
    print(table(header, shown))
    result["large"] = [dict(zip(["case", *header[1:]], row, strict=True)) for row in rows]
    write(given.json, "leaks", result)


if __name__ == "__main__":
    main()
