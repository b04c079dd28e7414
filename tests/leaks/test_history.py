"""The leaks that people lost days to, each caught by the tool with its holder named first, and absent in zbpipe.

The reconstructions are in support/faults.py. That they leak is not the tool's word alone: `Watch` of support sees the
storages by weak references.
"""

import gc
import itertools
import subprocess
import warnings
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining  # imported in a check otherwise, and what it makes is not the checked code's
from leaks import leak_ranks
from leaks.leak_ranks import Training, run
from support import faults
from support.blocks import SCHEDULES
from support.faults import BYTES, SIZE
from support.leaks import Watch, no_collector
from support.processes import from_json, results, run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe.leaks import Growth, check_tensor_leak, find_holders

WORLD = 2
SOURCE = Path(faults.__file__).name


@pytest.fixture(scope="module", autouse=True)
def _all_is_imported():
    """What torch makes when something is used for the first time is there before a check begins."""
    layer = nn.Linear(16, 16)
    checkpointed = faults.CheckpointedStage()
    for output in (layer(torch.ones(4, 16)), checkpointed(torch.ones(4, 16, requires_grad=True))):
        output.sum().backward()


def find(fault, *arguments):
    """The report on a fault, which an independent look has seen to leak; all is let go of afterwards."""
    with Watch() as watch:
        held = fault(*arguments)
        leaked = watch.alive()
        del held
    gc.collect()
    assert leaked > 0, "the reconstruction does not leak"
    with check_tensor_leak(action="record") as check:
        held = fault(*arguments)
    del held
    gc.collect()
    assert check.report
    assert check.report.bytes == sum(leak.bytes for leak in check.report.leaks)
    return check.report


def words(leak):
    """The chain, a line per holder: kind, words, and where."""
    return "\n".join(f"{holder.kind}: {holder.text} {holder.where or ''}" for holder in leak.chain)


def of_bytes(report, size):
    return [leak for leak in report.leaks if leak.bytes == size]


def line_of(text):
    """faults.py:LINE of a line of the reconstructions."""
    lines = Path(faults.__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if text in line]
    return f"{SOURCE}:{number}"


def test_self_recursive_closure_cell():
    report = find(faults.self_recursive_closure)
    leak = report.leaks[0]
    assert leak.fate == "freed by the collector"
    assert leak.blame.kind in ("function", "cell")
    assert "extract_tensors_with_grads" in leak.blame.text
    (cycle,) = [c for c in report.cycles if "extract_tensors_with_grads" in c.text]
    assert {step.kind for step in cycle.steps} <= {"function", "cell"}
    assert line_of("def extract_tensors_with_grads") in cycle.text + "".join(s.where or "" for s in cycle.steps)
    assert cycle.bytes >= BYTES


def test_hook_group_intermediates_hook():
    report = find(faults.hook_group_intermediates_hook)
    leak = report.leaks[0]
    assert leak.fate == "uncollectable"
    assert all("store_gradients" in leak.blame.text for leak in report.leaks)
    (cycle, *_) = report.cycles
    text = cycle.text + " ".join(f"{step.kind} {step.text}" for step in cycle.steps)
    assert all(word in text for word in ("store_gradients", "param_group", "intermediates", "ExpBackward0"))
    assert line_of("def store_gradients") in cycle.text


@pytest.mark.parametrize("stage", [faults.StageWithReusedBuffers, faults.StageWithPrehooksOnAccumulators])
def test_hooks_pile_up_on_reused_receive_buffers(stage):
    stage = stage()
    stage.step()
    with check_tensor_leak(action="record") as check:
        for _ in range(3):
            stage.step()
    assert len(check.report.leaks) >= 3
    for leak in check.report.leaks:
        assert leak.fate == "alive"
        assert leak.blame.kind == "hook"
        assert "capture" in leak.blame.text
    with Growth() as growth:
        for _ in range(5):
            stage.step()
            growth.step()
        grown = growth.grown()
        assert sum(len(group.leaks) for group in grown) >= 3
        assert all("capture" in leak.blame.text for group in grown for leak in group.leaks)
        assert "capture" in growth.table()
        assert "receive_buffer" in growth.table() or "input_nodes" in growth.table()


def test_output_deallocated_by_data():
    report = find(faults.output_deallocated_by_data)
    leak = report.leaks[0]
    assert leak.fate == "alive"
    assert "output_tensors" in leak.blame.text
    assert "ExpBackward0" in words(leak)
    assert leak.chain[-1].kind == "saved"
    assert "result" in leak.chain[-1].text


def test_graph_kept_by_its_saved_output():
    report = find(faults.graph_kept_by_its_saved_output)
    leak = report.leaks[0]
    assert leak.fate == "freed by the collector"
    assert all("KeepsItsOutput" in leak.blame.text for leak in report.leaks)
    (cycle, *_) = report.cycles
    assert "KeepsItsOutput" in cycle.text
    assert "result" in cycle.text


