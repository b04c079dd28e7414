"""Recordings of CUDA devices: how a history becomes a log (anywhere), and the whole of it (on a device)."""

import pytest
import torch

from zbpipe import memory
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
    log.check()
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
        self.enabled, self.most = enabled is not None, max_entries or self.most

    def alloc(self, address, size):
        self.counts["allocated"] += 1
        self.entries.append(entry("alloc", address, size, 5))

    def free(self, address, size):
        self.counts["freed"] += 1
        self.entries.append(entry("free_requested", address, size, 4))


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


def test_simulated_refusals(monkeypatch):
    cuda = Simulated(monkeypatch)
    cuda.enabled = True
    with pytest.raises(RuntimeError, match="already on"):
        memory.record("cuda").__enter__()
    assert memory._running.running.recordings == ()
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
def test_a_history_of_somebody_else_is_left_alone():
    torch.cuda.memory._record_memory_history("all", context=None)
    try:
        with pytest.raises(RuntimeError, match="already on"):
            memory.record("cuda").__enter__()
    finally:
        torch.cuda.memory._record_memory_history(None)


@pytest.mark.cuda
def test_a_history_that_was_too_short():
    with memory.record("cuda", max_events=4) as rec:
        for _ in range(100):
            torch.empty(10, device="cuda")
    with pytest.raises(RuntimeError, match="max_events=4"):
        _ = rec.peak
