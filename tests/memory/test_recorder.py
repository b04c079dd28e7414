"""Recordings against byte counts computed by hand, on all threads, together with whatever else looks on."""

import gc
import json
import subprocess
import sys
import textwrap
import threading
import weakref
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from support.recording_by_hand import ByHand
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from zbpipe import memory


def of(recording):
    return recording.live, recording.peak, recording.allocated, recording.freed, recording.allocations


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_block_is_counted_once():
    """Views and what is empty are none; a resize is a new block and the end of the old one; a storage does not shrink."""
    with memory.record() as rec:
        a = torch.empty(100)
        assert of(rec) == (400, 400, 400, 0, 1)
        b = torch.empty(3, 5, dtype=torch.float64)
        assert of(rec) == (520, 520, 520, 0, 2)
        views = [a.view(10, 10).t(), a[2:], a.detach(), a.expand(2, 100), torch.empty(0), torch.empty(0, 5)]
        assert of(rec) == (520, 520, 520, 0, 2)
        del a, views
        assert of(rec) == (120, 520, 520, 400, 2)
        c = b + b
        assert of(rec) == (240, 520, 640, 400, 3)
        for size in (45, 35):
            c.resize_(size)
            assert of(rec) == (120 + 8 * 45, 600, 640 + 8 * 45, 520, 4)
        c.untyped_storage().resize_(0)
        assert of(rec) == (120, 600, 1000, 880, 4)
    del b, c
    assert of(rec) == (120, 600, 1000, 880, 4), "what comes after the recording is not in it"


def test_older_storages_that_grow():
    """By resize_, by out=, and as FSDP2's unshard does; a storage that nothing but itself shows; then without any
    recording. They allocate from the allocator that they were made with: when a recording begins it becomes ours."""
    by_resize, by_out, unsharded, alone = (torch.empty(n) for n in (10, 0, 1000, 5))
    alone = alone.untyped_storage()
    parameter = torch.nn.Parameter(torch.empty(7))
    for _ in range(2):
        for storage in (by_resize.untyped_storage(), by_out.untyped_storage(), unsharded.untyped_storage(), alone):
            storage.resize_(0)
        by_resize.resize_(0)
        by_out.resize_(0)
        with memory.record() as rec:
            by_resize.resize_(20)
            assert of(rec) == (80, 80, 80, 0, 1)
            torch.add(torch.ones(1000), 1, out=by_out)
            unsharded.untyped_storage().resize_(4000)
            alone.resize_(100)
            assert rec.live == 80 + 4000 + 4000 + 100
            parameter.data.untyped_storage().resize_(280)
            assert rec.live == 80 + 4000 + 4000 + 100 + 280
            parameter.data.untyped_storage().resize_(0)
            by_resize.untyped_storage().resize_(0)
            assert rec.live == 4000 + 4000 + 100
        assert rec.incomplete == ""
    unsharded.untyped_storage().resize_(8000)
    assert float(by_out.sum()) == 2000


def test_tensors_that_outlive_their_recording():
    with memory.record() as first:
        kept = torch.ones(1000)
    assert first.live == 4000
    kept.resize_(2000)  # its storage allocates where it was allocated
    assert float(kept[:1000].sum()) == 1000
    assert of(first) == (4000, 4000, 4000, 0, 1)
    with memory.record() as second:
        survivor = torch.empty(5)
    with memory.record() as third:
        del survivor
        fresh = torch.empty(7)
    assert second.live == 20
    assert of(third) == (28, 28, 28, 0, 1), "older blocks are not the recording's own"
    assert third.older_frees == (1, 20)
    del fresh, kept


def test_recordings_that_nest_and_overlap_count_for_themselves():
    old = torch.empty(1000)
    outer, inner = memory.record(), memory.record()
    with outer:
        del old  # from before any recording: nobody knows it
        a = torch.empty(10)
        inner.__enter__()
        b = torch.empty(20)
        del a
    c = torch.empty(30)
    inner.__exit__(None, None, None)
    torch.empty(40)
    assert (of(outer), outer.older_frees) == ((80, 120, 120, 40, 2), (0, 0))
    assert (of(inner), inner.older_frees) == ((200, 200, 200, 0, 2), (1, 40))
    del b, c


