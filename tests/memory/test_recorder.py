"""Recordings against byte counts computed by hand, on all threads, together with whatever else looks on."""

import contextlib
import functools
import json
import threading
from dataclasses import astuple
from itertools import accumulate

import numpy as np
import pytest
import torch
from support.processes import in_own_process
from torch.profiler import ProfilerActivity, profile

from zbpipe import memory


def of(recording):
    return recording.live, recording.peak, recording.allocated, recording.allocations


def on_threads(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_every_block_is_counted_once():
    """Views and what is empty are none; a resize is a new block and the end of the old one; a storage does not shrink."""
    with memory.record() as rec:
        a = torch.empty(100)
        address = a.data_ptr()
        assert of(rec) == (400, 400, 400, 1)
        b = torch.empty(3, 5, dtype=torch.float64)
        assert of(rec) == (520, 520, 520, 2)
        views = [a.view(10, 10).t(), a[2:], a.detach(), a.expand(2, 100), torch.empty(0), torch.empty(0, 5)]
        assert of(rec) == (520, 520, 520, 2)
        del a, views
        assert of(rec) == (120, 520, 520, 2)
        c = b + b
        assert of(rec) == (240, 520, 640, 3)
        for size in (45, 35):
            c.resize_(size)
            assert of(rec) == (120 + 8 * 45, 600, 640 + 8 * 45, 4)
        c.untyped_storage().resize_(0)
        assert of(rec) == (120, 600, 1000, 4)
    del b, c
    assert of(rec) == (120, 600, 1000, 4), "what comes after the recording is not in it"
    first, _, third, *_ = events = list(rec.events())
    changes = [400, 120, -400, 120, 360, -120, -360]
    assert [(event.bytes, event.live) for event in events] == [*zip(changes, accumulate(changes), strict=True)]
    assert first.address == third.address == address and not any(event.older for event in events)
    assert [event.time_ns for event in events] == sorted(event.time_ns for event in events)


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
            assert of(rec) == (80, 80, 80, 1)
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


def test_recordings_that_follow_nest_and_overlap_count_for_themselves():
    old = torch.empty(1000)
    first, outer, inner = memory.record(), memory.record(), memory.record()
    with first:
        kept, survivor = torch.ones(1000), torch.empty(5)
    kept.resize_(2000)  # its storage allocates where it was allocated
    assert float(kept[:1000].sum()) == 1000
    with outer:
        del old  # from before any recording: nobody knows it
        a = torch.empty(10)
        inner.__enter__()
        b = torch.empty(20)
        del a, survivor
    c = torch.empty(30)
    inner.__exit__(None, None, None)
    torch.empty(40)
    expected = [((4020, 4020, 4020, 2), []), ((80, 120, 120, 2), [-20]), ((200, 200, 200, 2), [-40, -20])]
    for rec, (counts, older) in zip((first, outer, inner), expected, strict=True):
        assert of(rec) == counts
        assert [event.bytes for event in rec.events() if event.older] == older
    del b, c, kept


def test_a_recording_is_entered_once_and_says_nothing_before(tmp_path):
    rec = memory.record()
    names = ("peak", "live", "incomplete", "phases")
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


def test_an_exception_or_the_last_reference_ends_a_recording():
    """Without an end the allocator would feed freed memory: a generator that holds one may be dropped."""
    rec, log = memory.record(), memory.record()._log
    with pytest.raises(KeyError), rec, rec.phase("broken"):  # noqa: PT012
        a = torch.empty(10)
        raise KeyError
    log.start()
    kept = torch.empty(20)
    del log, kept
    assert of(rec) == (40, 40, 40, 1)
    assert [p.label for p in rec.phases] == ["broken"]
    with memory.record() as again:
        torch.empty(1)
    assert again.allocated == 4
    del a


PHASE = "expected the phase's name, and its number as microbatch="
REFUSED = [
    (ValueError, lambda: memory.record(device="meta"), "device is meta; expected cpu or a CUDA device"),
    (ValueError, lambda: memory.record(max_events=-1), "max_events is -1; expected"),
    (TypeError, lambda: memory.record(max_events="many"), "max_events is 'many'; expected"),
    (TypeError, lambda: memory.record().phase(3), f"kind is 3; {PHASE}"),
    (TypeError, lambda: memory.record().phase(torch.ones(1)), f"kind is a Tensor; {PHASE}"),
    (TypeError, lambda: memory.record().phase("I", microbatch="3"), "cannot be interpreted as an integer"),
    (TypeError, lambda: memory.held(None), "groups is None; expected a group or groups"),
    (TypeError, lambda: memory.held([], 3), r"module is 3; expected a torch\.nn\.Module"),
]


@pytest.mark.parametrize(("error", "call", "words"), REFUSED)
def test_bad_arguments_are_refused(error, call, words):
    with pytest.raises(error, match=words):
        call()


# ---- threads


def test_all_threads_are_seen_and_blocks_may_die_on_another():
    count, threads, handed_over = 3000, 4, []
    start = threading.Barrier(threads)

    def work(seed):
        start.wait()
        kept = []
        for i in range(count):
            kept.append(torch.empty(1 + (i * seed) % 7))
            if len(kept) > 20:
                kept.pop((i * seed) % 20)
        handed_over.append(torch.empty(100))

    with memory.record() as rec:
        mine = torch.empty(10)
        on_threads(*(functools.partial(work, seed) for seed in range(1, threads + 1)))
        assert rec.live == 40 + threads * 400
        handed_over.clear()
    freed = 4 * sum(1 + (i * seed) % 7 for seed in range(1, threads + 1) for i in range(count)) + threads * 400
    assert (rec.live, rec.allocated) == (40, freed + 40)
    assert rec.allocations == threads * (count + 1) + 1
    assert len({event.thread for event in rec.events()}) == 1 + threads
    del mine


def test_fork_counts_apart_and_does_not_hang():
    in_own_process(
        """
        import os, threading, warnings
        from zbpipe import memory
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
                children.append(os.fork())
                if children[-1] == 0:
                    b = torch.empty(20)
                    os._exit(0 if rec.live >= 120 else 1)
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
    profiled = functools.partial(profile, activities=[ProfilerActivity.CPU], profile_memory=True)
    said = []
    for outer, inner in ((profiled, None), (profiled, memory.record), (memory.record, profiled), (profiled, None)):
        linear.zero_grad(set_to_none=True)
        x = torch.ones(32, 64)
        with outer() as one, inner() if inner else contextlib.nullcontext() as other:
            linear(x).sum().backward()
        of = {type(looker): looker for looker in (one, other)}
        said.append(handed_out(of[profile], tmp_path / "trace.json"))
        assert memory.Recording not in of or of[memory.Recording].allocated == said[-1] > 64 * 64 * 4
    assert said[0] == said[3]


# ---- the log


@pytest.mark.parametrize(("most", "words"), [(5, "max_events=5"), (0, "has none")])
def test_without_a_whole_log_the_counters_and_phases_are_exact(most, words):
    with memory.record(max_events=most) as rec:
        for _ in range(10):
            with rec.phase("two"):
                torch.empty(2)
        with pytest.raises(RuntimeError, match="still runs"):
            rec.events()
    assert of(rec) == (0, 8, 80, 10)
    assert [p.peak for p in rec.phases] == [8] * 10
    assert rec.incomplete == ("15 events did not fit into the log (max_events=5)" if most else "")
    assert ("incomplete" in str(rec)) == bool(most)
    for use in (rec.events, lambda: rec.export("x.json"), lambda: rec.plot("x.png")):
        with pytest.raises(RuntimeError, match=words):
            use()


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
    assert [astuple(p)[:3] + astuple(p)[6:] for p in rec.phases] == [
        ("first", 1, 2, 400, 440, 600, 240, 200, 2, 1),
        ("second", None, None, 440, 40, 440, 0, 400, 0, 1),
    ]
    first, second = rec.phases
    assert first.begin_ns <= first.end_ns <= second.begin_ns
    assert "first" in str(rec)
    del c


def test_phases_nest_overlap_and_go_on_in_other_threads():
    def work():
        with rec.phase("other"):
            both.wait()
            both.wait()
            torch.empty(5)

    both = threading.Barrier(2)
    with memory.record() as rec:
        thread = threading.Thread(target=work)
        thread.start()
        both.wait()
        with rec.phase("outer", microbatch=np.int64(3)), rec.phase("inner"):
            torch.empty(10)
        both.wait()
        thread.join()
    found = {p.kind: (p.peak, p.allocated) for p in rec.phases}
    assert found == {"other": (40, 60), "outer": (40, 40), "inner": (40, 40)}
    assert json.dumps([p.microbatch for p in rec.phases if p.kind == "outer"]) == "[3]"
    assert len({p.thread for p in rec.phases}) == 2


def test_a_pass_that_ends_on_another_thread():
    """It must not hide all later passes of the thread on which it began, nor end those of the other thread."""

    def end_within_another():
        with rec.phase("W", microbatch=5):
            first.__exit__(None, None, None)
            with rec.phase("B"):
                pass  # still within the thread's own

    with memory.record() as rec:
        first = rec.phase("I", microbatch=0)
        first.__enter__()
        with rec.phase("W", microbatch=9):
            pass  # within the first: not marked
        on_threads(end_within_another)
        for kind, microbatch in (("W", 0), ("I", 1)):
            with rec.phase(kind, microbatch=microbatch):
                pass
    assert [(p.kind, p.microbatch) for p in rec.phases] == [("I", 0), ("W", 5), ("W", 0), ("I", 1)]
    assert rec.incomplete == ""


def test_phases_are_read_while_it_runs():
    with memory.record() as rec:
        with rec.phase("early", microbatch=1):
            torch.empty(1)
        with pytest.raises(TypeError, match=PHASE):
            rec.phase(None)
        assert str(rec).startswith("cpu: peak 4 bytes")
        late = rec.phase("late")
        late.__enter__()
        with pytest.raises(RuntimeError, match=r"entered once; call phase\(\) again"):
            late.__enter__()
        assert [p.label for p in rec.phases] == ["early microbatch 1"]
    late.__exit__(None, None, None)
    with rec.phase("too late"), pytest.raises(RuntimeError, match="entered once"):
        late.__enter__()
    assert [p.kind for p in rec.phases] == ["early"], "what outlasts the recording is left out"


@pytest.mark.parametrize("given", [-1, 2**63, 1.5])
def test_what_is_no_number_of_events(given):
    with pytest.raises((ValueError, TypeError), match=r"max_events is .* expected the number of events"):
        memory.record(max_events=given)
