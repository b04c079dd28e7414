"""What was held from I to W, by the log of a recording: see Note [What a recording counts]."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from zbpipe import _C
from zbpipe.memory._phases import PASSES, Open

RANGE = struct.Struct("2I")


@dataclass
class Pair:
    """An I and its W: ``at`` is the mark of I's end, then per W the mark of its beginning and what it freed."""

    stage: int | None
    microbatch: int | None
    at: int
    begins: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)


def pairs_of(ended: Sequence[Open], unsplit: Collection[int | None], log: _C.Recorder) -> list[Pair]:
    """Each I with its W, in the order of the I. `unsplit`: stages whose backward is not split."""
    pairs: dict[object, Pair] = {}
    found: list[Pair] = []
    for p in ended:
        assert p.end is not None
        key: object = (p.stage, p.microbatch) if p.calls is None else p.calls
        if p.kind == "I" and p.stage not in unsplit:
            pairs[key] = Pair(p.stage, p.microbatch, p.end)
            found.append(pairs[key])
        elif p.kind == "W" and p.stage not in unsplit:
            if p.calls is not None and len(p.calls) > 1:
                served = [pairs[call,] for call in p.calls if (call,) in pairs]
                pair = Pair(p.stage, None, max((q.at for q in served), default=p.begin))
                found.append(pair)
            elif key in pairs:
                pair = pairs[key]
            else:
                continue  # its I was before the recording
            pair.begins.append(p.begin)
            pair.bytes.append(log.held(pair.at, p.begin, p.end, _of_others(p, ended)))
    return [pair for pair in found if pair.begins]


def highest(pairs: Iterable[Pair]) -> int:
    """The most bytes that were held at once."""
    changes: list[tuple[int, int]] = []
    for pair in pairs:
        changes.append((pair.at, sum(pair.bytes)))
        changes += [(begin, -size) for begin, size in zip(pair.begins, pair.bytes, strict=True)]
    level = peak = 0
    for _, change in sorted(changes):
        level += change
        peak = max(peak, level)
    return peak


def _of_others(w: Open, phases: Iterable[Open]) -> bytes:
    """The marks of the other microbatches' forwards and passes, as _C.Recorder.held takes them. Microbatches that
    zbpipe numbered by its calls are not to be compared with those that stages or the user numbered."""
    return b"".join(
        RANGE.pack(p.begin, p.end)
        for p in phases
        if p.kind in (*PASSES, "forward") and (p.calls is None) == (w.calls is None) and _is_another(p, w)
    )


def _is_another(p: Open, w: Open) -> bool:
    if p.calls is not None and w.calls is not None:
        return not set(p.calls) & set(w.calls)
    return p.microbatch is not None and w.microbatch is not None and p.microbatch != w.microbatch
