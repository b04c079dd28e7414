"""Recordings as files that viewers open."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Iterator
from typing import Any

from zbpipe._version import __version__
from zbpipe.memory._results import Path, Phase, Recorded


def export(recording: Recorded, path: Path) -> None:
    """See :meth:`Recording.export`."""
    name = os.fspath(path)
    # The content first: a recording that cannot be exported leaves no file behind.
    if name.endswith(".pickle"):
        content = pickle.dumps(memory_viz(recording))
    elif name.endswith((".json", ".json.gz")):
        content = json.dumps(chrome_trace(recording)).encode()
    else:
        raise ValueError(f"{name!r} does not say which format to write; end it in .json, .json.gz or .pickle")
    with gzip.open(name, "wb") if name.endswith(".gz") else open(name, "wb") as file:
        file.write(content)


def chrome_trace(recording: Recorded) -> dict[str, Any]:
    """The trace event format: a counter event per allocation, a complete event per phase; microseconds."""
    process = os.getpid()
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"zbpipe, memory of {recording.device}"}}
    ]
    for phase in recording.phases:
        rows.append(
            {
                "ph": "X",
                "name": phase.label,
                "cat": phase.kind,
                "pid": process,
                "tid": phase.thread,
                "ts": phase.begin_ns / 1e3,
                "dur": (phase.end_ns - phase.begin_ns) / 1e3,
                "args": {
                    "live bytes at its beginning": phase.live_begin,
                    "live bytes at its end": phase.live_end,
                    "peak bytes": phase.peak,
                    "bytes allocated": phase.allocated,
                    "bytes freed": phase.freed,
                    "allocations": phase.allocations,
                },
            }
        )
    counter = f"live bytes, {recording.device}"
    rows.append({"ph": "C", "name": counter, "pid": process, "ts": 0.0, "args": {"bytes": 0}})
    rows.extend(
        {"ph": "C", "name": counter, "pid": process, "ts": event.time_ns / 1e3, "args": {"bytes": event.live}}
        for event in recording.events()
        if not event.older
    )
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"producer": f"zbpipe {__version__}"}}


def memory_viz(recording: Recorded) -> dict[str, Any]:
    """What torch.cuda.memory._snapshot() gives, with a single device, for torch's own viewer."""
    trace: list[dict[str, Any]] = []
    labels = _labels(recording.phases)
    for event in recording.events():
        if event.older:
            continue
        row = {
            "addr": event.address,
            "size": abs(event.bytes),
            "stream": 0,
            "device": recording.device.index or 0,
            "time_us": event.time_ns // 1000,
            "frames": [{"filename": "zbpipe.memory", "line": 0, "name": labels(event.time_ns)}],
        }
        if event.bytes > 0:
            trace.append({"action": "alloc", **row})
        else:
            trace += [{"action": "free_requested", **row}, {"action": "free_completed", **row}]
    return {"segments": [], "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}


class _labels:
    """From ascending times to the label of the innermost phase then."""

    def __init__(self, phases: list[Phase]) -> None:
        self._later: Iterator[Phase] = iter(sorted(phases, key=lambda phase: phase.begin_ns))
        self._next = next(self._later, None)
        self._open: list[Phase] = []

    def __call__(self, time_ns: int) -> str:
        while self._next is not None and self._next.begin_ns <= time_ns:
            self._open.append(self._next)
            self._next = next(self._later, None)
        self._open = [phase for phase in self._open if phase.end_ns >= time_ns]
        return self._open[-1].label if self._open else "between phases"
