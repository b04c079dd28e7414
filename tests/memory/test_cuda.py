"""Recordings of CUDA devices: a history played again (anywhere), and the whole of it (on a device)."""

import re

import pytest
import torch

from zbpipe import memory

FRAMES = [{"filename": torch.nn.functional.__file__, "name": "linear", "line": 1}]


class Simulated:
    """Stands for torch's CUDA allocator: counts and keeps a history as it does, with a clock that goes wrong."""

    def __init__(self, monkeypatch):
        self.counts = {"allocated": 7, "freed": 3}
        self.enabled = self.is_restless = False
        self.most, self.entries = 0, []
        of_torch = {"is_available": lambda: True, "init": lambda: None, "current_device": lambda: 1}
        of_c = {"_cuda_memoryStats": self.stats, "_cuda_isHistoryEnabled": lambda: self.enabled}
        of_memory = {"_record_memory_history": self.record, "_snapshot": self.snapshot}
        for owner, values in ((torch.cuda, of_torch), (torch._C, of_c), (torch.cuda.memory, of_memory)):
            for name, value in values.items():
                monkeypatch.setattr(owner, name, value, raising=False)

    def stats(self, _device):
        return {"allocation": {"all": dict(self.counts)}}

    def snapshot(self):
        if self.is_restless:
            self.alloc(0xFF, 1)
        return {"device_traces": [[], self.entries[-self.most :]]}

    def record(self, enabled, context="all", stacks="all", max_entries=0, clear_history=False):
        assert enabled is None or (context in (None, "alloc") and stacks == "python")
        self.enabled, self.most = enabled is not None, max_entries or self.most
        if clear_history or not enabled:
            self.entries.clear()

    def alloc(self, address, size):
        self.counts["allocated"] += 1
        self.append("segment_alloc", address, size, 5)  # which does not count
        self.append("alloc", address, size, 5)

    def free(self, address, size):
        self.counts["freed"] += 1
        self.append("free_requested", address, size, 4)  # and never "free_completed": another stream uses it

    def append(self, action, address, size, time_us):
        entry = {"action": action, "addr": address, "size": size, "time_us": time_us}
        entry |= {"frames": [*FRAMES, {"filename": "train.py", "name": "step", "line": size}]}
        self.entries += [entry] if self.enabled else []


def test_a_recording_of_a_simulated_allocator(monkeypatch):
    cuda = Simulated(monkeypatch)
    with memory.record("cuda") as rec:
        cuda.alloc(0xA, 400)
        with rec.phase("I"):
            cuda.alloc(0xB, 80)
        cuda.alloc(0xC, 8)
        with rec.phase("W"):
            cuda.free(0xA, 400)
            cuda.free(0xF, 1)
        with pytest.raises(RuntimeError, match="when it is over"):
            _ = rec.live
    assert not cuda.enabled and rec.incomplete == ""
    assert (rec.live, rec.peak, rec.allocated, rec.allocations) == (88, 488, 488, 3)
    phases = [(p.kind, p.live_begin, p.live_end, p.peak, p.freed, p.frees) for p in rec.phases]
    assert phases == [("I", 400, 480, 480, 0, 0), ("W", 488, 88, 488, 400, 1)]
    events = list(rec.events())
    assert [(event.bytes, event.older) for event in events] == [
        *((400, False), (80, False), (8, False), (-400, False), (-1, True))
    ]
    assert [event.time_ns for event in events] == sorted(event.time_ns for event in events)
    assert str(rec).startswith("cuda:1: peak 488 bytes, live 88 bytes")


def test_what_lived_at_the_peak_of_a_simulated_allocator(monkeypatch):
    cuda = Simulated(monkeypatch)
    with memory.record("cuda", trace=True) as rec:
        cuda.alloc(0xA, 400)
        with rec.phase("I", stage=1, microbatch=2):
            cuda.alloc(0xB, 80)
            cuda.alloc(0xC, 80)
        cuda.free(0xC, 80)
        cuda.alloc(0xD, 8)
    found = [(row.bytes, row.blocks, row.phase, row.created, row.alive) for row in rec.at_peak]
    assert found == [(400, 1, "", "train.py:400", 1), (160, 2, "I stage 1 microbatch 2", "train.py:80", 1)]


@pytest.mark.parametrize(
    ("lose", "more", "words"),
    [
        (lambda cuda: setattr(cuda, "most", 4), 9, "lost 16 of the recording's events.*max_events=9"),
        (lambda cuda: cuda.entries.clear(), 0, "lost 9 of"),
        (lambda cuda: setattr(cuda, "enabled", False), 2, "lost 2 of"),
        (lambda cuda: setattr(cuda, "is_restless", True), 0, "cuda:1 has allocated while its history was read"),
    ],
)
def test_a_history_that_is_not_whole_is_refused(monkeypatch, lose, more, words):
    cuda = Simulated(monkeypatch)
    with memory.record("cuda", max_events=9) as rec:
        for i in range(9):
            cuda.alloc(i + 1, 4)
        lose(cuda)
        for i in range(more):
            cuda.alloc(i + 20, 4)
    assert not cuda.enabled
    for read in (lambda: rec.peak, lambda: rec.phases, lambda: rec.export("never.json")):
        with pytest.raises(RuntimeError, match=words):
            read()
    assert re.search(words, str(rec))


def test_refusals(monkeypatch):
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="sees no CUDA device"):
            memory.record("cuda")
    cuda = Simulated(monkeypatch)
    with pytest.raises(ValueError, match="max_events is 0"):
        memory.record("cuda", max_events=0)
    cuda.enabled = True
    with pytest.raises(RuntimeError, match="keeps the allocator's history already"):
        memory.record("cuda").__enter__()
    assert cuda.enabled, "it is somebody else's"


@pytest.mark.cuda
def test_on_a_device(tmp_path):
    torch.empty(1, device="cuda")
    old = torch.empty(1000, device="cuda")
    with pytest.raises(torch.OutOfMemoryError), memory.record("cuda", on_out_of_memory=tmp_path, trace=True) as rec:  # noqa: PT012
        a = torch.empty(100, device="cuda")
        with rec.phase("inside"):
            b = torch.empty(50, device="cuda")
            del a, old
        with rec.phase("last"):
            torch.empty(1 << 45, device="cuda")
    assert (rec.live, rec.peak, rec.allocated) == (200, 600, 600)
    assert [event.bytes for event in rec.events() if event.older] == [-4000]
    inside = rec.phases[0]
    assert (inside.live_begin, inside.peak, inside.live_end) == (400, 600, 200)
    assert not torch._C._cuda_isHistoryEnabled()
    assert [(row.bytes, row.phase, row.alive) for row in rec.at_peak] == [(400, "", 0), (200, "inside", 1)]
    assert rec.at_peak[1].holder.blame.text == "variable b of test_on_a_device()"
    (report,) = tmp_path.glob("*.txt")
    assert report.read_text().startswith("out of memory on cuda:0 in last at ")
    assert "variable b of test_on_a_device" in report.read_text()
    del b
