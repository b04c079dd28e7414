"""The files that a recording writes: for viewers, and the picture."""

import gc
import gzip
import json
import pickle
import pickletools
import random
import struct
import sys
import tracemalloc
import warnings

import pytest
import torch
from support.recording_by_hand import ByHand
from torch import nn
from torch.cuda import _memory_viz

import zbpipe
from zbpipe import memory
from zbpipe.memory import _export, _lanes, _plot


@pytest.fixture
def step():
    net = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False))
    with memory.record() as rec:
        for k in range(2):
            with rec.phase("forward", microbatch=k):
                x = torch.randn(8, 16, requires_grad=True)
                y = net(x)
            _, groups = zbpipe.stage_backward_input([y], [torch.ones_like(y)], [x], net.parameters())
            del x, y
            zbpipe.stage_backward_weight(net.parameters(), groups)
    return rec


def test_chrome_trace(step, tmp_path):
    for name, load in (("a.json", open), ("a.json.gz", gzip.open)):
        step.export(tmp_path / name)
        with load(tmp_path / name, "rt") as file:
            rows = json.load(file)["traceEvents"]
        counter = [row for row in rows if row["ph"] == "C"]
        assert max(row["args"]["bytes"] for row in counter) == step.peak
        assert counter[-1]["args"]["bytes"] == step.live
        assert len(counter) == 1 + len(list(step.events()))
        slices = [row for row in rows if row["ph"] == "X"]
        assert [row["name"] for row in slices] == [p.label for p in step.phases]
        assert [row["args"]["peak bytes"] for row in slices] == [p.peak for p in step.phases]
        assert all(row["dur"] >= 0 and row["ts"] >= 0 for row in slices)


def test_snapshot_for_torchs_viewer(step, tmp_path):
    step.export(tmp_path / "a.pickle")
    snapshot = pickle.loads((tmp_path / "a.pickle").read_bytes())
    trace = snapshot["device_traces"][0]
    assert sum(row["size"] for row in trace if row["action"] == "alloc") == step.allocated
    assert {row["frames"][0]["name"] for row in trace} >= {"forward microbatch 0", "I microbatch 1", "W microbatch 1"}
    assert "del " in _memory_viz.trace(snapshot)
    assert "<script" in _memory_viz.trace_plot(snapshot)


