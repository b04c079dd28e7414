"""What the interpreter and libraries keep out of the program's sight, and what holds nothing."""

import atexit
import concurrent.futures
import contextlib
import re
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from support.checks import checked
from torch import multiprocessing, nn
from torch.nn.utils import parametrize

from zbpipe.leaks import find_holders

KEPT = []
HELD = None
BYTES = 28
PLACE = f"module global {__name__}.KEPT"


@pytest.fixture(autouse=True)
def _nothing_kept():
    global HELD
    yield
    KEPT.clear()
    HELD = None


def made():
    return torch.ones(7)


class WithCache(nn.Module):
    def forward(self, x):
        return x * 2


def jagged():
    return torch.nested.nested_tensor_from_jagged(made(), torch.tensor([0, 3, 7]))


# ---- what the interpreter and libraries keep, out of the program's sight


def keep_in_a_thread(started, ends):
    tensor = made()
    started.set()
    ends.wait()
    return tensor


def keep_in_its_local(started, ends, local):
    local.cache = made()
    started.set()
    ends.wait()


@pytest.mark.parametrize("of", ["its frame", "a local of it"])
def test_another_thread(of):
    started, ends, local = threading.Event(), threading.Event(), threading.local()
    given = (started, ends) if of == "its frame" else (started, ends, local)
    target = keep_in_a_thread if of == "its frame" else keep_in_its_local
    thread = threading.Thread(target=target, args=given, name="fetching")

    def run():
        thread.start()
        started.wait()

    report = checked(run)
    ends.set()
    thread.join()
    (leak,) = report.leaks
    expected = (
        "thread fetching: variable tensor of .*keep_in_a_thread"
        if of == "its frame"
        else "thread fetching: variable local of .*keep_in_its_local"
    )
    assert re.match(expected, leak.blame.text), report


def test_out_of_a_notebook(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "Out", {}, raising=False)
    (leak,) = checked(lambda: sys.modules["__main__"].Out.update({1: made()})).leaks
    assert leak.blame.text.endswith(".Out") and leak.chain[1].text == "dict item 1"


def test_a_cached_parametrization():
    layer = nn.Linear(7, 1, bias=False)
    parametrize.register_parametrization(layer, "weight", WithCache())
    with parametrize.cached():
        report = checked(lambda: layer.weight)
    assert report.leaks[0].blame.text == "module global torch.nn.utils.parametrize._cache", report


def test_what_is_to_run_at_exit():
    """The interpreter's own list, which nobody can look into."""
    registered = []

    def register():
        tensor = made()
        registered.append(weakref.ref(tensor))
        atexit.register(print, tensor)

    try:
        (leak,) = checked(register).leaks
        assert leak.blame.kind == "unknown", leak
    finally:
        atexit.unregister(print)
    assert registered[0]() is None


def test_an_item_on_a_queue_of_processes():
    """It lives in a file descriptor alone: not seen, for no memory of this process is left behind."""
    waiting = multiprocessing.SimpleQueue()
    report = checked(lambda: waiting.put(made()))
    waiting.get()
    waiting.close()
    assert report.leaks == [] and report.unseen == []


def test_a_tensor_over_somebodys_buffer():
    """The memory is the buffer's: what keeps that alive is found, where a tensor of torch's was under it."""
    own = bytearray(28)
    (leak,) = checked(lambda: KEPT.append(torch.frombuffer(own, dtype=torch.float32))).leaks
    assert leak.bytes == 28 and leak.blame.text == PLACE


def test_a_schedule_of_rates_that_is_dropped():
    """A cycle of torch's, with a wrapper of the optimizer's: its member is named, and no caller."""

    def run():
        optimizer = torch.optim.SGD([nn.Parameter(made())], lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 2)

    for leak in checked(run).leaks:
        assert leak.in_cycle and "run" not in leak.blame.text


def test_a_jagged_tensor_that_is_dropped():
    report = checked(lambda: jagged().shape)
    for leak in report.leaks:
        assert leak.in_cycle, report


def test_a_storage_under_a_name_of_the_module():
    def keep():
        global HELD
        HELD = made().untyped_storage()

    (leak,) = checked(keep).leaks
    assert leak.blame.text == f"module global {__name__}.HELD"
    assert find_holders(torch.empty(0).set_(HELD)).blame.text == f"module global {__name__}.HELD"


def wrapped_by_vmap(kept):
    torch.vmap(lambda x: kept.append(x) or x.exp())(torch.ones(7, 1))


def test_a_wrapper_of_functorch_is_looked_through():
    report = checked(lambda: wrapped_by_vmap(KEPT))
    assert report.leaks and report.leaks[0].bytes == BYTES
    assert report.leaks[0].blame.text == PLACE or report.unseen, report


# ---- what holds nothing


def profiled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        made().exp()
    KEPT.append(profiler)


def compiled():
    torch.compile(lambda x: x.exp().sin(), backend="aot_eager")(made())


def garbage_of_numpy():
    np.frombuffer(made().numpy(), dtype=np.int8).sum()


def done_in_a_pool():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: made().sum().item(), range(5)))


def shared():
    made().share_memory_()


def raised_and_caught():
    with contextlib.suppress(ValueError):
        error_with_tensor_in_its_frame()


def error_with_tensor_in_its_frame():
    tensor = made()
    raise ValueError(tensor.shape)


QUIET = [profiled, compiled, garbage_of_numpy, done_in_a_pool, shared, raised_and_caught]


@pytest.mark.parametrize("act", QUIET)
def test_nothing_is_held(act):
    act()
    report = checked(act)
    assert not report, report
