"""Stages that fully_shard has sharded: two pipeline ranks of two shards, and two stages of one process on a 2x2 mesh."""

import functools

import torch
from support.stacks import model
from support.stacks.training import ZERO_BUBBLE, Training, cases_of, check_borrowing, with_late_weight_passes
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import zbpipe

GATHERS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_")
SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_")


class Checkpointed(model.Block):
    def forward(self, x):
        return x + checkpoint(self.mixer, self.norm(x), use_reentrant=False)


class Convolution(model.Block):
    """Its W wants the weight's shape: of a weight whose memory may be gone."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        return super().forward(x) + self.convolution(x.unsqueeze(1)).squeeze(1).sin()


class Adapted(Convolution):
    """W runs a product of weights, which reads both, and views of one."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(model.WIDTH, 2) / 4)
        self.b = nn.Parameter(torch.randn(2, model.WIDTH) / 4)

    def forward(self, x):
        return super().forward(x) + x @ (self.a @ self.b)


@functools.cache
def mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


@functools.cache
def mesh_of_one_pipeline_rank():
    return init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "replicate", "shard"))


def sharded(nested=True, mesh_of=lambda: mesh()["dp"], **options):
    def wrap(part):
        for module in (part.mixer, part) if nested else (part,):
            fully_shard(module, mesh=mesh_of(), **options)
        return part

    return wrap


def groups_of(stage_module):
    for module in stage_module.modules():
        if isinstance(module, FSDPModule):
            yield from fsdp_groups(module)


def fsdp_groups(module):
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups if groups is not None else [state._fsdp_param_group]


def unsharded_bytes(stage_module):
    return sum(
        param._unsharded_param.untyped_storage().size()
        for group in groups_of(stage_module)
        for param in group.fsdp_params
        if hasattr(param, "_unsharded_param")
    )


def watch_memory(training):
    """What a stage's unsharded weights take after each of its forwards, and after each I or whole backward."""
    seen = []

    def watch(stage, name):
        method = getattr(stage, name)

        def watched(microbatch, *args, **kwargs):
            result = method(microbatch, *args, **kwargs)
            is_split_first = stage.is_first and kwargs.get("full_backward") is False  # nothing runs there
            if not is_split_first:
                seen.append((name, stage.stage_index, microbatch, unsharded_bytes(stage.submod)))
            return result

        vars(stage)[name] = watched

    for stage in training.stages:
        watch(stage, "forward_one_chunk")
        watch(stage, "backward_one_chunk")
    return seen


def as_unsplit(schedule, wrap, replicas=model.REPLICAS, **arguments):
    """Gradients right, and the collectives of the same schedule whose backwards are not split, on torch's own module."""
    compute_dtype = arguments.pop("compute_dtype", None)
    tolerances = arguments.pop("tolerances", {})
    make = arguments.pop("make", model.make_parts)
    this_mesh = arguments.pop("on", mesh)()
    replica = replica_in(this_mesh)
    runs = []
    for patched in (True, False):
        training = Training(schedule, this_mesh, wrap, parts=make(), reference=make(), unsplit=not patched)
        events = training.run(replica, replicas, patched, compute_dtype=compute_dtype, **tolerances)
        assert all(unsharded_bytes(module) == 0 for module in training.modules.values())
        runs.append(events)
    split, unsplit = runs
    for log, expected in zip(split, unsplit, strict=True):
        assert log.collectives() == expected.collectives(), (log.collectives(), expected.collectives())
        for stage, microbatch, inner in log.within("W"):
            gathered = [event for event in inner if event != "product"]
            assert stage == 0 or not gathered, (stage, microbatch, gathered)
    return split


def replica_in(this_mesh):
    sizes = [(this_mesh[name].get_local_rank(), this_mesh[name].size()) for name in this_mesh.mesh_dim_names[1:]]
    replica = 0
    for rank, size in sizes:
        replica = replica * size + rank
    return replica


def counts(events):
    """Of each step: how often weights were gathered, and gradients scattered."""
    return [
        tuple(sum(log.collectives().get(name, 0) for name in names) for names in (GATHERS, SCATTERS)) for log in events
    ]


# In all of these the first step has a forward more, from which the stages learn their shapes. Torch 2.11 leaves gathered
# what it has gathered for that one.
TO_LEARN = 1 if torch.__version__ >= (2, 12) else 0


def stays_unsharded(schedule):
    """As torch recommends for pipelines: each of a rank's two times two groups is gathered once and reduced once."""
    events = as_unsplit(schedule, sharded(reshard_after_forward=False))
    assert counts(events) == [(4 + 4 * TO_LEARN, 4), (4, 4)], counts(events)


def reshards(schedule):
    """The weights of the stage are not there when another forward has run between I and W."""
    events = as_unsplit(schedule, sharded(reshard_after_forward=True))
    assert [scatters for _, scatters in counts(events)] == [4, 4]
    assert counts(events)[1][0] > 4


def not_nested(schedule):
    events = as_unsplit(schedule, sharded(nested=False))
    assert counts(events) == [(2 + 2 * TO_LEARN, 2), (2, 2)], counts(events)