def snapshot_by_dictionaries(recording):
    """What a snapshot is, in plain words."""
    rows = []
    for event in recording.events():
        inside = [p for p in recording.phases if p.begin_ns <= event.time_ns <= p.end_ns]
        label = inside[-1].label if inside else "between phases"  # the innermost: they are sorted by their beginnings
        row = {"addr": event.address, "size": abs(event.bytes), "stream": 0, "device": recording.device.index or 0}
        row |= {"time_us": event.time_ns // 1000}
        row |= {"frames": [{"filename": "zbpipe.memory", "line": 0, "name": label}]}
        actions = ("alloc",) if event.bytes > 0 else ("free_requested", "free_completed")
        rows += [{"action": action, **row} for action in actions if not event.older]
    return rows


def test_the_snapshot_is_that_of_a_plain_model_and_no_row_is_another(step, tmp_path):
    by_hand = ByHand()
    with by_hand.recording as odd:
        with odd.phase("outer" * 100, microbatch=1), odd.phase("innér", stage=3):
            by_hand.alloc(2_000, (1 << 47) + 1, 1 << 40)  # more than 4 bytes hold
            by_hand.alloc(2_500, 0x7, 3)
            by_hand.free(9_000, 0x8, 12)  # older
        by_hand.free(1 << 50, (1 << 47) + 1)
    many = ByHand(max_events=5000)
    with many.recording as long:
        for i in range(2345):  # more than one batch
            many.alloc(i * 10, 64 + i, 8)
            many.free(i * 10 + 5, 64 + i)
    with memory.record() as empty:
        pass
    for recording in (step, odd, long, empty):
        recording.export(tmp_path / "a.pickle")
        snapshot = pickle.loads((tmp_path / "a.pickle").read_bytes())
        (trace,) = snapshot["device_traces"]
        assert trace == snapshot_by_dictionaries(recording)
        assert len({id(row) for row in trace}) == len(trace), "the viewer writes into rows"
        assert len({id(row["frames"]) for row in trace}) == len({row["frames"][0]["name"] for row in trace})
        opcodes = {opcode.name for opcode, _, _ in pickletools.genops((tmp_path / "a.pickle").read_bytes())}
        assert opcodes <= READ_BY_THE_VIEWER


# What pytorch.org/memory_viz unpickles (torch/utils/viz/MemoryViz.js).
READ_BY_THE_VIEWER = {
    *("PROTO", "STOP", "FRAME", "MARK", "EMPTY_DICT", "EMPTY_LIST", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("BINGET", "LONG_BINGET", "MEMOIZE", "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"),
}


def test_a_recording_is_written_piece_by_piece(monkeypatch, tmp_path):
    """Never a million rows at once: the most that is joined for a write is bounded."""
    monkeypatch.setattr(_export, "_AT_ONCE", 100)
    hand = ByHand(max_events=100_000)
    with hand.recording as rec:
        for i in range(20_000):
            hand.alloc(i, i + 1, 8)
    before = {}
    for name in ("a.json", "a.json.gz", "a.pickle"):
        gc.collect()
        tracemalloc.start()
        rec.export(tmp_path / name)
        before[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    log = 20_000 * 40
    assert all(peak < log + 500_000 for peak in before.values()), before


def test_a_recording_that_cannot_be_exported_leaves_no_file_and_spares_the_old_one(tmp_path):
    with memory.record(max_events=1) as rec:
        torch.empty(2)
        torch.empty(2)
    for name in ("a.json", "a.json.gz", "a.pickle"):
        with pytest.raises(RuntimeError, match="max_events=1"):
            rec.export(tmp_path / name)
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text("of before")
        with pytest.raises(RuntimeError, match="max_events=1"):
            rec.export(tmp_path / name)
        assert (tmp_path / name).read_text() == "of before"


def test_unknown_formats_are_refused(step, tmp_path):
    with pytest.raises(ValueError, match=r"a\.txt"):
        step.export(tmp_path / "a.txt")
    assert not (tmp_path / "a.txt").exists()


def test_picture(step, tmp_path):
    pytest.importorskip("matplotlib")
    step.plot(tmp_path / "a.png", title="a step")
    header = (tmp_path / "a.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width > 600
    assert height > 300
    with memory.record() as empty:
        pass
    empty.plot(tmp_path / "b.png")


def test_a_thinned_curve_keeps_its_peak(monkeypatch, step):
    monkeypatch.setattr(_plot, "POINTS", 4)
    points = _plot.curve(step)
    assert len(points) <= 6
    assert max(level for _, level in points) == step.peak
    assert points == sorted(points, key=lambda point: point[0])
    assert points[-1][1] == step.live


def test_a_thinned_curve_is_that_of_all_events_but_for_what_is_lower(monkeypatch):
    monkeypatch.setattr(_plot, "POINTS", 16)
    rng = random.Random(0)
    for count in (*range(40), 500):
        hand = ByHand(max_events=2000)
        levels, alive = [(0, 0)], []
        with hand.recording as rec:
            for i in range(count):
                if alive and rng.random() < 0.5:
                    hand.free(10 * i + 1, alive.pop(rng.randrange(len(alive)))[0])
                else:
                    alive.append((i + 1, rng.randrange(1, 100)))
                    hand.alloc(10 * i + 1, *alive[-1])
                levels.append((10 * i + 1, sum(size for _, size in alive)))
        points = _plot.curve(rec)
        assert len(points) <= 19 and len(set(points)) == len(points)
        assert points == sorted(points, key=lambda point: point[0])
        assert set(points) <= set(levels)
        assert points[0] == (0, 0) and points[-1] == levels[-1]
        assert max(level for _, level in points) == max(level for _, level in levels)
        if count < 16:
            assert points == levels


def texts(figure):
    """All texts that are drawn, with their boxes in pixels."""
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    found = [t for axes in figure.axes for t in (*axes.texts, axes.xaxis.label, axes.yaxis.label)]
    for axis in (axis for axes in figure.axes if axes.axison for axis in (axes.xaxis, axes.yaxis)):
        low, high = axis.get_view_interval()
        found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    found = [t for t in (*figure.texts, *found) if t.get_text()]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in found]


def assert_that_it_reads(figure):
    boxes = texts(figure)
    for i, (text, box) in enumerate(boxes):
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1, text
        for other, its in boxes[:i]:
            assert not (box.x0 < its.x1 and its.x0 < box.x1 and box.y0 < its.y1 and its.y0 < box.y1), (text, other)
    return [text for text, _ in boxes]


def drawn(phases, blocks=((1_000_000, 40),)):
    """The figure of phases given as kind, microbatch, begin and end in ns, after blocks as time and bytes."""
    marks = sorted({t for _, _, *times in phases for t in times})
    hand = ByHand(max_events=100_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hand.recording as rec:
            todo = sorted(blocks)
            open_ = {}
            for time in sorted({*marks, *(time for time, _ in blocks)}):
                hand.now = time
                for i, (kind, microbatch, begin, end) in enumerate(phases):
                    if end == time:
                        open_.pop(i).__exit__(None, None, None)
                    if begin == time:
                        open_[i] = rec.phase(kind, microbatch=microbatch)
                        open_[i].__enter__()
                while todo and todo[0][0] <= time:
                    hand.alloc(*todo[0][:1], 0x1000 + len(todo), todo[0][1])
                    todo.pop(0)
        return _plot.draw(rec, "a step"), rec


MS = 1_000_000


@pytest.mark.parametrize("count", [1, 3, 50, 200, 2000])
def test_the_picture_reads_however_many_phases_there_are(count):
    pytest.importorskip("matplotlib")
    phases = [(("forward", "I", "W")[k % 3], k // 3, 100 * MS + k * MS, 100 * MS + k * MS + MS) for k in range(count)]
    figure, _ = drawn(phases, [(p[2] + 1000, 4000) for p in phases])
    words = assert_that_it_reads(figure)
    assert any(text in ("forward 0", "0") for text in words)
    if count <= 50:
        assert not [text for text in words if "too short" in text], "each is named"
    else:
        assert [text for text in words if "phases are too short to be named here" in text]


def test_names_never_meet_whatever_the_phases():
    pytest.importorskip("matplotlib")
    rng = random.Random(0)
    for count in (2, 7, 20, 60, 150):
        phases = []
        for i in range(count):
            begin = rng.randrange(1, 1000) * MS // rng.choice((1, 1, 100))
            phases.append(
                (
                    f"{'long ' * rng.randrange(4)}name {i % 9}",
                    rng.choice((None, i)),
                    begin,
                    begin + 1 + int(10 ** rng.uniform(3, 8)),
                )
            )
        assert_that_it_reads(drawn(phases)[0])


def test_short_phases_beside_a_long_one_are_named():
    pytest.importorskip("matplotlib")
    figure, _ = drawn(
        [
            ("forward", None, 76 * MS, 76 * MS + 300_000),
            ("backward", None, 77 * MS, 78 * MS),
            ("optimizer", None, 78 * MS, 4578 * MS),
        ]
    )
    words = assert_that_it_reads(figure)
    # Once in its place, once beside its colour.
    assert [words.count(kind) for kind in ("forward", "backward", "optimizer")] == [2, 2, 2]


def test_the_axis_goes_from_the_first_to_the_last_thing_that_happened():
    pytest.importorskip("matplotlib")
    figure, _ = drawn([("optimizer", None, 90 * MS, 4590 * MS)], [(76 * MS, 40), (80 * MS, 400)])
    assert figure.axes[0].get_xlim() == (76 * MS, 4590 * MS)
    figure, _ = drawn([("forward", None, 70 * MS, 80 * MS)], [(76 * MS, 40), (99 * MS, 400)])
    assert figure.axes[0].get_xlim() == (70 * MS, 99 * MS)


@pytest.mark.parametrize(("size", "unit"), [(12, "bytes"), (3_200, "kB"), (3_200_000, "MB"), (1 << 35, "GB")])
def test_units_fit(size, unit):
    pytest.importorskip("matplotlib")
    figure, rec = drawn([("forward", None, 70 * MS, 80 * MS)], [(71 * MS, size)])
    words = assert_that_it_reads(figure)
    assert f"live on cpu, {unit}" in words
    assert f"peak, {unit}" in str(rec)
    numbers = [float(text) for text in words if text.replace(".", "").isdigit()]
    assert 1 <= max(numbers) < 1001


def test_names_that_a_picture_cannot_take_as_they_are():
    """Long, of several lines, as formulas of matplotlib's, with an underscore, and more than a line has room for."""
    pytest.importorskip("matplotlib")
    odd = ["x" * 300, "two\nlines", "$a$ and $b", "_hidden", *(f"number {i} of many" for i in range(30))]
    figure, _ = drawn([(kind, None, i * 10 * MS + MS, i * 10 * MS + 9 * MS) for i, kind in enumerate(odd)])
    words = assert_that_it_reads(figure)
    assert "x" * 27 + "…" in words
    assert [text for text in words if text.startswith("and ") and text.endswith(" more")]


def test_what_overlaps_is_in_lanes_of_its_own():
    _, rec = drawn(
        [("outer", None, 1, 100), ("inner", None, 10, 20), ("innermost", None, 12, 15), ("next", None, 30, 40)]
    )
    assert [[p.kind for p in lane] for lane in _lanes.in_lanes(rec.phases)] == [
        ["outer"],
        ["inner", "next"],
        ["innermost"],
    ]
    many = [("deep", i, 1 + i, 1000 - i) for i in range(_lanes.MOST_LANES + 3)]
    figure, rec = drawn(many, [(500, 40)])
    assert len(_lanes.in_lanes(rec.phases)) == _lanes.MOST_LANES
    assert [text for text in assert_that_it_reads(figure) if text.startswith("3 phases")]


def test_without_matplotlib_the_error_says_what_to_do(step, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        step.plot(tmp_path / "a.png")
