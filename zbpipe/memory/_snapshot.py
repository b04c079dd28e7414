"""Recordings as pickles for torch's own viewer: what torch.cuda.memory._snapshot() gives, with a single device.

Note [The pickle is written by hand]

A million events are a million and a half dictionaries: to make and to pickle them takes many seconds and a gigabyte.
All have the same seven keys, so the opcodes of a row are the same but for three numbers and the phase, which struct
puts into their places. It is protocol 4, the newest that pytorch.org/memory_viz reads (Python 3.14 writes 5), in the
opcodes that it knows. It has none to drop what is on the stack: so the words that all rows share stand in a list of
their own, under "zbpipe", and a phase's list of frames where it is first used; after that both are referred to by their
places in the memo.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from zbpipe._version import __version__
from zbpipe.memory._results import Phase, Recorded

_PROTO, _STOP = b"\x80\x04", b"."
_LIST, _DICT, _MARK, _APPENDS, _SETITEMS = b"]", b"}", b"(", b"e", b"u"
_MEMOIZE, _BINGET, _LONG_BINGET = b"\x94", b"h", b"j"
_BATCH = 1000  # rows per APPENDS, as pickle has it: the viewer's stack is JavaScript's
_WORDS = (
    *("alloc", "free_requested", "free_completed"),
    *("action", "addr", "size", "stream", "device", "time_us", "frames", "filename", "line", "name"),
)
_WORD = {word: _BINGET + bytes([place]) for place, word in enumerate(_WORDS)}


def snapshot(recording: Recorded) -> Iterator[bytes]:
    """The pickle, in pieces."""
    events = recording.own_events()
    labels, frames, row = Labels(recording.phases), _Frames(), _Rows(recording.device.index or 0)
    yield _PROTO + _DICT + _MARK
    yield (
        _text("zbpipe") + _LIST + _MARK + _text(__version__) + b"".join(_text(w) + _MEMOIZE for w in _WORDS) + _APPENDS
    )
    yield _text("segments") + _LIST + _text("device_traces") + _LIST + _MARK + _LIST
    waiting = 0
    for time_ns, address, size, _ in events:
        label = labels(time_ns)
        if waiting == 0:
            yield _MARK
        if size > 0:
            yield row("alloc", address, size, time_ns) + frames(label) + _SETITEMS
        else:
            yield row("free_requested", address, -size, time_ns) + frames(label) + _SETITEMS
            yield row("free_completed", address, -size, time_ns) + frames(label) + _SETITEMS
        waiting += 1
        if waiting == _BATCH:
            yield _APPENDS
            waiting = 0
    yield (_APPENDS if waiting else b"") + _APPENDS
    yield _text("allocator_settings") + _DICT + _text("external_annotations") + _LIST + _SETITEMS + _STOP


def _text(text: str) -> bytes:
    encoded = text.encode()
    head = b"\x8c" + bytes([len(encoded)]) if len(encoded) < 256 else b"X" + struct.pack("<I", len(encoded))
    return head + encoded


class _Rows:
    """The opcodes of a row but for its frames and its end."""

    def __init__(self, device: int) -> None:
        head = {action: _DICT + _MARK + _WORD["action"] + _WORD[action] + _WORD["addr"] for action in _WORDS[:3]}
        middle, last = _WORD["size"], _WORD["time_us"]
        tail = _WORD["stream"] + b"K\x00" + _WORD["device"] + b"K" + bytes([device]) + _WORD["frames"]
        self._parts = head, middle, last, tail
        self._narrow = struct.Struct(f"<{len(head['alloc'])}s2sq{len(middle)}sci{len(last)}sci{len(tail)}s")
        self._wide = struct.Struct(f"<{len(head['alloc'])}s2sq{len(middle)}s2sq{len(last)}s2sq{len(tail)}s")

    def __call__(self, action: str, address: int, size: int, time_ns: int) -> bytes:
        head, middle, last, tail = self._parts
        time_us = time_ns // 1000
        if (size | time_us) >> 31:
            return self._wide.pack(
                head[action], b"\x8a\x08", address, middle, b"\x8a\x08", size, last, b"\x8a\x08", time_us, tail
            )
        return self._narrow.pack(head[action], b"\x8a\x08", address, middle, b"J", size, last, b"J", time_us, tail)


class _Frames:
    """The opcodes of a phase's list of frames: the list itself once, then its place in the memo."""

    def __init__(self) -> None:
        self._places: dict[str, bytes] = {}

    def __call__(self, label: str) -> bytes:
        return self._places.get(label) or self._first(label)

    def _first(self, label: str) -> bytes:
        self._places[label] = _LONG_BINGET + struct.pack("<I", len(_WORDS) + len(self._places))
        frame = _WORD["filename"] + _text("zbpipe.memory") + _WORD["line"] + b"K\x00" + _WORD["name"] + _text(label)
        return _LIST + _MEMOIZE + _MARK + _DICT + _MARK + frame + _SETITEMS + _APPENDS


class Labels:
    """From ascending times to the label of the innermost phase then."""

    def __init__(self, phases: list[Phase]) -> None:
        self._later: Iterator[Phase] = iter(sorted(phases, key=lambda phase: phase.begin_ns))
        self._next = next(self._later, None)
        self._open: list[Phase] = []
        self._label = ""
        self._until = -1  # up to which time the label is that

    def __call__(self, time_ns: int) -> str:
        if time_ns > self._until:
            self._look(time_ns)
        return self._label

    def _look(self, time_ns: int) -> None:
        while self._next is not None and self._next.begin_ns <= time_ns:
            self._open.append(self._next)
            self._next = next(self._later, None)
        self._open = [phase for phase in self._open if phase.end_ns >= time_ns]
        self._label = self._open[-1].label if self._open else "between phases"
        ends = [phase.end_ns for phase in self._open]
        self._until = min(ends + ([] if self._next is None else [self._next.begin_ns - 1]), default=1 << 63)
