"""What is refused of data parallel stages, and what patching leaves as it was. One process, which is a pipeline alone."""

import functools
import importlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe._stage import fsdp  # where torch fails as in no user's code
from zbpipe._torch.ddp import replicate_state  # the same
from zbpipe._torch.fsdp import freed_groups, states_in  # the same

pytestmark = [pytest.mark.drops_groups, pytest.mark.usefixtures("alone")]


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
        zbpipe.patch(),
        pytest.raises(
            RuntimeError, match=r"stage 1's module is a Sequential whose part '0', a .*Linear|'0', a Distrib"
        ),
    ):
        stage.backward_maybe_with_nosync("input", kwargs)
    assert x.grad is None


@pytest.mark.parametrize("module", [part_in_fsdp, part_in_ddp, part_replicated])
def test_so_it_is_in_the_first_stage_whose_weight_pass_is_a_whole_backward(module):
    stage = PipelineStage(module(), 0, 2, torch.device("cpu"))
    with zbpipe.patch(), pytest.raises(RuntimeError, match=r"stage 0's module is a Sequential whose part '0', a "):
        stage.backward_weight_one_chunk(0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (lambda part: part, "module is a FullyShardedDataParallel, which takes its weights away"),
        (nn.Sequential, "module is a Sequential whose part '0', a FullyShardedDataParallel, takes its weights away"),
    ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_fsdps_first_version_is_refused(wrap, words, index):
    module = wrap(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True))
    stage = PipelineStage(module, index, 2, torch.device("cpu"))
    with zbpipe.patch():
        first = partial(stage.backward_maybe_with_nosync, "input", {}) if index else stage.backward_weight_one_chunk
        with pytest.raises(RuntimeError, match=rf"stage {index}'s {words}.*fully_shard instead"):
            first(0)


class Checkpointed(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


def passes(module):
    """Runs a microbatch's forward, and gives functions for its I, and its W, the last of the step."""
    stage = PipelineStage(module, 1, 2, torch.device("cpu"))
    x = torch.randn(2, 2, requires_grad=True)
    out = stage.forward_maybe_with_nosync(x)
    kwargs = {"stage_output": (out,), "output_grads": (torch.ones_like(out),), "input_values": (x,)}
    return (
        lambda: stage.backward_maybe_with_nosync("input", kwargs)[1],
        lambda groups: stage.backward_maybe_with_nosync(
            "weight", {"stage_output": (), "param_groups": groups}, last_backward=True
        ),
    )


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("wrap", [DistributedDataParallel, replicate])
def test_a_backward_within_the_input_pass_of_ddp_is_refused(wrap, static_graph):
    module = wrap(nn.Sequential(Checkpointed(2, 2), nn.Linear(2, 2)), static_graph=static_graph)
    with zbpipe.patch():
        input_pass, _ = passes(module)
        words = r"input pass of stage 1 has added to the gradients of (module\.)?0.weight, (module\.)?0.bias, as a "
        with pytest.raises(RuntimeError, match=words + "checkpoint .*use_reentrant=False"):
            input_pass()


@pytest.mark.parametrize("wrap", [DistributedDataParallel, replicate])
def test_unused_weights_that_ddp_was_not_told_of_are_refused(wrap):
    part = nn.Linear(2, 2)
    part.never = nn.Linear(2, 2, bias=False)
    with zbpipe.patch():
        input_pass, weight_pass = passes(wrap(part))
        groups = input_pass()
        with pytest.raises(
            RuntimeError, match=r"does not use (module\.)?never.weight of stage 1, and Distrib.*unused_p"
        ):
            weight_pass(groups)
        assert part.weight.grad is None
        assert not any(group.spent for group in groups)


def sharded(part):
    return fully_shard(part, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize(
    ("wrap", "by", "ignored"),
    [
        (DistributedDataParallel, "DistributedDataParallel", False),
        (DistributedDataParallel, "DistributedDataParallel", True),
        (sharded, "fully_shard", False),
    ],
)
def test_main_grad_in_data_parallel_stages_is_refused(wrap, by, ignored):
    module = wrap(part := nn.Linear(2, 2))
    main_grad = torch.zeros(2, 2)
    if not ignored:
        part.weight.main_grad = main_grad
    with zbpipe.patch(), zbpipe.policy(main_grad=True):
        input_pass, weight_pass = passes(module)
        if ignored:  # no weight has one
            weight_pass(input_pass())
            assert part.weight.grad is not None
            return
        words = rf"adds to the main_grad of (module\.)?weight of stage 1, and {by} reduces .*policy\(main_grad=False\)"
        with pytest.raises(RuntimeError, match=words):
            input_pass()
    assert main_grad.eq(0).all()


def fails():
    raise ZeroDivisionError


def test_a_gather_that_fails_before_a_weight_pass_leaves_no_other_gathered():
    module = sharded(nn.Sequential(sharded(nn.Linear(2, 2)), sharded(nn.Linear(2, 2))))
    module(torch.ones(2, 2)).sum().backward()
    groups = freed_groups(states_in(module))
    groups[1].unshard = fails
    with pytest.raises(ZeroDivisionError), fsdp.around(module, "weight", [SimpleNamespace(_reads_weights=True)]):
        pass
    assert len(groups) == 2 and freed_groups(states_in(module)) == groups


def test_a_replicate_that_cannot_begin_expects_a_backward_as_before():
    module = replicate(nn.Linear(2, 2))
    state = replicate_state(module)
    state.lazy_init = fails
    stage = PipelineStage(module, 1, 2, torch.device("cpu"))
    with zbpipe.patch(), pytest.raises(ZeroDivisionError):
        stage.forward_maybe_with_nosync(torch.ones(2, 2))
    assert not state._no_sync


def test_shards_among_the_weights_are_refused():
    """In a loop of one's own: I would find none of them in the graph. With None, as it says, both passes are right."""
    module = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh=init_device_mesh("cpu", (1,)))
    shards = list(module.parameters())
    x, given = torch.ones(2, 2, requires_grad=True), nn.Parameter(torch.ones(2))
    out = module(x) * given
    with pytest.raises(ValueError, match=r"weights\[1\] of \[2, 2\] is a shard of fully_shard's.*weights=None to both"):
        zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [given, *shards])
    assert x.grad is None
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], None)
    zbpipe.stage_backward_weight(None, groups)
    assert all(weight.grad is not None for weight in (given, *shards))


