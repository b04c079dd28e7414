"""What a recording of the CPU's memory leaves behind when that runs out: an allocation of 2^50 bytes fails anywhere."""

import contextlib
import gc
import gzip
import importlib.util
import json
import os
import pickle
import sys

import pytest
import torch
from support.functions import hungry

from zbpipe import memory, stage_backward_input
from zbpipe.memory import _out_of_memory  # what errors it takes for its own

TOO_MUCH = 1 << 50


class Model:
    def __init__(self):
        self.cache = []

    def step(self, rec, microbatch):
        with rec.phase("forward", microbatch=microbatch):
            activation = torch.ones(3000)
            self.cache.append(torch.ones(5000))
            torch.empty(TOO_MUCH)
        return activation


def failed(tmp_path, run, **options):
    """The report of what ``run(recording)`` does, which must fail."""
    folder = os.path.relpath(tmp_path / "a" / "b")
    with pytest.raises(Exception) as caught, memory.record(on_out_of_memory=folder, **options) as rec:  # noqa: PT011
        run(rec)
    (text,) = (tmp_path / "a" / "b").glob("*.txt")
    return text.read_text(), caught, rec


def test_the_report_names_the_phase_the_line_what_lived_and_who_held_it(tmp_path, caplog, monkeypatch):
    """A rank's file is its own, and the folder that of the beginning."""
    older = torch.ones(1000)
    model = Model()
    monkeypatch.setenv("RANK", "3")
    monkeypatch.chdir(tmp_path)

    def run(rec):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
        with rec.phase("step"):
            batch = torch.ones(10_000)
            model.step(rec, 3)
        return batch

    text, caught, rec = failed(tmp_path, run)
    line = Model.step.__code__.co_firstlineno + 4
    head, asked, process, *_ = text.splitlines()
    assert head == f"out of memory on cpu in forward microbatch 3 at {__file__}:{line}"
    assert f"you tried to allocate {4 * TOO_MUCH} bytes" in asked
    assert process.startswith(f"process {os.getpid()} on ") and ", rank 3, " in process
    assert "cpu: peak 72.000 kB, live 72.000 kB, 72.000 kB in 3 allocations" in text
    assert str(rec) in text
    tensors = text.partition("the largest of these:\n")[2].split("\n\n")
    assert [part.strip().splitlines()[0] for part in tensors] == [
        "float32 [10000] on cpu: 40000 bytes, alive",
        "float32 [5000] on cpu: 20000 bytes, alive",
        "float32 [3000] on cpu: 12000 bytes, alive",
    ]
    named = "Model.step()" if sys.version_info >= (3, 11) else "step()"  # what a frame's code calls itself
    holders = ("variable batch of ", "attribute cache of ", f"variable activation of {named}")
    for part, holder in zip(tensors, holders, strict=True):
        (blamed,) = [line.strip() for line in part.splitlines() if line.strip().startswith(">> ")]
        assert blamed.removeprefix(">> ").startswith(holder)
    stem = tmp_path / "a" / "b" / "rank3"
    assert caplog.messages == [f"out of memory on cpu in forward microbatch 3; what lived and who held it: {stem}.txt"]
    assert isinstance(caught.value, RuntimeError) and "DefaultCPUAllocator" in str(caught.value)
    assert caught.value.__cause__ is None and not getattr(caught.value, "__notes__", [])
    with gzip.open(f"{stem}.json.gz", "rt") as file:
        slices = [row["name"] for row in json.load(file)["traceEvents"] if row["ph"] == "X"]
    assert slices == ["step", "forward microbatch 3"]
    if importlib.util.find_spec("matplotlib"):
        with open(f"{stem}.png", "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    del older


def made_of_it(rec):
    with rec.phase("step"):
        try:
            with rec.phase("forward"):
                torch.empty(TOO_MUCH)
        except RuntimeError as error:
            raise ValueError("stage 3 failed") from error


def after_errors_that_were_handled(rec):
    for _ in range(20):  # a later exception may lie where an earlier one lay
        with contextlib.suppress(RuntimeError), rec.phase("handled"):
            torch.ones(2) @ torch.ones(3)
    with rec.phase("fine"):
        pass
    torch.empty(TOO_MUCH)


def in_a_backward(rec):
    with rec.phase("B", stage=2):
        hungry(torch.ones(3, requires_grad=True)).sum().backward()


def in_a_pass_that_marks_itself(rec):
    x = torch.ones(3, requires_grad=True)
    stage_backward_input([hungry(x)], [torch.ones(3)], [x], iter([]))


def while_another_is_handled(rec):
    try:
        with rec.phase("fast"):
            raise NotImplementedError
    except NotImplementedError:
        with rec.phase("slow"):
            torch.empty(TOO_MUCH)


def raised_again_in_another_phase(rec):
    try:
        with rec.phase("outer"), rec.phase("inner"):
            torch.empty(TOO_MUCH)
    except RuntimeError as error:
        kept = error
    with rec.phase("later"):
        raise kept


PHASES = {
    "forward": made_of_it,
    "no phase": after_errors_that_were_handled,
    "B stage 2": in_a_backward,
    "I": in_a_pass_that_marks_itself,
    "slow": while_another_is_handled,
    "inner": raised_again_in_another_phase,
}


@pytest.mark.parametrize("phase", PHASES)
def test_the_phase_is_the_innermost_that_the_error_has_ended(tmp_path, phase):
    text, caught, _ = failed(tmp_path, PHASES[phase])
    assert text.startswith(f"out of memory on cpu in {phase} at ")
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), type(caught.value)), "as other processes are sent it"


@pytest.mark.parametrize("error", [ValueError("bad"), RuntimeError("shape mismatch"), KeyboardInterrupt()])
def test_other_errors_leave_nothing(tmp_path, error, caplog):
    with pytest.raises(type(error)), memory.record(on_out_of_memory=tmp_path / "oom"):
        raise error
    with memory.record(on_out_of_memory=tmp_path / "oom"):
        pass
    assert not (tmp_path / "oom").exists() and not caplog.messages


class Speechless(RuntimeError):
    def __str__(self):
        raise AttributeError("words")


def test_what_is_out_of_memory():
    of_the_cpu = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.")
    others = [RuntimeError("out of paper"), Speechless()]
    raised = [MemoryError(), of_the_cpu, torch.OutOfMemoryError("CUDA out of memory"), *others]
    of = {"cpu": [True, True, False, False, False], "cuda": [False, False, True, False, False]}
    for device, expected in of.items():
        found = [_out_of_memory.is_out_of_memory(error, torch.device(device)) for error in raised]
        assert found == expected, device
    one, two = ValueError(), ValueError()
    one.__cause__, two.__cause__ = two, one  # a circle
    assert list(_out_of_memory.causes(one)) == [one, two]


def test_a_report_that_cannot_be_written_leaves_the_error_as_it_is(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), memory.record(on_out_of_memory=tmp_path / "file"):
        torch.empty(TOO_MUCH)
    (message,) = caplog.messages
    assert message.startswith("out of memory on cpu in no phase, and the report could not be written: ")


def test_nothing_is_kept_by_the_report_which_needs_no_log(tmp_path):
    left = []

    def run(rec):
        tensor = torch.ones(100)
        left.append(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()))
        torch.empty(TOO_MUCH)

    text, caught, rec = failed(tmp_path, run, max_events=0)
    assert "the largest of these" in text
    del caught
    gc.collect()  # the traceback refers to the frame that has caught it
    assert rec.peak == 400
    assert left[0].expired()
