"""A benchmark's results: its figures, and the machine that they were measured on."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zbpipe._version import __version__

SCHEMA = 1


class Spread(NamedTuple):
    """The median and the quartiles of measured numbers."""

    median: float
    low: float
    high: float
    runs: int


def spread(numbers: Iterable[float]) -> Spread:
    known = sorted(numbers)
    low, median, high = statistics.quantiles(known, n=4, method="inclusive") if len(known) > 1 else known * 3
    return Spread(median, low, high, len(known))


def now(device: str) -> float:
    """The time in seconds, once the device has run all its work."""
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the figures to this file, or as NAME-TORCH.json to this folder"
    )


def write(path: Path | None, name: str, figures: Any, device: str = "cpu") -> None:
    """``figures`` are plain data; a Spread among them becomes an object of its fields."""
    if path is None:
        return
    if path.is_dir():
        path /= file_name(name, torch.__version__)
    made = {
        "benchmark": name,
        "schema": SCHEMA,
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device != "cpu" else f"{_processor()}, {os.cpu_count()} cores",
        **({} if device == "cpu" else {"driver": _driver()}),
        "torch": plain_version(torch.__version__),
        "zbpipe": __version__,
        "python": platform.python_version(),
    }
    path.write_text(json.dumps(made | {"figures": _plain(figures)}, indent=1) + "\n")


def file_name(name: str, version: str) -> str:
    return f"{name}-{plain_version(version)}.json"


def plain_version(version: str) -> str:
    return version.partition("+")[0]


def _plain(figures: Any) -> Any:
    if isinstance(figures, Spread):
        return _plain(figures._asdict())
    if isinstance(figures, dict):
        return {key: _plain(value) for key, value in figures.items()}
    if isinstance(figures, (list, tuple)):
        return [_plain(value) for value in figures]
    return float(f"{figures:.5g}") if isinstance(figures, float) else figures


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.split() or ["unknown"])[0]


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = (line.partition(": ")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