def test_a_recording_is_entered_once_and_says_nothing_before(tmp_path):
    rec = memory.record()
    names = ("peak", "live", "older_frees", "incomplete", "phases", "held", "held_peak")
    for use in (*(lambda name=name: getattr(rec, name) for name in names), rec.events, lambda: rec.export("x.json")):
        with pytest.raises(RuntimeError, match="has not been entered yet"):
            use()
    assert str(rec) == "cpu: not entered yet"
    with rec:
        torch.empty(10)
        with pytest.raises(RuntimeError, match="entered once"):
            rec.__enter__()
    with pytest.raises(RuntimeError, match="entered once"):
        rec.__enter__()
    assert rec.peak == 40


def test_an_exception_ends_the_recording_and_leaves_nothing():
    def fail():
        raise KeyError

    rec = memory.record()
    with pytest.raises(KeyError), rec, rec.phase("broken"):  # noqa: PT012
        a = torch.empty(10)
        fail()
    torch.empty(20)
    assert of(rec) == (40, 40, 40, 0, 1)
    assert [p.label for p in rec.phases] == ["broken"]
    with memory.record() as again:
        torch.empty(1)
    assert again.allocated == 4
    del a


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"device": "meta"}, ValueError, "cpu and cuda"),
        ({"max_events": -1}, ValueError, "-1"),
        pytest.param(
            {"device": "cuda"},
            RuntimeError,
            "sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        memory.record(**arguments)


# ---- threads


def test_all_threads_are_seen_and_blocks_may_die_on_another():
    handed_over = []

    def work():
        handed_over.append(torch.empty(100))
        torch.empty(50)

    with memory.record() as rec:
        mine = torch.empty(10)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rec.live == 40 + 4 * 400
        handed_over.clear()
    assert (rec.live, rec.allocated, rec.allocations) == (40, 40 + 4 * 600, 9)
    assert len({event.thread for event in rec.events()}) == 5
    del mine


def test_hammering_threads_lose_nothing():
    count, threads = 3000, 4
    start = threading.Barrier(threads)

    def work(seed):
        start.wait()
        kept = []
        for i in range(count):
            kept.append(torch.empty(1 + (i * seed) % 7))
            if len(kept) > 20:
                kept.pop((i * seed) % 20)

    with memory.record() as rec:
        running = [threading.Thread(target=work, args=(seed,)) for seed in range(1, threads + 1)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    expected = 4 * sum(1 + (i * seed) % 7 for seed in range(1, threads + 1) for i in range(count))
    assert (rec.live, rec.allocated, rec.freed) == (0, expected, expected)
    assert rec.allocations == threads * count


class Deep(torch.autograd.Function):
    """A backward that starts a backward within, and so on: beyond a depth the engine goes on in its pool's threads."""

    seen: ClassVar = set()

    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Deep.seen.add(threading.get_native_id())
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                Deep.apply(x, ctx.depth - 1).backward()
        torch.empty(1000)
        return grad, None


def test_the_engines_worker_threads_are_seen():
    Deep.seen.clear()
    x = torch.ones(1, requires_grad=True)
    y = Deep.apply(x, 100)
    with memory.record() as rec:
        y.backward()
    assert len(Deep.seen) > 1, "the test must reach the engine's pool"
    big = [event for event in rec.events() if event.bytes == 4000]
    assert len(big) == 101
    assert len({event.thread for event in big}) == len(Deep.seen)


def test_fork_counts_apart_and_does_not_hang():
    run_python(
        """
        import os, threading, warnings, torch
        from zbpipe import memory
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # from Python 3.12 on a fork beside threads warns
        stop = threading.Event()
        def work():
            while not stop.is_set():
                torch.empty(3)
        with memory.record() as rec:
            a = torch.empty(10)
            thread = threading.Thread(target=work)
            thread.start()
            children = []
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    b = torch.empty(20)
                    os._exit(0 if rec.live >= 120 else 1)
                children.append(child)
            stop.set()
            thread.join()
        assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
        assert rec.live == 40, rec.live
        """
    )


# ---- beside torch.profiler


def handed_out(trace, path):
    """Bytes that torch.profiler saw the allocator hand out."""
    trace.export_chrome_trace(str(path))
    rows = json.loads(path.read_text())["traceEvents"]
    sizes = [row["args"]["Bytes"] for row in rows if row.get("name") == "[memory]"]
    return sum(size for size in sizes if size > 0)


def test_beside_the_profiler_both_see_the_same(tmp_path):
    linear = torch.nn.Linear(64, 64)
    x = torch.randn(32, 64)

    def step():
        linear.zero_grad(set_to_none=True)
        linear(x).sum().backward()

    def profiled():
        return profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    step()
    with profiled() as before:
        step()
    with profiled() as outside, memory.record() as rec:
        step()
    with memory.record() as around, profiled() as inside:
        step()
    with profiled() as after:
        step()
    assert rec.allocated > 64 * 64 * 4
    assert rec.allocated == handed_out(outside, tmp_path / "outside.json")
    assert around.allocated == handed_out(inside, tmp_path / "inside.json")
    assert handed_out(before, tmp_path / "before.json") == handed_out(after, tmp_path / "after.json")


# ---- the log


@pytest.mark.parametrize(("most", "words"), [(5, "max_events=5"), (0, "has none")])
def test_without_a_whole_log_the_counters_and_phases_are_exact(most, words):
    with memory.record(max_events=most) as rec:
        for _ in range(10):
            with rec.phase("two"):
                torch.empty(2)
        with pytest.raises(RuntimeError, match="still runs"):
            rec.events()
    assert of(rec) == (0, 8, 80, 80, 10)
    assert [p.peak for p in rec.phases] == [8] * 10
    assert rec.incomplete == ("15 events did not fit into the log (max_events=5)" if most else "")
    assert ("incomplete" in str(rec)) == bool(most)
    for use in (lambda: rec.held, rec.events, lambda: rec.export("x.json"), lambda: rec.plot("x.png")):
        with pytest.raises(RuntimeError, match=words):
            use()


def test_events_say_what_happened():
    with memory.record() as rec:
        a = torch.empty(10)
        address = a.data_ptr()
        b = torch.empty(20)
        del a
    events = list(rec.events())
    assert [(e.bytes, e.live, e.older) for e in events] == [(40, 40, False), (80, 120, False), (-40, 80, False)]
    assert events[0].address == events[2].address == address
    assert all(x.time_ns <= y.time_ns for x, y in pairwise(events))
    del b


# ---- phases


def test_a_phase_has_its_own_peak():
    with memory.record() as rec:
        a = torch.empty(100)
        with rec.phase("first", stage=1, microbatch=2):
            b = torch.empty(50)
            del b
            c = torch.empty(10)
        with rec.phase("second"):
            del a
    first, second = rec.phases
    assert (first.kind, first.stage, first.microbatch) == ("first", 1, 2)
    assert (first.live_begin, first.live_end, first.peak) == (400, 440, 600)
    assert (first.allocated, first.freed, first.allocations, first.frees) == (240, 200, 2, 1)
    assert (second.live_begin, second.live_end, second.peak) == (440, 40, 440)
    assert (second.allocated, second.freed) == (0, 400)
    assert first.begin_ns <= first.end_ns <= second.begin_ns
    assert "first" in str(rec)
    del c


def test_phases_nest_overlap_and_go_on_in_other_threads():
    ready, go = threading.Event(), threading.Event()

    def work(rec):
        with rec.phase("other"):
            ready.set()
            go.wait()
            torch.empty(5)

    with memory.record() as rec:
        thread = threading.Thread(target=work, args=(rec,))
        thread.start()
        ready.wait()
        with rec.phase("outer"), rec.phase("inner"):
            torch.empty(10)
        go.set()
        thread.join()
    peaks = {p.kind: p.peak for p in rec.phases}
    assert peaks == {"other": 40, "outer": 40, "inner": 40}
    assert {p.kind: p.allocated for p in rec.phases} == {"other": 60, "outer": 40, "inner": 40}
    assert len({p.thread for p in rec.phases}) == 2


def test_a_pass_that_ends_on_another_thread():
    """It must not hide all later passes of the thread on which it began, nor end those of the other thread."""

    def run(function):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    with memory.record() as rec:
        first = rec.phase("I", stage=1, microbatch=0)
        first.__enter__()
        with rec.phase("W", stage=1, microbatch=9):
            pass  # within the first: not marked

        def end_within_another():
            with rec.phase("W", stage=1, microbatch=5):
                first.__exit__(None, None, None)
                with rec.phase("B", stage=1, microbatch=6):
                    pass  # still within the thread's own

        run(end_within_another)
        with rec.phase("W", stage=1, microbatch=0):
            torch.ones(3)
        with rec.phase("I", stage=1, microbatch=1):
            torch.ones(3)
    assert [(p.kind, p.microbatch) for p in rec.phases] == [("I", 0), ("W", 5), ("W", 0), ("I", 1)]
    assert rec.incomplete == ""


def test_phases_are_read_while_it_runs_and_marked_in_all_that_run():
    with memory.phase("nobody looks"):
        pass
    with memory.record() as a, memory.record() as b:
        with memory.phase("both", microbatch=1):
            torch.empty(1)
        late = a.phase("late")
        late.__enter__()
        assert [p.label for p in a.phases] == [p.label for p in b.phases] == ["both microbatch 1"]
    late.__exit__(None, None, None)
    with a.phase("too late"):
        pass
    assert [p.kind for p in a.phases] == ["both"], "what outlasts the recording is left out"
    assert str(a)


@pytest.mark.parametrize("kind", [3, None, torch.ones(1)])
def test_a_phase_that_has_no_name_is_refused(kind):
    """A step's number was taken, and then nothing of the recording could be printed."""
    with memory.record() as rec:
        for phase in (rec.phase, memory.phase):
            with pytest.raises(TypeError, match="expected the phase's name, and its number as microbatch="):
                phase(kind)
    assert str(rec).startswith("cpu: peak 0 bytes")


def test_held_from_i_to_w_by_hand():
    """Held: live when I returned and freed by W. Not: freed in between, born later, older than the recording."""
    hand = ByHand()
    with hand.recording as rec:
        hand.alloc(1, 0xA, 100)  # held for microbatch 0
        hand.alloc(2, 0xB, 1000)  # freed by I
        hand.alloc(3, 0xC, 10)  # held for microbatch 1
        with rec.phase("I", stage=1, microbatch=0):
            hand.free(15, 0xB)
            hand.alloc(16, 0xE, 5000)  # freed between I and W
        hand.free(22, 0xE)
        with rec.phase("I", stage=1, microbatch=1):
            hand.now = 25
        with rec.phase("W", stage=1, microbatch=0):
            hand.alloc(31, 0xF, 300)  # W's own
            hand.free(32, 0xF)
            hand.free(35, 0xA)
            hand.free(36, 0x9, 77)  # older
        with rec.phase("W", stage=1, microbatch=1):
            hand.free(49, 0xC)
        with rec.phase("W", stage=2, microbatch=1):  # its I was not recorded
            hand.alloc(50, 0xF, 1)
    assert [(h.stage, h.microbatch, h.bytes) for h in rec.held] == [(1, 0, 100), (1, 1, 10)]
    assert rec.held_peak == 110
    assert rec.peak == 100 + 10 + 5000
    assert rec.older_frees == (1, 77)
    assert "at most 110 bytes at once" in str(rec)


def test_the_same_microbatch_again_is_another_one():
    hand = ByHand()
    with hand.recording as rec:
        for step in range(2):
            hand.alloc(10 * step, 0xA, 8 * (step + 1))
            with rec.phase("I", stage=1, microbatch=0):
                pass
            with rec.phase("W", stage=1, microbatch=0):
                hand.free(10 * step + 5, 0xA)
    assert [h.bytes for h in rec.held] == [8, 16]
    assert rec.held_peak == 16


def test_held_is_not_what_another_microbatch_happens_to_free_meanwhile():
    """A send of microbatch 1 that is done while W of microbatch 0 runs frees what the forward, or I, of 1 handed out."""
    hand = ByHand()
    with hand.recording as rec:
        hand.alloc(1, 0x1, 1)  # received for 0, between phases
        with rec.phase("forward", stage=1, microbatch=0):
            hand.alloc(2, 0xA, 100)
        with rec.phase("forward", stage=1, microbatch=1):
            hand.alloc(3, 0xB, 1000)
        with rec.phase("forward", stage=2, microbatch=0):
            hand.alloc(4, 0xC, 20)  # handed over on the rank: what stage 1 gives, stage 2 has
        with rec.phase("I", stage=1, microbatch=1):
            hand.alloc(5, 0xD, 30_000)
        with rec.phase("step", microbatch=1):  # no pass: whose its blocks are is not known
            hand.alloc(6, 0xE, 400_000)
        with rec.phase("I", stage=1, microbatch=0):
            hand.now = 7
        with rec.phase("W", stage=1, microbatch=0):
            for time, address in enumerate((0x1, 0xA, 0xB, 0xC, 0xD, 0xE), start=8):
                hand.free(time, address)
        with rec.phase("W", stage=1, microbatch=1):
            pass
    assert [(h.microbatch, h.bytes) for h in rec.held] == [(1, 0), (0, 400_121)]
    assert rec.held_peak == 400_121


def test_held_goes_by_the_thread_that_a_microbatch_ran_on():
    """Another microbatch's forward on another thread does not claim what this thread hands out meanwhile."""
    inside, go = threading.Event(), threading.Event()

    def forward_of_another(rec):
        with rec.phase("forward", stage=1, microbatch=1):
            kept.append(torch.empty(1000))
            inside.set()
            go.wait()

    kept = []
    with memory.record() as rec:
        thread = threading.Thread(target=forward_of_another, args=(rec,))
        thread.start()
        inside.wait()
        kept.append(torch.empty(10))
        go.set()
        thread.join()
        with rec.phase("I", stage=1, microbatch=0):
            pass
        with rec.phase("W", stage=1, microbatch=0):
            kept.clear()
    assert [(h.microbatch, h.bytes) for h in rec.held] == [(0, 40)]


# ---- nothing is kept


def test_a_recording_keeps_no_tensor_and_no_stage():
    class Stage:
        stage_index, is_first = 1, False

        def forward_one_chunk(self, fwd_chunk_id):
            return torch.empty(4)

        def backward_one_chunk(self, bwd_chunk_id, full_backward=True):
            pass

        def backward_weight_one_chunk(self, bwd_chunk_id):
            pass

    gc.collect()
    gc.disable()
    try:
        stage = Stage()
        with memory.record() as rec:
            rec.watch(stage)
            a = stage.forward_one_chunk(0)
            method = stage.forward_one_chunk
        storage, left, recording = StorageWeakRef(a.untyped_storage()), weakref.ref(stage), weakref.ref(rec)
        del a
        assert storage.expired()
        assert method(0).numel() == 4, "a method that somebody kept still works"
        assert [p.kind for p in rec.phases] == ["forward"]
        del method, stage
        assert left() is None
        del rec
        assert recording() is None
    finally:
        gc.enable()


def test_a_recording_that_is_dropped_while_it_runs_ends():
    """As when a generator that holds it is dropped. Without an end the allocator would feed freed memory."""
    log = memory.record()._log
    log.start()
    kept = torch.empty(10)
    del log
    del kept
    with memory.record() as rec:
        torch.empty(10)
    assert rec.allocated == 40


def test_importing_brings_no_drawing():
    out = run_python("import sys, zbpipe, zbpipe.memory; print([m for m in sys.modules if 'matplotlib' in m])")
    assert out.strip() == "[]"
