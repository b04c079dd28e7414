"""The phases that zbpipe's passes and pipeline stages make by themselves, and what a recording says of them."""

import gc
import weakref

import pytest
import torch
from support.oracle import without_collector
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import zbpipe
from zbpipe import memory
from zbpipe.memory._stages import METHODS  # which a recording puts its own in front of


def model():
    return nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False))


def forward(net):
    x = torch.randn(8, 16, requires_grad=True)
    return x, net(x)


def input_pass(net, x, y):
    return zbpipe.stage_backward_input([y], [torch.ones_like(y)], [x], net.parameters())


def test_calls_of_the_passes_are_phases_of_each_recording():
    net = model()
    with memory.record() as rec:
        first, second = (input_pass(net, *forward(net))[1] for _ in range(2))
        with memory.record() as inner:
            for groups in (second[:1], first + second[1:]):
                zbpipe.stage_backward_weight(net.parameters(), groups)
        x, y = forward(net)
        zbpipe.stage_backward([y], [torch.ones_like(y)], [x])
    assert [p.label for p in rec.phases] == ["I", "I", "W", "W", "B"]
    assert [p.label for p in inner.phases] == ["W", "W"]


def test_a_better_name_hides_the_passes_own():
    net = model()
    with memory.record() as rec:
        x, y = forward(net)
        with rec.phase("I", stage=3, microbatch=7):
            _, groups = input_pass(net, x, y)
        with rec.phase("step"):
            zbpipe.stage_backward_weight(net.parameters(), groups)
    assert [p.label for p in rec.phases] == ["I stage 3 microbatch 7", "step", "W"]


def test_the_passes_refuse_and_fail_as_without_a_recording():
    net = model()
    with memory.record() as rec:
        x, y = forward(net)
        with pytest.raises(ValueError, match="output_grads"):
            zbpipe.stage_backward_input([y], [], [x], net.parameters())
        _, groups = input_pass(net, x, y)
        for bad in (None, 3, [3]):
            with pytest.raises(TypeError, match="param_groups"):
                zbpipe.stage_backward_weight(net.parameters(), bad)
        zbpipe.stage_backward_weight(iter(net.parameters()), iter(groups))
        with pytest.raises(RuntimeError, match="spent"):
            zbpipe.stage_backward_weight(net.parameters(), groups)
        with pytest.raises(RuntimeError, match="Failed to run stage backward"):
            zbpipe.stage_backward([y], [], [x])
    assert [p.kind for p in rec.phases] == ["I", "I", "W", "W"]  # what is no list of groups begins none
    assert zbpipe.passes.observer is None


class Stage:
    """As schedules see a PipelineStage."""

    def __init__(self, index):
        self.stage_index, self.net, self.chunks = index, model(), {}

    def forward_one_chunk(self, fwd_chunk_id, *args):
        self.chunks[fwd_chunk_id] = forward(self.net)

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True):
        x, y = self.chunks[bwd_chunk_id]
        if full_backward:
            zbpipe.stage_backward([y], [torch.ones_like(y)], [x])
        else:
            self.chunks[bwd_chunk_id] = input_pass(self.net, x, y)[1]

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        zbpipe.stage_backward_weight(self.net.parameters(), self.chunks.pop(bwd_chunk_id))


class Schedule:
    def __init__(self, *stages):
        self._stages = list(stages)


def test_watched_stages():
    """However often each is watched."""
    schedule = Schedule(Stage(0), Stage(1))
    with memory.record() as rec:
        rec.watch([schedule, *schedule._stages])
        rec.watch(schedule)
        for stage in schedule._stages:
            stage.forward_one_chunk(0, ())
            stage.backward_one_chunk(0, loss=None, full_backward=False)
            stage.backward_weight_one_chunk(0)
            stage.forward_one_chunk(fwd_chunk_id=1)
            stage.backward_one_chunk(1, None, True)
            with pytest.raises(TypeError):
                stage.forward_one_chunk()
    assert [p.label for p in rec.phases] == [
        f"{kind} stage {stage} microbatch {microbatch}"
        for stage in (0, 1)
        for kind, microbatch in (("forward", 0), ("I", 0), ("W", 0), ("forward", 1), ("B", 1))
    ]
    assert all(name not in vars(stage) for stage in schedule._stages for name in METHODS)


