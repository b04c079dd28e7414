"""Recordings of CUDA devices: how a history becomes a log (anywhere), and the whole of it (on a device)."""

import contextlib
import os
import re

import pytest
import torch

from zbpipe import memory
from zbpipe.memory import _out_of_memory
from zbpipe.memory._cuda import CudaSource, replay


def entry(action, addr=0, size=0, time_us=0):
    return {"action": action, "addr": addr, "size": size, "time_us": time_us, "stream": 0, "frames": []}


HISTORY = [
    entry("alloc", 0x1, 11, 1000),  # before the recording
    entry("segment_alloc", 0x100, 2 << 20, 1001),
    entry("alloc", 0xA, 400, 1002),
    entry("alloc", 0xB, 80, 1003),
    entry("free_requested", 0xA, 400, 1004),
    entry("free_completed", 0xA, 400, 1009),
    entry("free_requested", 0x1, 11, 1005),
    entry("snapshot", time_us=1006),
]


def test_marks_find_their_places_whatever_the_clocks_say():
    # In the order of the counts: A | B, -A | | the older one. All marks claim the same early moment.
    marks = [(2, 5000), (4, 5000), (4, 5000)]
    log, missing = replay(HISTORY, 1, 5, 4000, marks, 100, 1_000_000 - 4000)
    assert missing == 0
    assert log.counters()["live"] == 80
    assert log.counters()["peak"] == 480
    assert (log.counters()["older_frees"], log.counters()["older_freed"]) == (1, 11)
    live_and_allocated = [(mark[2], mark[4]) for mark in log.marks()]
    assert live_and_allocated == [(0, 400), (400, 80), (80, 0), (80, 0)]
    assert log.held(1, 1, 2) == 400


def test_what_the_history_lost_is_counted():
    _, missing = replay(HISTORY[3:], 1, 7, 0, [], 100, 0)
    assert missing == 3


def test_marks_behind_the_last_event():
    log, _ = replay([], 7, 7, 10, [(7, 20), (7, 30)], 100, 0)
    assert [mark[0] for mark in log.marks()] == [10, 20, 30]


class Simulated:
    """Stands for torch's CUDA allocator: counts and keeps a history as it does, with a clock that goes wrong."""

    def __init__(self, monkeypatch, backend="native"):
        self.counts = {"allocated": 7, "freed": 3}
        self.enabled = False
        self.entries = []
        self.most = 0
        self.frames = []
        self.calls = []
        self.observers = []
        monkeypatch.setattr(
            torch._C, "_cuda_attach_out_of_memory_observer", lambda tell: self.observers.append(tell), raising=False
        )
        for name, value in {
            "is_available": lambda: True,
            "init": lambda: None,
            "current_device": lambda: 1,
            "get_allocator_backend": lambda: backend,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(
            torch._C, "_cuda_memoryStats", lambda _: {"allocation": {"all": self.counts}}, raising=False
        )
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.enabled, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[], self.entries[-self.most :]]})

    def record(self, enabled, context="all", max_entries=0, clear_history=False):
        assert context is None or enabled is None
        self.calls.append(enabled)
        self.enabled, self.most = enabled is not None, max_entries or self.most
        if clear_history or not enabled:
            self.entries.clear()

    def by_its_user(self, most):
        """As when somebody switches the history on for himself, with stacks."""
        self.enabled, self.most, self.frames = True, most, [{"filename": "train.py", "line": 1, "name": "f"}]

    def alloc(self, address, size):
        self.counts["allocated"] += 1
        self.append(entry("alloc", address, size, 5))

    def free(self, address, size):
        self.counts["freed"] += 1
        self.append(entry("free_requested", address, size, 4))

    def append(self, made):
        if self.enabled:
            self.entries.append({**made, "frames": self.frames})

    def run_out(self, asked, device=1):
        for tell in self.observers:
            tell(device, asked, 80 << 30, 123)
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked} bytes")


