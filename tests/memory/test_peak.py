"""What lived at a recording's peak: which phase and line made it, and who holds it at the end."""

import os
import random
import sys
import threading

import pytest
import torch

from zbpipe import _C, memory  # the blocks of memory and their traces
from zbpipe.memory import _export, _peak  # what the picture is made of, and who searches for holders

HERE = os.path.relpath(__file__)  # as a place of the program is told
LINE = sys._getframe().f_lineno


class Hoard:
    def __init__(self):
        self.kept = []

    def forward(self, count):
        x = torch.ones(count) + 1
        self.kept.append(torch.ones(2 * count))
        return x


def test_it_is_told_by_phase_and_line_with_the_holders():
    model, outs = Hoard(), []
    with memory.record(trace=True) as rec:
        outside = torch.ones(10)
        for microbatch in (0, 1, 3):
            with rec.phase("forward", stage=2, microbatch=microbatch):
                outs.append(model.forward(1000 * (microbatch + 1)))
        with rec.phase("B", stage=2, microbatch=0), rec.phase("inner"):
            torch.ones(3)
        outs.pop(1)
        later = torch.ones(30)
        assert "at the peak" not in str(rec)
    forward = "forward stage 2 microbatches 0 to 1, 3"
    found = [(row.bytes, row.blocks, row.phase, row.created, row.alive) for row in rec.at_peak]
    assert found == [
        (56_000, 3, forward, f"{HERE}:{LINE + 9}", 3),
        (28_000, 3, forward, f"{HERE}:{LINE + 8}", 2),
        (40, 1, "", f"{HERE}:{LINE + 16}", 1),
        (12, 1, "inner", f"{HERE}:{LINE + 21}", 0),
    ]
    assert sum(row.bytes for row in rec.at_peak) == rec.peak
    blamed = [str(row.holder and row.holder.blame).partition(" (")[0] for row in rec.at_peak]
    variable = "variable {} of test_it_is_told_by_phase_and_line_with_the_holders()"
    assert blamed[0].startswith("attribute kept of ") and "Hoard" in blamed[0]
    assert blamed[1:] == [variable.format("outs"), variable.format("outside"), "None"]
    assert rec.at_peak[1].holder.bytes == 16_000, "the largest that lives"
    head, *rows = str(rec).partition("at the peak\n")[2].splitlines()
    assert " ".join(head.split()) == "made in at alive at the end, and held by blocks kB"
    assert rows[1].startswith(forward) and "3, attribute kept of " in rows[1] and rows[1].endswith("56.000")
    assert rows[4].split()[-3:] == ["0", "1", "0.012"]
    del later, outside


def test_the_ten_largest_rows_are_shown():
    with memory.record(trace=True) as rec:
        kept = []
        for stage in range(12):
            with rec.phase("forward", stage=stage):
                kept.append(torch.ones(1000 + stage))
    assert [row.bytes for row in rec.at_peak] == [4 * (1011 - stage) for stage in range(12)]
    assert [row.holder is None for row in rec.at_peak] == [False] * 10 + [True] * 2
    assert str(rec).endswith("and 8.004 kB in 2 smaller rows")


def test_a_block_is_its_own_threads_phases():
    ready, done = threading.Event(), threading.Event()
    kept = []

    def work():
        with rec.phase("W", stage=1):
            ready.wait()
            kept.append(torch.ones(7))
            done.set()

    with memory.record(trace=True) as rec:
        thread = threading.Thread(target=work)
        thread.start()
        with rec.phase("I", stage=0):
            ready.set()
            done.wait()
            kept.append(torch.ones(8))
        thread.join()
    assert sorted((row.phase, row.bytes) for row in rec.at_peak) == [("I stage 0", 32), ("W stage 1", 28)]


def test_random_blocks_against_a_naive_replay():
    """Addresses are used again, also after the peak and by blocks from before it."""
    rng = random.Random(0)
    for _ in range(20):
        old = [torch.empty(64) for _ in range(5)]
        live, level, most, at_most = {}, 0, 0, []
        with memory.record(trace=True) as rec:
            for number in range(200):
                if old and rng.random() < 0.1:
                    old.pop()
                elif live and rng.random() < 0.5:
                    level -= live.pop(rng.choice([*live])).nbytes
                else:
                    live[number] = torch.empty(rng.choice((16, 64, 100)))
                    level += live[number].nbytes
                    if level > most:
                        most, at_most = level, [*live]
        (row,) = rec.at_peak
        alive = [number for number in at_most if number in live]
        assert (row.bytes, row.blocks, row.alive) == (most, len(at_most), len(alive)) and rec.peak == most
        assert (row.holder is not None) == bool(alive)


