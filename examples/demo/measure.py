"""What one training step holds in memory, counted by zbpipe.memory.

Note [What the demo counts]

One extra step is recorded: every block that the allocator hands out or takes back, in bytes, without sampling. Note
[What a recording counts], zbpipe/memory/_recording.py, says what the numbers mean. Gradients are counted; weights and
optimizer state are not, since they exist before the step.

Tensors in the stages' receive buffers at the begin of the step are counted, too, until they are freed. For a neighbour
on another rank torch keeps a buffer from step to step, and never frees it. For one on the same rank the buffer is the
tensor of the step before, until this step replaces it. zbpipe has no buffers between steps.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.pipelining import PipelineStage
from torch.multiprocessing.reductions import StorageWeakRef

from zbpipe import memory

_BINS_PER_ACTION = 24
_LETTERS = {"forward": "F", "I": "I", "W": "W", "B": "B"}


@dataclass
class StepMemory:
    """The memory of one step on one rank: see Note [What the demo counts]. All sizes in bytes.

    ``kinds`` are the rank's actions in order, F, I, W and B (a backward that is not split). ``position`` and ``live``
    draw the step: action number i spans the positions i to i + 1, ``live`` is the most live bytes around each position.
    ``spans`` are the actions, each with the seconds from the step's begin where it begins and ends.
    """

    peak: int = 0
    kinds: list[str] = field(default_factory=list)
    position: list[float] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    spans: list[tuple[str, float, float]] = field(default_factory=list)


@contextlib.contextmanager
def knowing_blocks(device: torch.device) -> Iterator[None]:
    """A context for a step and the :func:`measure_step` after it, in which blocks of the first step's receive buffers
    may be freed. CUDA's history knows all blocks."""
    with memory.record(device, max_events=0) if device.type == "cpu" else contextlib.nullcontext():
        yield


def measure_step(step: Callable[[], object], stages: Sequence[PipelineStage], device: torch.device) -> StepMemory:
    """Runs ``step`` once and counts. The stages' methods are wrapped for that step alone.

    Raises:
        RuntimeError: an older receive buffer was freed unseen, and the counts would be wrong.
    """
    gc.collect()
    storages = receive_buffers(stages)
    standing = {address: storage.nbytes() for address, storage in storages.items()}
    refs = {a: StorageWeakRef(storage) for a, storage in storages.items()}  # type: ignore[no-untyped-call]
    del storages
    with memory.record(device) as recording:
        recording.watch(stages)
        step()
    seen = {event.address for event in recording.events() if event.older}
    gone = [address for address, ref in refs.items() if ref.expired()]  # type: ignore[no-untyped-call]
    unseen = sum(standing[address] for address in gone if address not in seen)
    if unseen:
        raise RuntimeError(
            f"{unseen} bytes of older receive buffers were freed unseen in the measured step; run it and the step "
            "before it within knowing_blocks()"
        )
    return read(recording, standing)


def receive_buffers(stages: Sequence[PipelineStage]) -> dict[int, torch.UntypedStorage]:
    """The storages of the receive buffers that exist now, by their addresses."""
    infos = itertools.chain.from_iterable(
        (*stage.args_recv_info.values(), *stage.grad_recv_info.values()) for stage in stages
    )
    # Torch 2.11 has placeholders without one where the caller gives the first stage its input.
    of_all = (getattr(info, "buffer", None) for recv_infos in infos for info in recv_infos)
    buffers = [buffer for buffer in of_all if buffer is not None]
    storages = [buffer.untyped_storage() for buffer in buffers if not buffer.is_meta]
    return {storage.data_ptr(): storage for storage in storages}


def read(recording: memory.Recording, standing: Mapping[int, int]) -> StepMemory:
    """A step's memory from its recording, which is over, and the bytes that stood at each address before it."""
    levels = list(_levels(recording, standing))
    actions = [phase for phase in recording.phases if phase.kind in _LETTERS]
    position, live = _draw(actions, levels)
    kinds = [_LETTERS[action.kind] for action in actions]
    start = recording.phases[0].begin_ns if recording.phases else 0
    spans = [
        (kind, (action.begin_ns - start) / 1e9, (action.end_ns - start) / 1e9)
        for kind, action in zip(kinds, actions, strict=True)
    ]
    return StepMemory(max(level for _, level in levels), kinds, position, live, spans)


def _levels(recording: memory.Recording, standing: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Times and the bytes that are live from then on."""
    left = dict(standing)
    stands = sum(left.values())
    yield 0, stands
    for event in recording.events():
        if event.older:
            stands -= left.pop(event.address, 0)
        yield event.time_ns, event.live + stands


def _draw(actions: Sequence[memory.Phase], levels: Iterable[tuple[int, int]]) -> tuple[list[float], list[int]]:
    """Maps time to position (action i spans i to i + 1) and keeps the highest level of each bin."""
    bins = [-1] * (len(actions) * _BINS_PER_ACTION)
    number = last = 0
    for time_ns, level in levels:
        while number + 1 < len(actions) and time_ns >= actions[number + 1].begin_ns:
            number += 1
        if not actions or time_ns < actions[0].begin_ns:
            last = level
            continue
        action = actions[number]
        share = min((time_ns - action.begin_ns) / max(action.end_ns - action.begin_ns, 1), 1.0)
        index = number * _BINS_PER_ACTION + min(int(share * _BINS_PER_ACTION), _BINS_PER_ACTION - 1)
        bins[index] = max(bins[index], level)
    for index, level in enumerate(bins):  # a bin without events keeps the level before it
        if level < 0:
            bins[index] = last
        last = bins[index]
    return [(i + 0.5) / _BINS_PER_ACTION for i in range(len(bins))], bins