def test_view_of_a_padded_buffer():
    report = find(faults.view_of_a_padded_buffer)
    (leak,) = report.leaks
    assert leak.bytes == BYTES
    assert leak.shape in ((2, 5), (SIZE,))
    assert "gathered" in leak.blame.text
    assert str(BYTES) in str(report).replace(",", "") or "4.0 KiB" in str(report) or "4.1 kB" in str(report)


@pytest.mark.parametrize("module", ["zbpipe", "torch"])
def test_groups_never_run(module):
    backward_input = {
        "zbpipe": zbpipe.stage_backward_input,
        "torch": torch.distributed.pipelining._backward.stage_backward_input,
    }[module]
    report = find(faults.groups_never_run, backward_input, nn.Linear(16, 16))
    for leak in report.leaks:
        assert "deferred" in leak.blame.text
        if module == "zbpipe":
            assert "group" in [holder.kind for holder in leak.chain]
        else:
            assert "node" in [holder.kind for holder in leak.chain] or "grads" in words(leak)


def test_exception_in_the_middle():
    report = find(faults.exception_in_the_middle)
    leak = report.leaks[0]
    said = words(leak)
    assert "errors" in leak.blame.text
    assert "RuntimeError" in said
    assert "traceback" in [holder.kind for holder in leak.chain]
    assert "step" in said


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look
@pytest.mark.parametrize("compile_block", [False, True])
def test_checkpointed_output_kept_is_not_computed_again_to_be_looked_at(compile_block):
    stage = faults.CheckpointedStage(compile_block)
    stage(torch.ones(4, 16, requires_grad=True)).sum().backward()  # compiled now
    stage.zero_grad()
    stage.runs = 0
    report = find(faults.checkpointed_output_kept, stage)
    assert stage.runs == 2  # the forwards
    assert all("outputs" in leak.blame.text for leak in report.leaks)
    assert of_bytes(report, 4 * 16 * 4)
    assert "recompute_fn" in "".join(words(leak) for leak in report.leaks)


# The same, on zbpipe: nothing is left, the collector off, and gc.garbage holds no tensor.


class Stage(nn.Module):
    def __init__(self, kind="plain"):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.body = {
            "plain": self.run,
            "checkpointed": self.run_checkpointed,
            "compiled": torch.compile(self.run, backend="aot_eager"),
            "compiled and checkpointed": self.run_both,
        }[kind]
        self.compiled = torch.compile(self.inner, backend="aot_eager")

    def inner(self, x):
        return self.down(self.up(x).tanh())

    def run(self, x):
        return x + self.inner(x.sin())

    def run_checkpointed(self, x):
        return x + checkpoint(self.inner, x.sin(), use_reentrant=False)

    def run_both(self, x):
        return x + checkpoint(self.compiled, x.sin(), use_reentrant=False)

    def forward(self, x):
        return self.body(x)


def split_backward(stage, x, walk_outputs=lambda output: output):
    output = walk_outputs(stage(x))
    _, groups = zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], stage.parameters())
    return groups


def whole_walk(stage):
    x = torch.ones(4, 16, requires_grad=True)
    output = stage(x)
    zbpipe.stage_backward(
        (output, {"nested": [x.exp()]}), (torch.ones_like(output), {"nested": [torch.ones(4, 16)]}), (x,)
    )


def both_passes(stage):
    x = torch.ones(4, 16, requires_grad=True)
    zbpipe.stage_backward_weight(stage.parameters(), split_backward(stage, x))


def groups_dropped(stage):
    split_backward(stage, torch.ones(4, 16, requires_grad=True))


def raise_in_the_middle(grad):
    raise RuntimeError("in the middle")


def exception_in_input_pass(stage):
    x = torch.ones(4, 16, requires_grad=True)
    x.register_hook(raise_in_the_middle)
    with pytest.raises(RuntimeError):
        split_backward(stage, x)


def exception_in_weight_pass(stage):
    groups = split_backward(stage, torch.ones(4, 16, requires_grad=True))
    handle = stage.down.weight.register_hook(raise_in_the_middle)
    try:
        with pytest.raises(RuntimeError, match="in the middle"):
            zbpipe.stage_backward_weight(stage.parameters(), groups)
    finally:
        handle.remove()


def output_deallocated(stage):
    x = torch.ones(4, 16, requires_grad=True)
    output = zbpipe.make_viewless(stage(x).exp())
    zbpipe.deallocate_output(output)
    _, groups = zbpipe.stage_backward_input([output], [torch.ones(4, 16)], [x], stage.parameters())
    zbpipe.stage_backward_weight(stage.parameters(), groups)


