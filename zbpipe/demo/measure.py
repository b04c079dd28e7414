"""What one training step holds in memory, counted by zbpipe.memory.

Note [What the demo counts]

One extra step is recorded: every block that the allocator hands out or takes back, in bytes; nothing is sampled. What
the numbers mean is said in zbpipe/memory/_recorder.py, Note [What a recording counts]. Weights and optimizer state
exist before the step and are not in it; gradients are, and the stages' receive buffers, which torch keeps from step to
step and zbpipe does not. Stage 0 is left out of what is held from I to W: the schedules do not split it (its I does
nothing, its W is a whole backward).
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.pipelining import PipelineStage

from zbpipe import memory

_BINS_PER_ACTION = 24


@dataclass
class StepMemory:
    """The memory of one step on one rank: see Note [What the demo counts]. All sizes in bytes.

    ``kinds`` are the rank's actions in order, F, I, W and B (a backward that is not split). ``position`` and ``live``
    draw the step: action number i spans the positions i to i + 1, ``live`` is the most live bytes around each position.
    """

    peak: int = 0
    held: int = 0
    kinds: list[str] = field(default_factory=list)
    position: list[float] = field(default_factory=list)
    live: list[int] = field(default_factory=list)


def measure_step(step: Callable[[], object], stages: Sequence[PipelineStage], device: torch.device) -> StepMemory:
    """Runs ``step`` once and counts. The stages' methods are wrapped for that step alone."""
    gc.collect()
    standing = receive_buffers(stages)
    with memory.record(device) as recording:
        recording.watch(stages)
        step()
    return read(recording, standing)


def receive_buffers(stages: Sequence[PipelineStage]) -> int:
    """Bytes of the receive buffers that exist now, each storage once."""
    infos = itertools.chain.from_iterable(
        (*stage.args_recv_info.values(), *stage.grad_recv_info.values()) for stage in stages
    )
    buffers = [info.buffer for recv_infos in infos for info in recv_infos if info.buffer is not None]
    storages = [buffer.untyped_storage() for buffer in buffers if not buffer.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def read(recording: memory.Recording, standing: int) -> StepMemory:
    """A step's memory from its recording, which is over, and the bytes that stand before it and after."""
    position, live = _draw(recording)
    kinds = ["F" if action.kind == "forward" else action.kind for action in recording.phases]
    return StepMemory(recording.peak + standing, recording.held_peak, kinds, position, [standing + x for x in live])


def _draw(recording: memory.Recording) -> tuple[list[float], list[int]]:
    """Maps time to position (action i spans i to i + 1) and keeps the highest level of each bin."""
    actions = recording.phases
    bins = [-1] * (len(actions) * _BINS_PER_ACTION)
    number = 0
    for event in recording.events():
        while number + 1 < len(actions) and event.time_ns >= actions[number + 1].begin_ns:
            number += 1
        if not actions or event.time_ns < actions[0].begin_ns:
            continue
        action = actions[number]
        share = min((event.time_ns - action.begin_ns) / max(action.end_ns - action.begin_ns, 1), 1.0)
        index = number * _BINS_PER_ACTION + min(int(share * _BINS_PER_ACTION), _BINS_PER_ACTION - 1)
        bins[index] = max(bins[index], event.live)
    last = 0
    for index, level in enumerate(bins):  # a bin without events keeps the level before it
        if level < 0:
            bins[index] = last
        last = bins[index]
    return [(i + 0.5) / _BINS_PER_ACTION for i in range(len(bins))], bins