def test_phases_that_overlap_and_many_of_them():
    with memory.record("cpu:0", trace=True) as rec:
        assert rec.device == torch.device("cpu")
        first, second = rec.phase("first"), rec.phase("second\nof two")
        kept = [torch.ones(1)]
        first.__enter__()
        kept.append(torch.ones(2))
        second.__enter__()
        kept.append(torch.ones(4))
        first.__exit__(None, None, None)
        kept.append(torch.ones(8))
        second.__exit__(None, None, None)
        kept.append(torch.ones(16))
        for number in range(300):
            with rec.phase("many", microbatch=number):
                kept.append(torch.ones(32))
    found = sorted((row.bytes, row.phase) for row in rec.at_peak)
    second = "second\nof two"
    assert found == [(4, ""), (8, "first"), (16, second), (32, second), (64, ""), (38400, "many microbatches 0 to 299")]
    assert all(row.holder.blame.text.startswith("variable kept of ") for row in rec.at_peak)
    assert "second of two" in str(rec)


def test_memory_that_nobody_knows_a_tensor_of():
    with memory.record(trace=True) as rec:
        hidden = torch.ones(50).__dlpack__()
    (row,) = rec.at_peak
    assert (row.bytes, row.alive) == (200, 1)
    assert "nothing that can be seen" in str(rec) or row.holder is not None
    del hidden


def test_where_it_is_not_known():
    with pytest.raises(ValueError, match=r"trace is True and max_events is 0; .* so keep one"):
        memory.record(max_events=0, trace=True)
    with memory.record() as rec:
        torch.ones(3)
    with pytest.raises(RuntimeError, match=r"the recording did not trace; use record\(trace=True\)"):
        _ = rec.at_peak
    with memory.record(max_events=1, trace=True) as rec:
        kept = torch.ones(3)
        del kept
        with pytest.raises(RuntimeError, match=r"at_peak needs the recording's log, and it still runs"):
            _ = rec.at_peak
    with pytest.raises(RuntimeError, match=r"at_peak needs the whole log, and 1 events did not fit"):
        _ = rec.at_peak
    assert "at the peak" not in str(rec)


def test_nothing_is_traced_afterwards():
    with memory.record(trace=True):
        kept = torch.ones(3)
    (trace,) = [trace for address, _, _, trace in _C.live_blocks(0) if address == kept.data_ptr()]
    assert trace > 0 and _C.trace_of(trace) == []
    with memory.record(trace=True) as rec, memory.record(trace=True) as inner:
        torch.ones(4)
    (row,), (same,) = rec.at_peak, inner.at_peak
    assert row.created == same.created == f"{HERE}:{test_nothing_is_traced_afterwards.__code__.co_firstlineno + 6}"
    assert _C.trace_of(trace) == []


def test_an_error_in_the_block_goes_on_and_one_of_ours_is_said(monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("planted")

    with pytest.raises(OSError), memory.record(trace=True) as rec:  # noqa: PT012, PT011
        monkeypatch.setattr(_peak, "search", fail)
        kept = torch.ones(3)
        raise OSError
    with pytest.raises(RuntimeError, match=r"^at_peak is not known: ZeroDivisionError: planted$"):
        _ = rec.at_peak
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError), memory.record(trace=True) as rec:  # noqa: PT012
        kept = torch.ones(3)
        1 / 0  # noqa: B018
    assert [row.bytes for row in rec.at_peak] == [12]
    del kept


def test_the_picture_marks_the_peak_and_numbers_the_bars():
    pytest.importorskip("matplotlib")
    ms = 1_000_000
    spans = [("I", 1, 0, 0, 40), ("I", 1, 12, 40, 41), ("W", None, 3, 50, 90), ("step", None, None, 0, 100)]
    phases = [memory.Phase(kind, stage, number, 1, a * ms, b * ms, *[0] * 7) for kind, stage, number, a, b in spans]
    events = [(at * ms, 1, 400, level, 1, False) for at, level in ((20, 400), (60, 800), (80, 100), (99, 800))]
    strip, axes = _export.draw("", "cpu", phases, events, 4).axes
    assert [text.get_text() for text in strip.texts] == ["s1 m0", "m3"], "where there is room"
    (point,) = [line for line in axes.lines if line.get_marker() == "o"]
    assert (*point.get_xdata(), *point.get_ydata()) == (60, 800)