def test_whoever_asks_within_a_pass_gets_the_modules_own_parameters():
    """I and W take the weights that are in the graph; the module has shards, and says so to hooks and other threads."""
    module = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh=init_device_mesh("cpu", (1,)))
    own = module.parameters
    module.parameters = lambda recurse=True: own(recurse)  # the user's
    users = vars(module)["parameters"]
    stage = PipelineStage(module, 1, 2, torch.device("cpu"))
    stage.has_backward = True
    with zbpipe.patch():
        stage.forward_maybe_with_nosync(torch.ones(2, 2)).sum().backward()  # gathers for the first time
        module.zero_grad()
        x = torch.randn(2, 2, requires_grad=True)
        out = stage.forward_maybe_with_nosync(x)
        module.reshard()
        seen = []
        out.register_hook(lambda grad: seen.append(module.parameters is users))
        kwargs = {"stage_output": (out,), "output_grads": (torch.ones_like(out),), "input_values": (x,)}
        groups = stage.backward_maybe_with_nosync("input", kwargs)[1]
        assert seen == [True]
        stage.backward_maybe_with_nosync("weight", {"stage_output": (), "param_groups": groups}, last_backward=True)
    assert len(groups) == 2 and all(group.spent for group in groups)
    assert vars(module)["parameters"] is users


FSDP = "torch.distributed.fsdp._fully_shard._fsdp"
# What torch may have in the place of what zbpipe knows.
LOST = {
    "a method": {f"{FSDP}_param_group:FSDPParamGroup.unshard": lambda self, how: None},
    "a backward's end": {f"{FSDP}_state:FSDPState._root_post_backward_final_callback": None},
    "the reducer": {"torch.nn.parallel.distributed:_find_tensors": None},
    "a flag": {
        "torch.nn.parallel:DistributedDataParallel._set_static_graph": lambda self: None,
        "torch.nn.parallel:DistributedDataParallel._post_forward": lambda self, output: output,
    },
    "replicate's state": {"torch.distributed._composable.replicate:_ReplicateState.lazy_init": lambda self, when: None},
}


def lose(what, monkeypatch):
    for name, instead in LOST[what].items():
        module, _, path = name.partition(":")
        *owner, attribute = path.split(".")
        owner = functools.reduce(getattr, owner, importlib.import_module(module))
        if instead is None:
            monkeypatch.delattr(owner, attribute, raising=False)
        else:
            monkeypatch.setattr(owner, attribute, instead, raising=False)


@pytest.mark.parametrize(
    ("wrap", "lost", "words"),
    [
        (sharded, "a method", r"under fully_shard would be wrong: .*unshard takes \(self, how\) where zbpipe knows"),
        (sharded, "a backward's end", "under fully_shard would be wrong: .*_root_post_backward_final_callback"),
        (DistributedDataParallel, "the reducer", "wrong moment, or never: .*_find_tensors is missing"),
        (DistributedDataParallel, "a flag", "_static_graph_delay_allreduce_enqueued is missing"),
        (replicate, "the reducer", "wrong moment, or never: .*_find_tensors is missing"),
        (replicate, "replicate's state", r"lazy_init takes \(self, when\) where zbpipe knows \(self\)"),
    ],
)
def test_a_stage_whose_ways_in_torch_are_unknown_is_refused_in_its_first_forward(
    wrap, lost, words, monkeypatch, caplog
):
    """And no other stage is."""
    stage = PipelineStage(wrap(nn.Linear(2, 2)), 1, 2, torch.device("cpu"))
    other = PipelineStage(nn.Linear(2, 2), 1, 2, torch.device("cpu"))
    monkeypatch.setattr(importlib.import_module("zbpipe._patch"), "_said", set())
    lose(lost, monkeypatch)
    with zbpipe.patch():
        with pytest.raises(RuntimeError, match=f"stage 1's module is a .*{words}"):
            stage.forward_maybe_with_nosync(torch.ones(2, 2))
        other.forward_maybe_with_nosync(torch.ones(2, 2))
    said = [record.getMessage() for record in caplog.records if "not all of torch" in record.getMessage()]
    assert len(said) == 1 and "refused where it is met" in said[0]
    monkeypatch.undo()