def padded_buffer_released(stage):
    padded = torch.zeros(SIZE)
    view = padded[:64].view(4, 16)
    x = (view + 1).requires_grad_()
    del view
    assert zbpipe.release_storage(padded) == BYTES
    zbpipe.stage_backward_weight(stage.parameters(), split_backward(stage, x))


USES = [
    whole_walk,
    both_passes,
    groups_dropped,
    exception_in_input_pass,
    exception_in_weight_pass,
    output_deallocated,
    padded_buffer_released,
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look
@pytest.mark.parametrize("kind", ["plain", "checkpointed", "compiled", "compiled and checkpointed"])
@pytest.mark.parametrize("use", USES)
def test_zbpipe_leaves_nothing(use, kind):
    stage = Stage(kind)
    for _ in range(2):  # compiled, and all that is made once
        use(stage)
    with no_collector(), check_tensor_leak(action="record", allow=[stage]) as check:
        use(stage)
    assert not check.report, str(check.report)
    assert check.report.leaks == []
    assert check.report.cycles == []


def test_zbpipe_hangs_nothing_on_reused_receive_buffers():
    stage, buffer = Stage(), torch.ones(4, 16, requires_grad=True)
    with Growth() as growth:
        for _ in range(6):
            zbpipe.stage_backward_weight(stage.parameters(), split_backward(stage, buffer))
            buffer.grad = None
            growth.step()
        assert growth.counts == [growth.counts[0]] * 6
        assert growth.bytes == [growth.bytes[0]] * 6
        assert growth.grown() == []
    assert not buffer._backward_hooks


# Schedules.


# Loop and V, with W and without, and one that overlaps passes: all others run as well, with more steps, in the long lane.
SOME_SCHEDULES = ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def ranks_of(folder, steps, names, limit):
    try:
        run_ranks("leaks/leak_ranks.py", WORLD, folder, str(steps), *names, timeout=limit)
    except subprocess.TimeoutExpired:
        warnings.warn(f"the ranks took longer than {limit} s", stacklevel=1)
    return folder


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory):
    return ranks_of(tmp_path_factory.mktemp("ten"), 10, SOME_SCHEDULES, 150)


@pytest.fixture(scope="module")
def two_hundred_steps(tmp_path_factory):
    return ranks_of(tmp_path_factory.mktemp("two_hundred"), 200, SCHEDULES, 2700)


def check(ranks, steps):
    for rank in ranks:
        assert rank["tensors"] == [rank["tensors"][0]] * len(rank["tensors"])
        assert len(rank["tensors"]) > 1
        assert rank["live"] == [rank["live"][0]] * steps
        assert rank["reports"] == [""] * steps
        assert rank["counts"] == [rank["counts"][0]] * steps
        assert rank["bytes"] == [rank["bytes"][0]] * steps
        assert rank["grown"] == ""
        assert rank["garbage"] == 0


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    with zbpipe.patch():
        yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", SCHEDULES)
def test_ten_steps_of_a_schedule_on_one_rank_leave_nothing(name, one_rank):
    check([run(name, 0, 1, 10)], 10)


class Forgetful(Training):
    """Keeps a tensor of each step."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.losses = []

    def step(self):
        super().step()
        self.losses.append(torch.ones(SIZE))


def test_a_leak_of_one_tensor_a_step_is_seen_in_a_schedule(one_rank, monkeypatch):
    monkeypatch.setattr(leak_ranks, "Training", Forgetful)
    result = run("ScheduleZBVZeroBubble", 0, 1, 10)
    first = result["bytes"][0]
    assert result["bytes"] == [first + BYTES * step for step in range(10)]
    assert [after - before for before, after in itertools.pairwise(result["live"])] == [BYTES] * 9
    assert all(f"{BYTES} bytes" in report and "losses" in report for report in result["reports"])
    assert "losses" in result["grown"]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", SOME_SCHEDULES)
def test_ten_steps_of_a_schedule_leave_nothing(name, ten_steps):
    check(results(ten_steps, name, WORLD, from_json), 10)


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_false_alarm_over_200_steps(name, two_hundred_steps):
    check(results(two_hundred_steps, name, WORLD, from_json), 200)


# The tool itself.


def search_for_a_holder(tensor):
    big = torch.ones(SIZE)
    find_holders(tensor)
    return big.shape


def search_for_leaks(kept):
    big = torch.ones(SIZE)
    with check_tensor_leak(action="record"):
        kept.append(torch.ones(3))
    return big.shape


def test_a_search_keeps_nothing_of_its_callers():
    kept = [torch.ones(2)]
    with no_collector(), Watch() as watch:
        search_for_a_holder(kept[0])
        search_for_leaks(kept)
        assert watch.storages
        assert watch.alive(*kept) == 0
        assert [
            f.f_code.co_name for f in gc.get_objects() if type(f) is FrameType and "search_for" in f.f_code.co_name
        ] == []
