"""Recordings of CUDA devices: a history played again (anywhere), and the whole of it (on a device)."""

import pytest
import torch

from zbpipe import memory


class Simulated:
    """Stands for torch's CUDA allocator: counts and keeps a history as it does, with a clock that goes wrong."""

    def __init__(self, monkeypatch):
        self.counts = {"allocated": 7, "freed": 3}
        self.enabled = False
        self.most, self.entries, self.frames, self.calls = 0, [], [], []
        of_torch = {"is_available": lambda: True, "init": lambda: None, "current_device": lambda: 1}
        of_c = {"_cuda_memoryStats": self.stats, "_cuda_isHistoryEnabled": lambda: self.enabled}
        of_memory = {"_record_memory_history": self.record, "_snapshot": self.snapshot}
        for owner, values in ((torch.cuda, of_torch), (torch._C, of_c), (torch.cuda.memory, of_memory)):
            for name, value in values.items():
                monkeypatch.setattr(owner, name, value, raising=False)

    def stats(self, _device):
        return {"allocation": {"all": self.counts}}

    def snapshot(self):
        return {"device_traces": [[], self.entries[-self.most :]]}

    def record(self, enabled, context="all", max_entries=0, clear_history=False):
        assert context is None or enabled is None
        self.calls.append(enabled)
        self.enabled, self.most = enabled is not None, max_entries or self.most
        if clear_history or not enabled:
            self.entries.clear()

    def by_its_user(self):
        """As when somebody switches the history on for himself, with stacks."""
        self.enabled, self.most, self.frames = True, 1000, [{"filename": "train.py", "line": 1, "name": "f"}]

    def alloc(self, address, size):
        self.counts["allocated"] += 1
        self.append("segment_alloc", address, size, 5)  # which does not count
        self.append("alloc", address, size, 5)

    def free(self, address, size):
        self.counts["freed"] += 1
        self.append("free_requested", address, size, 4)  # and never "free_completed": another stream uses it

    def append(self, action, address, size, time_us):
        entry = {"action": action, "addr": address, "size": size, "time_us": time_us, "frames": self.frames}
        self.entries += [entry] if self.enabled else []


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
    assert (rec.live, rec.peak, rec.allocated, rec.freed, rec.older_frees) == (88, 488, 488, 400, (1, 1))
    assert (inner.live, inner.allocations) == (8, 1)
    assert [(p.kind, p.live_begin, p.live_end, p.peak) for p in rec.phases] == [
        ("I", 400, 480, 480),
        ("W", 488, 88, 488),
    ]
    assert [h.bytes for h in rec.held] == [400]
    assert [event.bytes for event in rec.events()] == [400, 80, 8, -400, -1]
    assert "cuda:1" in str(rec)


@pytest.mark.parametrize("begun", ["before", "meanwhile"])
def test_a_history_that_is_somebody_elses_is_read_and_left_on(monkeypatch, begun):
    cuda = Simulated(monkeypatch)
    if begun == "before":
        cuda.by_its_user()
    cuda.alloc(0x1, 11)
    with memory.record("cuda") as rec:
        cuda.alloc(0xA, 400)
        if begun == "meanwhile":
            cuda.by_its_user()
        cuda.free(0x1, 11)
    assert cuda.enabled and cuda.calls == ([] if begun == "before" else ["all"])
    assert (rec.live, rec.peak, rec.older_frees) == (400, 400, (1, 11))


@pytest.mark.parametrize(
    ("lost", "lose", "more"),
    [
        (16, lambda cuda: setattr(cuda, "most", 4), 9),
        (9, lambda cuda: cuda.entries.clear(), 0),
        (2, lambda cuda: (cuda.record("all", None, 99), setattr(cuda, "enabled", False)), 2),
    ],
)
def test_a_history_that_lacks_events_is_refused(monkeypatch, lost, lose, more):
    cuda = Simulated(monkeypatch)
    with memory.record("cuda", max_events=9) as rec:
        for i in range(9):
            cuda.alloc(i + 1, 4)
        lose(cuda)
        for i in range(more):
            cuda.alloc(i + 20, 4)
    for read in (lambda: rec.peak, lambda: rec.phases, lambda: rec.export("never.json")):
        with pytest.raises(RuntimeError, match=rf"lost {lost} of the recording's events.*max_events=9"):
            read()


def test_refusals(monkeypatch):
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="sees no CUDA device"):
            memory.record("cuda")
    Simulated(monkeypatch)
    with pytest.raises(ValueError, match="max_events is 0"):
        memory.record("cuda", max_events=0)


@pytest.mark.cuda
def test_on_a_device(tmp_path):
    torch.empty(1, device="cuda")
    old = torch.empty(1000, device="cuda")
    with pytest.raises(torch.OutOfMemoryError), memory.record("cuda", on_out_of_memory=tmp_path) as rec:  # noqa: PT012
        a = torch.empty(100, device="cuda")
        with rec.phase("inside"):
            b = torch.empty(50, device="cuda")
            del a, old
        with memory.record("cuda") as inner:
            c = torch.empty(10, device="cuda")
        with rec.phase("last"):
            torch.empty(1 << 45, device="cuda")
    assert (rec.live, rec.peak, rec.allocated, rec.freed) == (240, 600, 640, 400)
    assert rec.older_frees == (1, 4000)
    inside = rec.phases[0]
    assert (inside.live_begin, inside.peak, inside.live_end) == (400, 600, 200)
    assert (inner.live, inner.allocations) == (40, 1)
    assert not torch._C._cuda_isHistoryEnabled()
    (report,) = tmp_path.glob("*.txt")
    assert report.read_text().startswith("out of memory on cuda:0 in last at ")
    assert "variable b of test_on_a_device" in report.read_text()
    del b, c