def test_recordings_of_a_simulated_allocator(monkeypatch):
    cuda = Simulated(monkeypatch)
    with memory.record("cuda") as rec:
        cuda.alloc(0xA, 400)
        with rec.phase("I", stage=1, microbatch=0):
            cuda.alloc(0xB, 80)
        with memory.record("cuda:1") as inner:
            cuda.alloc(0xC, 8)
        assert cuda.enabled, "the outer one still needs it"
        with rec.phase("W", stage=1, microbatch=0):
            cuda.free(0xA, 400)
            cuda.free(0xF, 1)
        with pytest.raises(RuntimeError, match="when it is over"):
            _ = rec.live
    assert not cuda.enabled
    assert rec.device == inner.device == torch.device("cuda:1")
    assert (rec.live, rec.peak, rec.allocated, rec.older_frees) == (88, 488, 488, (1, 1))
    assert (inner.live, inner.allocations) == (8, 1)
    assert [(p.kind, p.live_begin, p.live_end, p.peak) for p in rec.phases] == [
        ("I", 400, 480, 480),
        ("W", 488, 88, 488),
    ]
    assert [h.bytes for h in rec.held] == [400]
    assert "cuda:1" in str(rec)


def test_a_simulated_history_that_is_too_short(monkeypatch):
    cuda = Simulated(monkeypatch)
    with memory.record("cuda", max_events=2) as rec:
        for i in range(10):
            cuda.alloc(i + 1, 4)
    with pytest.raises(RuntimeError, match=r"lost 6 of the recording's events.*max_events=2"):
        _ = rec.peak


def test_a_history_that_is_on_already_is_read_and_left_on(monkeypatch):
    cuda = Simulated(monkeypatch)
    cuda.by_its_user(most=1000)
    cuda.alloc(0x1, 11)
    with memory.record("cuda") as rec:
        cuda.alloc(0xA, 400)
        with memory.record("cuda") as inner, inner.phase("inside"):
            cuda.alloc(0xB, 80)
        cuda.free(0x1, 11)
    cuda.alloc(0x2, 22)
    assert cuda.enabled and cuda.calls == [], "nobody has touched it"
    assert [made["addr"] for made in cuda.entries] == [0x1, 0xA, 0xB, 0x1, 0x2]
    assert (rec.live, rec.peak, rec.older_frees) == (480, 480, (1, 11))
    assert (inner.live, inner.phases[0].peak) == (80, 80)


def test_a_history_that_somebody_switches_on_meanwhile_is_left_on(monkeypatch):
    cuda = Simulated(monkeypatch)
    with memory.record("cuda") as rec:
        cuda.alloc(0xA, 400)
        cuda.by_its_user(most=1000)
        cuda.alloc(0xB, 80)
    assert cuda.enabled and cuda.calls == ["all"]
    assert rec.live == 480
    with memory.record("cuda") as rec:  # and now it is that one's
        cuda.alloc(0xC, 8)
    assert cuda.enabled and rec.live == 8


@pytest.mark.parametrize("what", ["too short", "state"])
def test_a_history_of_somebody_elses_that_lacks_events_says_whose_it_is(monkeypatch, what):
    cuda = Simulated(monkeypatch)
    cuda.by_its_user(most=2)
    with memory.record("cuda") as rec:
        for i in range(5):
            cuda.alloc(i, 4)
        if what == "state":
            cuda.entries.clear()
    lost = 3 if what == "too short" else 5
    with pytest.raises(RuntimeError, match=rf"lost {lost} of the recording's events: it is that of torch.cuda.memory"):
        _ = rec.peak


def test_a_history_that_is_switched_off_meanwhile_is_noticed(monkeypatch):
    cuda = Simulated(monkeypatch)
    with memory.record("cuda") as rec:
        cuda.alloc(0xA, 400)
        cuda.record(None)
        cuda.alloc(0xB, 80)
    with pytest.raises(RuntimeError, match=r"lost 2 of .* switched off meanwhile"):
        _ = rec.peak


@pytest.fixture
def observed(monkeypatch):
    """The observers begin anew: torch takes one for good."""
    monkeypatch.setattr(_out_of_memory, "_observed", _out_of_memory._Observed())


