"""The leaks that people lost days to, each caught by the tool with its holder named first, and absent in schedules on zbpipe.

The reconstructions are in support/faults.py. That they leak is not the tool's word alone: `Watch` of support sees the
storages by weak references. test_history_schedules.py has them where they happened.
"""

import functools
import gc
import itertools
from types import FrameType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining  # imported in a check otherwise, and what it makes is not the checked code's
from leaks.pipelined import Training
from support import faults
from support.blocks import SCHEDULES
from support.faults import BYTES, SIZE
from support.leaks import Watch, no_collector
from support.pipelines import Case, by_lane, ranks_of
from torch import nn

import zbpipe
from zbpipe.leaks import Growth, check_tensor_leak, find_holders

pytestmark = pytest.mark.drops_groups


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


def groups_never_run(backward_input):
    return functools.partial(faults.groups_never_run, backward_input, nn.Linear(16, 16))


OF_TORCH = groups_never_run(torch.distributed.pipelining._backward.stage_backward_input)
OF_ZBPIPE = groups_never_run(zbpipe.stage_backward_input)
COLLECTED = "freed by the collector"

# The fault, the first leak's fate, whom all leaks are blamed on, what its chain has.
FAULTS = [
    (faults.output_deallocated_by_data, "alive", "output_tensors", ("grad_fn: ExpBackward0", "saved: result")),
    (faults.graph_kept_by_its_saved_output, COLLECTED, "KeepsItsOutput", ()),
    (faults.view_of_a_padded_buffer, "alive", "gathered", (f"which uses 40 of {BYTES} bytes",)),
    (OF_TORCH, "alive", "deferred", ("dict: dict item", "node: ")),
    (OF_ZBPIPE, "alive", "deferred", ("group: ",)),
    (faults.exception_in_the_middle, "alive", "errors", ("a RuntimeError", "traceback: ", "step")),
]


@pytest.mark.parametrize(("fault", "fate", "blamed", "has"), FAULTS)
def test_it_is_found(fault, fate, blamed, has):
    report = find(fault)
    chain = "\n".join(f"{holder.kind}: {holder.text} {holder.where}" for holder in report.leaks[0].chain)
    assert report.leaks[0].fate == fate
    assert all(blamed in leak.blame.text for leak in report.leaks), report
    assert [words for words in has if words not in chain] == []
    assert bool(report.cycles) == (fate != "alive")
    for cycle in report.cycles:
        assert blamed in cycle.text and "result" in cycle.text and cycle.bytes >= BYTES


@pytest.mark.parametrize("stage", [faults.StageWithReusedBuffers, faults.StageWithPrehooksOnAccumulators])
def test_hooks_pile_up_on_reused_receive_buffers(stage):
    stage = stage()
    stage.step()
    with check_tensor_leak(action="record") as check:
        for _ in range(3):
            stage.step()
    assert len(check.report.leaks) >= 3
    for leak in check.report.leaks:
        assert (leak.fate, leak.blame.kind) == ("alive", "hook") and "capture" in leak.blame.text
    with Growth() as growth:
        for _ in range(5):
            stage.step()
            growth.step()
        grown, table = growth.grown(), growth.table()
    assert sum(len(group.leaks) for group in grown) >= 3
    assert all("capture" in leak.blame.text for group in grown for leak in group.leaks)
    assert "capture" in table and ("receive_buffer" in table or "input_nodes" in table)


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
    assert [leak for leak in report.leaks if leak.bytes == 4 * 16 * 4]
    assert "recompute_fn" in "".join(map(str, report.leaks))


# Schedules: every step's, the collector off, looked at by the tool.

LOOK_EVERY = 5  # steps, through all objects
WARMUP = 3  # steps in which buffers, gradients and the optimizer's state come to be
# Loop and V, with W and without, and one that overlaps passes: all others run as well, with more steps, in the long lane.
SOME_SCHEDULES = ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def tensors_in_garbage():
    """How many tensors only the collector can free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    count = sum(issubclass(type(thing), torch.Tensor) for thing in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    return count


def tensors_alive():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def run(schedule, steps, kind=Training):
    """What each step left behind."""
    with zbpipe.memory.record(max_events=0) as memory:  # around all: it counts the freeing of its own blocks alone
        training = kind(schedule)
        for _ in range(WARMUP):
            training.step()
        dist.barrier()
        gc.collect()
        gc.disable()
        tensors, live, reports = [], [], []
        with Growth() as growth:
            for number in range(steps):
                with check_tensor_leak(action="record", allow=[*training.modules, training.optimizer]) as check:
                    training.step()
                    training.let_go()
                reports.append(str(check.report) if check.report else "")
                growth.step()
                live.append(memory.live)
                if number % LOOK_EVERY == 0:
                    tensors.append(tensors_alive())
            grown = growth.table() if growth.grown() else ""
        garbage = tensors_in_garbage()
    gc.enable()
    return {"tensors": tensors, "live": live, "reports": reports, "counts": growth.counts, "bytes": growth.bytes,
            "grown": grown, "garbage": garbage}  # fmt: skip


def check(rank, steps):
    for each in ("tensors", "live", "reports", "counts", "bytes"):
        assert len(rank[each]) == (-(-steps // LOOK_EVERY) if each == "tensors" else steps)
        assert len({*rank[each]}) == 1, (each, rank[each])
    assert (rank["reports"][0], rank["grown"], rank["garbage"]) == ("", "", 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_ten_steps_of_a_schedule_on_one_rank_leave_nothing(name, alone):
    with zbpipe.patch():
        check(run(name, 10), 10)


class Forgetful(Training):
    """Keeps a tensor of each step."""

    losses = None

    def keep(self, outputs):
        self.losses = [*(self.losses or []), torch.ones(SIZE)]


def test_a_leak_of_one_tensor_a_step_is_seen_in_a_schedule(alone):
    with zbpipe.patch():
        result = run("ScheduleZBVZeroBubble", 10, Forgetful)
    first = result["bytes"][0]
    assert result["bytes"] == [first + BYTES * step for step in range(10)]
    assert [after - before for before, after in itertools.pairwise(result["live"])] == [BYTES] * 9
    assert all(f"{BYTES} bytes" in report and "losses" in report for report in result["reports"])
    assert "losses" in result["grown"]


CASES = {f"{name} {steps}": Case(functools.partial(run, name, steps), lane)
         for steps, names, lane in ((10, SOME_SCHEDULES, "fast"), (200, SCHEDULES, "long")) for name in names}  # fmt: skip
ranks = ranks_of(__file__, CASES, timeout=2700)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", by_lane(CASES))
def test_steps_of_a_schedule_on_two_ranks_leave_nothing(name, ranks):
    for rank in ranks(name):
        check(rank, int(name.split()[1]))


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
        frames = [thing.f_code.co_name for thing in gc.get_objects() if type(thing) is FrameType]
        assert [name for name in frames if "search_for" in name] == []