def mixed(schedule, reshard_after_forward=False):
    """Computes in bfloat16, sums the microbatches' gradients and reduces in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    as_unsplit(
        schedule,
        sharded(mp_policy=policy, reshard_after_forward=reshard_after_forward),
        make=functools.partial(model.make_parts, dtype=torch.float32),
        compute_dtype=torch.bfloat16,
        tolerances={"rtol": 1e-5, "atol": 1e-5},
    )


def mixed_and_reshards(schedule):
    mixed(schedule, reshard_after_forward=True)


def checkpointed(schedule):
    as_unsplit(
        schedule, sharded(reshard_after_forward=True), make=functools.partial(model.make_parts, block=Checkpointed)
    )


def recomputed(schedule):
    """W runs the checkpointed forward again, hooks of fully_shard and all."""
    make = functools.partial(model.make_parts, block=Checkpointed)
    wrap = sharded(reshard_after_forward=True)
    training = Training(schedule, mesh(), wrap, parts=make(), reference=make())
    with zbpipe.policy(checkpoint="recompute"):
        events = training.run(replica_in(mesh()))
    assert [scatters for _, scatters in counts(events)] == [4, 4]
    assert all(unsharded_bytes(module) == 0 for module in training.modules.values())


def convolution(schedule):
    as_unsplit(
        schedule, sharded(reshard_after_forward=True), make=functools.partial(model.make_parts, block=Convolution)
    )


def late_weight_passes(schedule):
    """Another forward has freed the weights, which W reads: they are gathered for it, and given back."""
    of_mesh = mesh_of_one_pipeline_rank
    wrap = sharded(mesh_of=lambda: of_mesh()["replicate", "shard"], reshard_after_forward=True)
    for make, policy in (
        (functools.partial(model.make_parts, block=Adapted, count=2), zbpipe.policy()),
        (functools.partial(model.make_parts, block=Adapted, count=2), zbpipe.policy(defer="all")),
        (functools.partial(model.make_parts, block=Checkpointed, count=2), zbpipe.policy(checkpoint="recompute")),
        (functools.partial(model.make_parts, count=2), zbpipe.policy()),
    ):
        training = Training(schedule, of_mesh(), wrap, parts=make(), reference=make())
        training.schedule = with_late_weight_passes(training.stages)
        with policy:
            events = training.run(replica_in(of_mesh()), replicas=4)
        assert [scatters for _, scatters in counts(events)] == [4, 4]
        assert all(unsharded_bytes(module) == 0 for module in training.modules.values())
    for log in events:  # the last model's: its W reads no weight
        for stage, _, inner in log.within("W"):
            assert stage == 0 or set(inner) <= {"product"}, inner


def on_two_dimensions(schedule):
    """Each gradient is scattered over one dimension of the mesh and summed over the other, once."""
    of_mesh = mesh_of_one_pipeline_rank
    wrap = sharded(mesh_of=lambda: of_mesh()["replicate", "shard"], reshard_after_forward=False)
    make = functools.partial(model.make_parts, count=2)
    events = as_unsplit(schedule, wrap, replicas=4, make=make, on=of_mesh)
    assert counts(events) == [(4 + 4 * TO_LEARN, 4), (4, 4)], counts(events)
    assert [log.collectives()["allreduce_"] for log in events] == [4, 4]


def replicated(schedule):
    def wrap(part):
        replicate(part.mixer, mesh=mesh()["dp"])
        return replicate(part, mesh=mesh()["dp"])

    _, *later = as_unsplit(schedule, wrap)  # in the first one stages of torch 2.15 vote on how they learn their shapes
    for log in later:
        assert log.collectives() == {"allreduce_": 4}, log.collectives()


def frees_as_unsplit(schedule):
    """After each forward and each I: as many bytes of unsharded weights as with whole backwards."""
    for reshard_after_forward in (False, True):
        seen = []
        for unsplit in (False, True):
            training = Training(schedule, mesh(), sharded(reshard_after_forward=reshard_after_forward), unsplit=unsplit)
            training.step(0, replica_in(mesh()), patched=not unsplit)
            watched = watch_memory(training)
            training.step(1, replica_in(mesh()), patched=not unsplit)
            seen.append([entry for entry in watched if entry[:2] != ("backward_one_chunk", 0)])
        different = [(split, unsplit) for split, unsplit in zip(*seen, strict=True) if split != unsplit]
        assert not different, (reshard_after_forward, different)
        assert max(entry[-1] for entry in seen[0]) > 0


def borrowed(schedule):
    for reduce_dtype, rtol in ((None, 1e-12), (torch.float32, 1e-3)):  # sums are rounded to it
        wrap = sharded(reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        check_borrowing(schedule, mesh(), wrap, replica_in(mesh()), rtol=rtol, atol=rtol)


CASES = cases_of(
    [
        stays_unsharded,
        not_nested,
        mixed,
        mixed_and_reshards,
        checkpointed,
        recomputed,
        convolution,
        on_two_dimensions,
        replicated,
        frees_as_unsplit,
        borrowed,
    ]
)
# Whether another forward runs between I and W, which frees the weights, is the schedule's.
CASES.update({f"reshards-{name}": ("fast", functools.partial(reshards, name)) for name in ZERO_BUBBLE})
CASES["late_weight_passes"] = ("fast", functools.partial(late_weight_passes, "InterleavedZeroBubble"))