def test_cuda_tells_when_memory_runs_out_and_the_program_may_go_on(monkeypatch, tmp_path, observed, caplog):
    cuda = Simulated(monkeypatch)
    with memory.record("cuda", on_out_of_memory=tmp_path / "oom") as rec:
        cuda.alloc(0xA, 400)
        with rec.phase("forward", stage=1, microbatch=0):
            cuda.alloc(0xB, 80)
        with rec.phase("step"), contextlib.suppress(torch.OutOfMemoryError), rec.phase("forward", microbatch=1):
            cuda.alloc(0xC, 8)
            cuda.run_out(1 << 40, device=0)  # of another device: nothing is left behind
        assert not (tmp_path / "oom").exists()
        with rec.phase("step"), contextlib.suppress(torch.OutOfMemoryError), rec.phase("forward", microbatch=2):
            cuda.free(0xA, 400)
            cuda.run_out(1 << 41)
        cuda.free(0xB, 80)
    text = (tmp_path / "oom" / f"process{os.getpid()}.txt").read_text()
    assert text.startswith(
        "out of memory on cuda:1 in forward microbatch 2\n  2199023255552 bytes were asked for; of the"
    )
    assert "cuda:1: peak 488 bytes, live 88 bytes" in text, "as it was then"
    assert re.search(r"^forward microbatch 2 +[\d.]+ +488 +88 +488 +0$", text, re.MULTILINE), "a phase that runs"
    by_phase = text.partition("handed out\n")[2].splitlines()[2:4]
    assert [line.split() for line in by_phase] == [
        ["forward", "stage", "1", "microbatch", "0", "80", "1"],
        ["forward", "microbatch", "1", "8", "1"],
    ]
    assert caplog.messages == [
        f"out of memory on cuda:1 in forward microbatch 2; what lived and who held it: {tmp_path}/oom/process{os.getpid()}.txt"
    ]
    assert rec.live == 8, "the recording has gone on"
    assert len(cuda.observers) == 1
    with contextlib.suppress(torch.OutOfMemoryError):
        cuda.run_out(5)
    assert len(caplog.messages) == 1, "it is over"


def test_an_error_of_cudas_that_leaves_the_recording_is_told_once(monkeypatch, tmp_path, observed, caplog):
    cuda = Simulated(monkeypatch)
    with pytest.raises(torch.OutOfMemoryError), memory.record("cuda", on_out_of_memory=tmp_path):
        cuda.run_out(1 << 40)
    assert len([m for m in caplog.messages if m.startswith("out of memory on cuda:1 in no phase")]) == 1
    assert len(list(tmp_path.glob("*.txt"))) == 1


def test_simulated_refusals(monkeypatch):
    Simulated(monkeypatch)
    with pytest.raises(ValueError, match="max_events is 0"):
        memory.record("cuda", max_events=0)
    Simulated(monkeypatch, backend="cudaMallocAsync")
    with pytest.raises(RuntimeError, match="cudaMallocAsync"):
        memory.record("cuda").__enter__()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_is_refused():
    with pytest.raises(RuntimeError, match="sees no CUDA device"):
        CudaSource(torch.device("cuda"), 100)


@pytest.mark.cuda
def test_on_a_device():
    torch.empty(1, device="cuda")
    old = torch.empty(1000, device="cuda")
    with memory.record("cuda") as rec:
        a = torch.empty(100, device="cuda")
        with rec.phase("inside"):
            b = torch.empty(50, device="cuda")
            del a, old
        with memory.record("cuda") as inner:
            c = torch.empty(10, device="cuda")
    assert (rec.live, rec.peak, rec.allocated, rec.freed) == (240, 600, 640, 400)
    assert rec.older_frees == (1, 4000)
    (inside,) = rec.phases
    assert (inside.live_begin, inside.peak, inside.live_end) == (400, 600, 200)
    assert (inner.live, inner.allocations) == (40, 1)
    assert not torch._C._cuda_isHistoryEnabled()
    del b, c


@pytest.mark.cuda
@pytest.mark.parametrize("begun", ["before", "meanwhile"])
def test_a_history_of_somebody_else_is_read_and_left_alone(begun):
    if begun == "before":
        torch.cuda.memory._record_memory_history("all")
    try:
        with memory.record("cuda") as rec:
            if begun == "meanwhile":
                torch.cuda.memory._record_memory_history("all")
            a = torch.empty(100, device="cuda")
        assert rec.live == 400
        assert torch._C._cuda_isHistoryEnabled()
        del a
    finally:
        torch.cuda.memory._record_memory_history(None)


@pytest.mark.cuda
def test_on_a_device_that_runs_out_of_memory(tmp_path):
    with memory.record("cuda", on_out_of_memory=tmp_path) as rec, rec.phase("forward"):
        held = torch.empty(1000, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 45, device="cuda")
    (report,) = tmp_path.glob("*.txt")
    assert report.read_text().startswith("out of memory on cuda:0 in forward\n  35184372088832 bytes")
    assert "variable held of test_on_a_device_that_runs_out_of_memory" in report.read_text()
    del held


@pytest.mark.cuda
def test_a_history_that_was_too_short():
    with memory.record("cuda", max_events=4) as rec:
        for _ in range(100):
            torch.empty(10, device="cuda")
    with pytest.raises(RuntimeError, match="max_events=4"):
        _ = rec.peak
