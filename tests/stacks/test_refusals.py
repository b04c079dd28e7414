"""What is refused of data parallel stages, and what patching leaves as it was. One process, which is a pipeline alone."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import stage as torchs_stage
from torch.nn.parallel import DistributedDataParallel

import zbpipe


@pytest.fixture(autouse=True)
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def part_in_fsdp():
    return nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,))))


def part_in_ddp():
    return nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)))


def part_replicated():
    return nn.Sequential(replicate(nn.Linear(2, 2)))


@pytest.mark.parametrize("module", [part_in_fsdp, part_in_ddp, part_replicated])
def test_a_stage_of_which_a_part_alone_is_data_parallel_is_refused(module):
    stage = PipelineStage(module(), 1, 2, torch.device("cpu"))
    x = torch.randn(2, 2, requires_grad=True)
    out = x * 2
    kwargs = {"stage_output": (out,), "output_grads": (torch.ones_like(out),), "input_values": (x,)}
    with (
        zbpipe.patched(),
        pytest.raises(
            RuntimeError, match=r"stage 1's module is a Sequential whose part '0', a .*Linear|'0', a Distrib"
        ),
    ):
        stage.backward_maybe_with_nosync("input", kwargs)
    assert x.grad is None


def methods():
    names = ("backward_maybe_with_nosync", "forward_maybe_with_nosync")
    found = [inspect.getattr_static(torchs_stage._PipelineStageBase, name) for name in names]
    return [*found, inspect.getattr_static(PipelineStage, "_compute_outputs", None)]


def test_patching_and_back():
    before = methods()
    with zbpipe.patched(), zbpipe.patched():
        assert all(new is not old for new, old in zip(methods(), before, strict=True) if old is not None)
    assert methods() == before


def test_a_stage_method_of_other_parameters_is_left_alone_with_a_warning(monkeypatch, caplog):
    def other(self, backward_type, kwargs):
        raise AssertionError

    monkeypatch.setattr(torchs_stage._PipelineStageBase, "backward_maybe_with_nosync", other)
    before = methods()
    with zbpipe.patched():
        assert methods() == before
    said = [record.getMessage() for record in caplog.records if "data parallel" in record.getMessage()]
    assert len(said) == 1 and "takes (self, backward_type, kwargs) where zbpipe knows" in said[0]
