"""The files that a recording writes: for viewers, and the picture."""

import gc
import gzip
import json
import random
import struct
import sys
import tracemalloc
import warnings

import pytest
import torch

from zbpipe import memory
from zbpipe.memory import _export  # how many rows are in memory at once, and what the picture is made of

MS = 1_000_000


@pytest.fixture
def step():
    with memory.record():
        old = torch.ones(3)
    with memory.record() as rec:
        del old
        for k in range(2):
            with rec.phase("forward", microbatch=k):
                x = torch.ones(8, 16)
            with rec.phase("I"):
                del x
    return rec


def test_chrome_trace(step, tmp_path):
    assert [event.bytes for event in step.events() if event.older] == [-12]
    for name, load in (("a.json", open), ("a.json.gz", gzip.open)):
        step.export(tmp_path / name)
        with load(tmp_path / name, "rt") as file:
            rows = json.load(file)["traceEvents"]
        counter = [row for row in rows if row["ph"] == "C"]
        assert max(row["args"]["bytes"] for row in counter) == step.peak
        assert counter[-1]["args"]["bytes"] == step.live
        assert len(counter) == 1 + len([event for event in step.events() if not event.older])
        slices = [row for row in rows if row["ph"] == "X"]
        assert [row["name"] for row in slices] == [p.label for p in step.phases]
        assert [row["args"]["peak"] for row in slices] == [p.peak for p in step.phases]
        assert all(row["dur"] >= 0 and row["ts"] >= 0 for row in slices)


def test_a_recording_is_written_piece_by_piece(monkeypatch, tmp_path):
    """Never a million rows at once: the most that is joined for a write is bounded."""
    monkeypatch.setattr(_export, "_AT_ONCE", 100)
    for name in ("a.json", "a.json.gz"):
        gc.collect()
        tracemalloc.start()
        _export.export(tmp_path / name, "cpu", [], ((i, i + 1, 8, 8 * i, 1, False) for i in range(20_000)))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 20_000 * 40 + 500_000, name


def test_a_recording_that_cannot_be_exported_says_so_and_spares_the_old_file(step, tmp_path):
    with memory.record(max_events=1) as rec:
        torch.empty(2)
    (tmp_path / "a.json").write_text("of before")
    for write, name in ((rec.export, "export"), (rec.plot, "plot")):
        with pytest.raises(
            RuntimeError, match=rf"^{name}\(\) needs the whole log, and 1 events did not fit into the log"
        ):
            write(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == "of before"
    for name in ("a.txt", "a.pickle"):
        with pytest.raises(ValueError, match=rf"{name}' does not say which format to write; end it in \.json"):
            step.export(tmp_path / name)
        assert not (tmp_path / name).exists()


def test_a_thinned_curve_is_that_of_all_events_but_for_what_is_lower(monkeypatch):
    monkeypatch.setattr(_export, "_POINTS", 16)
    rng = random.Random(0)
    for count in (*range(40), 500):
        levels = [(0, 0), *((10 * i + 1, rng.randrange(100)) for i in range(count))]
        points = _export.curve([(time, 0, 0, level, 0, False) for time, level in levels[1:]], count)
        assert len(points) <= 19 and len(set(points)) == len(points)
        assert points == sorted(points) and set(points) <= set(levels)
        assert points[0] == (0, 0) and points[-1] == levels[-1]
        assert max(level for _, level in points) == max(level for _, level in levels)
        assert count >= 16 or points == levels


def test_the_picture(step, tmp_path):
    pytest.importorskip("matplotlib")
    with memory.record() as empty:
        pass
    for rec in (step, empty):
        rec.plot(tmp_path / "a.png", title="a step")
        header = (tmp_path / "a.png").read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", header[16:])
        assert width > 600 and height > 300


def test_the_picture_has_a_row_for_each_kind_of_phase_and_bears_any_name():
    """Long, of several lines, as formulas of matplotlib's, with an underscore, and more than there are rows for. The
    axis goes from the first to the last thing that happened."""
    pytest.importorskip("matplotlib")
    odd = ["x" * 300, "two\nlines", "$a$ and $b", "_hidden", *(f"number {i} of many" for i in range(30))]
    spans = [("forward", 70, 80), ("I", 81, 90), ("forward", 91, 92)]
    spans += [(kind, 93 + i, 94 + i) for i, kind in enumerate(odd)]
    phases = [memory.Phase(kind, None, None, 1, begin * MS, end * MS, *[0] * 7) for kind, begin, end in spans]
    events = [(76 * MS, 1, 3_200_000, 3_200_000, 1, False), (199 * MS, 2, 400, 3_200_400, 1, False)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = _export.draw("$x$ " * 50, "cpu", phases, events, 2)
        figure.canvas.draw()
    strip, axes = figure.axes
    rows = [label.get_text() for label in strip.get_yticklabels()]
    assert rows[:6] == ["forward", "I", "x" * 27 + "…", "two lines", "$a$ and $b", "_hidden"]
    assert len(rows) == 13 and rows[-1] == "more"
    title = strip.get_title(loc="left")
    assert title.startswith("$x$ $x$") and title.endswith("…: peak 3.200 MB")
    assert [len(bars.get_paths()) for bars in strip.collections][:3] == [2, 1, 1]
    assert axes.get_xlim() == (70, 199) and axes.get_xlabel().startswith("ms ")
    assert axes.get_ylabel() == "live on cpu, MB"
    assert max(axes.lines[0].get_ydata()) == pytest.approx(3.2004)


def test_without_matplotlib_the_error_says_what_to_do(step, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        step.plot(tmp_path / "a.png")


def test_the_table_fits_80_columns():
    with memory.record() as rec, rec.phase("a phase that somebody gave a very long name", microbatch=1023):
        torch.ones(100_000_000 // 4)
    assert "a phase that somebody gave a v…" in str(rec) and max(map(len, str(rec).splitlines())) <= 80
