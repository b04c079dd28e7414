"""What one training step holds in memory, counted from the allocator's own events.

Note [What the demo counts]

One extra step runs under ``torch.profiler`` with ``profile_memory=True``: the allocator reports the address and size of
every storage that it hands out or takes back, in bytes, with a time. Nothing is sampled and no Python object is asked.
From these events:

live bytes
    Storages that were allocated since the step began and not freed yet, and the stages' receive buffers, which torch
    keeps from step to step and zbpipe does not. Weights and optimizer state are not in it; gradients are.
peak
    The most live bytes at any moment of the step.
held for a microbatch
    Storages that were live when I of that microbatch returned, and that were freed while its W ran: whatever was kept
    for W, needed or not.
held between I and W
    The sum of that over all microbatches whose I has returned and whose W has not begun; the most at any moment.
    Stage 0 is left out: the schedules do not split it (its I does nothing, its W is a whole backward).
"""

from __future__ import annotations

import functools
import gc
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "zbpipe.demo"
_BINS_PER_ACTION = 24


@dataclass(frozen=True)
class Action:
    """One stage's F, I, W or B (a backward that is not split), ``start`` and ``end`` in microseconds of the trace."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Event:
    """A storage handed out (``size`` > 0) or taken back (< 0), in bytes, at ``time`` in microseconds."""

    time: float
    address: int
    size: int


@dataclass
class StepMemory:
    """The memory of one step on one rank: see Note [What the demo counts]. All sizes in bytes.

    ``kinds`` are the rank's actions in order. ``position`` and ``live`` draw the step: action number i spans the
    positions i to i + 1, ``live`` is the most live bytes around each position.
    """

    peak: int = 0
    held: int = 0
    kinds: list[str] = field(default_factory=list)
    position: list[float] = field(default_factory=list)
    live: list[int] = field(default_factory=list)


def measure_step(step: Callable[[], object], stages: Sequence[PipelineStage], device: torch.device) -> StepMemory:
    """Runs ``step`` once under the profiler and counts. The stages' methods are wrapped for that step alone."""
    gc.collect()
    standing = receive_buffers(stages)
    for stage in stages:
        _mark_methods(stage)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            step()
    finally:
        for stage in stages:
            _unmark_methods(stage)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        rows = json.loads(path.read_text())["traceEvents"]
    actions, events = read_trace(rows, device_type=0 if device.type == "cpu" else 1)
    return count(actions, events, standing)


def receive_buffers(stages: Sequence[PipelineStage]) -> list[Event]:
    """The receive buffers that exist now, as if handed out before all time."""
    events: dict[int, Event] = {}
    for stage in stages:
        for recv_infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            for info in recv_infos:
                if info.buffer is not None and not info.buffer.is_meta:
                    storage = info.buffer.untyped_storage()
                    events[storage.data_ptr()] = Event(float("-inf"), storage.data_ptr(), storage.nbytes())
    return list(events.values())


def read_trace(rows: Sequence[dict[str, Any]], device_type: int) -> tuple[list[Action], list[Event]]:
    """Picks this module's marks and the allocator's events out of a Chrome trace; both by ascending time.

    ``device_type`` is c10's number: 0 for CPU, 1 for CUDA.
    """
    actions: list[Action] = []
    events: list[Event] = []
    for row in rows:
        name = row.get("name", "")
        if name == "[memory]" and row["args"]["Device Type"] == device_type:
            events.append(Event(row["ts"], row["args"]["Addr"], row["args"]["Bytes"]))
        elif name.startswith(_MARK) and row.get("cat") == "user_annotation":
            _, kind, stage, microbatch = name.split("/")
            actions.append(Action(kind, int(stage), int(microbatch), row["ts"], row["ts"] + row["dur"]))
    return sorted(actions, key=lambda a: a.start), sorted(events, key=lambda e: e.time)


def count(actions: Sequence[Action], events: Sequence[Event], standing: Sequence[Event] = ()) -> StepMemory:
    """Computes a step's memory from its actions and events, both by ascending time, and from what stands before it."""
    returned = {(a.stage, a.microbatch): a.end for a in actions if a.kind == "I" and a.stage != 0}
    weight_passes = [a for a in actions if a.kind == "W" and (a.stage, a.microbatch) in returned]
    held_for = dict.fromkeys(returned, 0)

    result = StepMemory(kinds=[a.kind for a in actions])
    born = {event.address: event for event in standing}
    live = sum(event.size for event in standing)
    levels: list[tuple[float, int]] = []
    for event in events:
        if event.size > 0:
            born[event.address] = event
            live += event.size
        else:
            birth = born.pop(event.address, None)
            if birth is None:
                continue  # older than the step
            live -= birth.size
            for w in weight_passes:
                if w.start <= event.time <= w.end and birth.time <= returned[w.stage, w.microbatch]:
                    held_for[w.stage, w.microbatch] += birth.size
        levels.append((event.time, live))
    result.peak = max((level for _, level in levels), default=0)

    held = 0
    changes = [(end, held_for[key]) for key, end in returned.items()]
    changes += [(w.start, -held_for[w.stage, w.microbatch]) for w in weight_passes]
    for _, change in sorted(changes):
        held += change
        result.held = max(result.held, held)

    result.position, result.live = _draw(actions, levels)
    return result


def _draw(actions: Sequence[Action], levels: Sequence[tuple[float, int]]) -> tuple[list[float], list[int]]:
    """Maps time to position (action i spans i to i + 1) and keeps the highest level of each bin."""
    bins = [-1] * (len(actions) * _BINS_PER_ACTION)
    number = 0
    for time, level in levels:
        while number + 1 < len(actions) and time >= actions[number + 1].start:
            number += 1
        if not actions or time < actions[0].start:
            continue
        action = actions[number]
        share = min((time - action.start) / max(action.end - action.start, 1e-9), 1.0)
        index = number * _BINS_PER_ACTION + min(int(share * _BINS_PER_ACTION), _BINS_PER_ACTION - 1)
        bins[index] = max(bins[index], level)
    last = 0
    for index, level in enumerate(bins):  # a bin without events keeps the level before it
        if level < 0:
            bins[index] = last
        last = bins[index]
    return [(i + 0.5) / _BINS_PER_ACTION for i in range(len(bins))], bins


def _mark_methods(stage: PipelineStage) -> None:
    """Puts a named range around each action of ``stage``, by attributes that hide its methods."""

    def marked(method: Callable[..., Any], kind: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            with record_function(f"{_MARK}/{kind(**kwargs)}/{stage.stage_index}/{microbatch}"):
                return method(microbatch, *args, **kwargs)

        return run

    hide = vars(stage)
    hide["forward_one_chunk"] = marked(stage.forward_one_chunk, lambda **_: "F")
    hide["backward_one_chunk"] = marked(
        stage.backward_one_chunk, lambda full_backward=True, **_: "B" if full_backward else "I"
    )
    hide["backward_weight_one_chunk"] = marked(stage.backward_weight_one_chunk, lambda **_: "W")


def _unmark_methods(stage: PipelineStage) -> None:
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        vars(stage).pop(name, None)
