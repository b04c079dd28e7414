"""What is nobody's leak: other threads' tensors, libraries' own cycles, what torch keeps and bounds."""

import functools
import gc
import importlib
import sys
import threading
import unittest.mock

import pytest
import torch
from support.checks import checked
from support.processes import in_own_process, python
from torch import nn
from torch.nn.utils import parametrizations

from zbpipe.leaks import (
    _check,  # what another thread does during a search happens in the place of the search
    _judge,  # on a machine with much to do another thread may not run for half a second
)

KEPT = []


def cycle(size):
    held = [torch.ones(size)]
    held.append(held)


# ---- what collections free


class Churn(threading.Thread):
    """Makes and drops tensors."""

    def __init__(self):
        super().__init__()
        self.ends, self.begun = threading.Event(), threading.Event()

    def run(self):
        while not self.ends.is_set():
            torch.ones(300, 300).exp()
            self.begun.set()

    def __enter__(self):
        self.start()
        self.begun.wait()

    def __exit__(self, *_):
        self.ends.set()
        self.join()


def test_what_another_thread_drops_while_the_collector_runs_is_no_cycle(monkeypatch):
    monkeypatch.setattr(_judge, "_LOOKS", 500)
    with Churn():
        for _ in range(3):
            report = checked(lambda: [gc.collect() for _ in range(3)])
            assert report.leaks == [], report
        report = checked(lambda: (cycle(1000), gc.collect()))
    (leak,) = report.leaks
    assert (leak.bytes, leak.fate) == (4000, "freed by the collector")
    assert "a collection inside the check freed" in leak.chain[0].text


def test_what_another_thread_makes_and_drops_during_the_search_is_no_leak(monkeypatch):
    real = _check.search

    def searching(scope):
        passing = torch.ones(123_457)
        try:
            return real(scope)
        finally:
            del passing

    monkeypatch.setattr(_check, "search", searching)
    (leak,) = checked(lambda: KEPT.append(torch.ones(1000))).leaks
    assert leak.bytes == 4000


def test_a_callback_that_lets_go_of_a_cache_is_no_cycle():
    def clear(phase, info):
        KEPT.clear()

    gc.callbacks.append(clear)
    try:
        report = checked(lambda: (KEPT.append(torch.ones(1000)), gc.collect()))
    finally:
        gc.callbacks.remove(clear)
    assert report.leaks == [], report


# ---- libraries' own cycles


def mock():
    machine = unittest.mock.Mock()
    machine.part.run(torch.ones(50))


def compare():
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.ones(50), torch.zeros(50))


def symbolic():
    torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def weight_norm():
    parametrizations.weight_norm(nn.Linear(4, 4))(torch.ones(1, 4))


def test_a_librarys_own_cycle_is_a_line_and_no_leak():
    def act():
        for of_a_library in (mock, compare, symbolic, weight_norm):
            of_a_library()

    act()  # what they import and keep
    report = checked(act)
    assert report.leaks == [] and report.cycles == [], report
    for note in report.notes:
        assert "a library's own" in note and " -> back" in note
    (note,) = [note for note in report.notes if "unittest/mock.py" in note]
    assert note.startswith("1 storage (200 bytes) that hung on a cycle of a library's own")


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(20, 1)
        self.layer.parent = [self]


def hook_on_itself():
    out = torch.ones(30, requires_grad=True).exp()
    out.register_hook(lambda grad: out)


def of_a_mocks_child():
    class Mine(unittest.mock.Mock):
        pass

    mine = Mine()
    mine.child.back = [mine, torch.ones(50)]


def test_a_cycle_with_anything_of_the_programs_is_a_leak():
    def act():
        for of_the_program in (Parent, hook_on_itself, of_a_mocks_child, functools.partial(cycle, 5)):
            of_the_program()

    report = checked(act)
    assert {leak.bytes for leak in report.leaks} >= {4 * size for size in (20, 30, 50, 5)}, report
    assert report.notes == []


def test_constants_of_modules_that_are_imported_inside(tmp_path, monkeypatch):
    sources = [
        "EPS = torch.ones(4)",
        "class Layer:\n    scale = torch.ones(4)\nLAYER = Layer()\nLAYER.bias = torch.ones(4)",
        "def scaled(x, scale=torch.ones(4)):\n    return x",
        "CACHE = [torch.ones(5)]",
    ]
    names = [f"imported_inside_{number}" for number in range(len(sources))]
    for name, source in zip(names, sources, strict=True):
        (tmp_path / f"{name}.py").write_text(f"import torch\n{source}\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        report = checked(lambda: [importlib.import_module(name) for name in names])
    finally:
        for name in names:
            sys.modules.pop(name, None)
    (leak,) = report.leaks
    assert leak.blame.text == "module global imported_inside_3.CACHE"
    assert report.notes == ["4 storages (64 bytes) that modules hold which were imported inside"]


FIRST_OPTIMIZER = """
import sys, torch
from zbpipe.leaks import check_tensor_leak

assert "torch._dynamo" not in sys.modules

def train():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()

with check_tensor_leak(action="error", trace=True):
    train()
assert "torch._dynamo" in sys.modules  # whose import leaves a cycle with all the caller's variables
"""


@pytest.mark.system
def test_the_first_optimizer_of_a_process_is_no_leak():
    done = python("-c", FIRST_OPTIMIZER)
    assert done.returncode == 0, done.stderr


# ---- what torch keeps and bounds


def test_autocasts_weight_cache_is_called_so():
    layer = nn.Linear(64, 64, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        report = checked(lambda: layer(torch.ones(1, 64)).float().sum().backward(), allow=[layer])
        assert report.leaks == []
        (note,) = report.notes
        assert note.startswith("1 storage (8192 bytes) as large as autocast's weight cache")
        assert checked(lambda: KEPT.append(torch.ones(2048))).leaks  # of the same size, and held in sight
        torch.clear_autocast_cache()


BUCKETS = """
import tempfile, torch
import torch.distributed as dist
from zbpipe.leaks import check_tensor_leak

torch.set_num_threads(1)

def checked(allow):
    with check_tensor_leak(action="record", allow=allow) as check:
        ddp(torch.ones(2, 64)).sum().backward()
    return check.report

with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 1), rank=0, world_size=1)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    ddp(torch.ones(2, 64)).sum().backward()
    reports = [checked([ddp]) for _ in range(3)]
    assert all(report.leaks == [] for report in reports), reports
    (note,) = [note for report in reports for note in report.notes]  # it is made anew once
    assert "16640 bytes" in note and "a bucket of DistributedDataParallel" in note
    del ddp
    dist.destroy_process_group()
"""


@pytest.mark.system
@pytest.mark.dist
def test_a_bucket_of_ddp_is_called_so():
    in_own_process(BUCKETS)