def test_stages_watched_by_two_recordings_that_overlap():
    stage = Stage(1)
    own = stage.forward_one_chunk
    stage.forward_one_chunk = own  # as somebody's own wrapper would be
    first, second = memory.record(), memory.record()
    first.__enter__()
    first.watch([stage])
    with second:
        second.watch(stage)
        stage.forward_one_chunk(0)
        first.__exit__(None, None, None)
        stage.forward_one_chunk(1)
    stage.forward_one_chunk(2)
    assert [p.microbatch for p in first.phases] == [0]
    assert [p.microbatch for p in second.phases] == [0, 1]
    assert stage.forward_one_chunk is own, "the last one puts back what was there"
    assert "backward_one_chunk" not in vars(stage)
    assert sorted(stage.chunks) == [0, 1, 2]


def test_a_watched_stage_calls_what_its_class_has_at_that_time():
    """zbpipe.patch() changes the class: within a recording, and after recordings that overlapped."""

    class Changing(Stage):
        calls = ()

    def forward_one_chunk(self, fwd_chunk_id, *args):
        type(self).calls += (fwd_chunk_id,)
        return Stage.forward_one_chunk(self, fwd_chunk_id, *args)

    stage = Changing(1)
    with memory.record() as rec:
        rec.watch(stage)
        kept = stage.forward_one_chunk
        stage.forward_one_chunk(0)
        Changing.forward_one_chunk = forward_one_chunk
        stage.forward_one_chunk(1)
        kept(2)
        del Changing.forward_one_chunk
        stage.forward_one_chunk(3)
    Changing.forward_one_chunk = forward_one_chunk
    stage.forward_one_chunk(4)
    kept(5)
    assert Changing.calls == (1, 2, 4, 5)
    assert [p.microbatch for p in rec.phases] == [0, 1, 2, 3]


def test_a_wrapper_put_in_front_of_a_watched_method():
    """It stays, the recording's method below it passes calls on and keeps no recording, and layers do not pile up."""
    stage = Stage(1)
    seen = []
    with memory.record() as rec:
        rec.watch(stage)
        ours = stage.forward_one_chunk

        def theirs(*args):
            seen.append(args)
            return ours(*args)

        stage.forward_one_chunk = theirs
        stage.forward_one_chunk(0)
    assert stage.forward_one_chunk is theirs
    stage.forward_one_chunk(1)
    assert [p.microbatch for p in rec.phases] == [0]
    left = weakref.ref(rec)
    del rec
    assert left() is None
    stage.forward_one_chunk = ours  # they undo theirs
    with memory.record() as again:
        again.watch(stage)
        stage.forward_one_chunk(2)
    assert "forward_one_chunk" not in vars(stage)
    assert seen == [(0,), (1,)]
    assert [p.microbatch for p in again.phases] == [2]


def test_a_recording_keeps_no_tensor_and_no_stage():
    dropped, stage = Stage(1), Stage(1)
    gone, left = weakref.ref(dropped), weakref.ref(stage)
    with without_collector():
        with memory.record() as rec:
            rec.watch([dropped, stage])
            del dropped
            gc.collect()
            assert gone() is None
            stage.forward_one_chunk(0)
            method = stage.forward_one_chunk
        method(1)  # that somebody kept still works
        assert [p.label for p in rec.phases] == ["forward stage 1 microbatch 0"]
        storage, recording = StorageWeakRef(stage.chunks[0][1].untyped_storage()), weakref.ref(rec)
        del method, stage, rec
        assert storage.expired() and left() is None and recording() is None


def test_what_cannot_be_watched():
    with memory.record() as rec:
        stage = Stage(1)
        for bad in (3, "stage", nn.Linear(1, 1), [None], [stage, None]):
            with pytest.raises(TypeError, match="expected a pipeline stage"):
                rec.watch(bad)
        assert "forward_one_chunk" not in vars(stage), "refused before anything is changed"
    with pytest.raises(RuntimeError, match="outside of the recording"):
        rec.watch(Stage(1))
