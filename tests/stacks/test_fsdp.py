"""Stages that fully_shard has sharded, under the zero-bubble schedules: gradients, collectives, memory of the weights.

Two pipeline ranks of two shards, and two stages of one process on a 2x2 mesh.
"""

import functools

import pytest
import torch
from support.blocks import ZERO_BUBBLE
from support.pipelines import Case, by_lane, ranks_of, watch
from support.stacks import model
from support.stacks.events import SCATTERS
from support.stacks.training import (
    Training,
    as_unsplit,
    cases_of,
    check_borrowing,
    compiled,
    mesh,
    run_weight_passes_late,
    unsharded_bytes,
    watching_compiled,
)
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import zbpipe

GATHERS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_")


class Checkpointed(model.Block):
    def forward(self, x):
        return x + checkpoint(self.mixer, self.norm(x), use_reentrant=False)


on = functools.partial(mesh, "pp", "dp")
alone = functools.partial(mesh, "pp", "replicate", "shard")


def of(block, **options):
    return functools.partial(model.make_parts, block, **options)


def sharded(nested=True, over=lambda: on()["dp"], **options):
    def wrap(part):
        for module in (part.mixer, part) if nested else (part,):
            fully_shard(module, mesh=over(), **options)
        return part

    return wrap


def on_both_dimensions(**options):
    return sharded(over=lambda: alone()["replicate", "shard"], **options)


STAYS, RESHARDS = ({"reshard_after_forward": reshards} for reshards in (False, True))


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
    events = as_unsplit(schedule, on(), sharded(**STAYS))
    assert counts(events) == [(4 + 4 * TO_LEARN, 4), (4, 4)], counts(events)


def reshards(schedule):
    """The weights of the stage are not there when another forward has run between I and W."""
    events = as_unsplit(schedule, on(), sharded(**RESHARDS))
    assert [scatters for _, scatters in counts(events)] == [4, 4]
    assert counts(events)[1][0] > 4


def not_nested(schedule):
    events = as_unsplit(schedule, on(), sharded(nested=False))
    assert counts(events) == [(2 + 2 * TO_LEARN, 2), (2, 2)], counts(events)


def mixed(schedule, **options):
    """Computes in bfloat16, sums the microbatches' gradients and reduces in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    given = {"make": of(model.Block, dtype=torch.float32), "compute_dtype": torch.bfloat16}
    wrap = sharded(mp_policy=policy, **(options or STAYS))
    as_unsplit(schedule, on(), wrap, tolerances={"rtol": 1e-5, "atol": 1e-5}, **given)


def mixed_and_reshards(schedule):
    mixed(schedule, **RESHARDS)


def checkpointed(schedule):
    as_unsplit(schedule, on(), sharded(**RESHARDS), make=of(Checkpointed))


def recomputed(schedule):
    """W runs the checkpointed forward again, hooks of fully_shard and all."""
    training = Training(schedule, on(), sharded(**RESHARDS), of(Checkpointed))
    with zbpipe.policy(checkpoint="recompute"):
        events = training.run()
    assert [scatters for _, scatters in counts(events)] == [4, 4]
    assert all(unsharded_bytes(module) == 0 for module in training.modules)


def convolution(schedule):
    as_unsplit(schedule, on(), sharded(**RESHARDS), make=of(model.Convolution))


def late_weight_passes(schedule):
    """Another forward has freed the weights, which W reads: they are gathered for it, and given back."""
    for block, policy in (
        (model.Adapted, {}),
        (model.Adapted, {"defer": "all"}),
        (Checkpointed, {"checkpoint": "recompute"}),
        (model.Block, {}),
    ):
        training = Training(schedule, alone(), on_both_dimensions(**RESHARDS), of(block))
        run_weight_passes_late(training)
        with zbpipe.policy(**policy):
            events = training.run()
        assert [scatters for _, scatters in counts(events)] == [4, 4]
        assert all(unsharded_bytes(module) == 0 for module in training.modules)
    for log in events:  # the last model's: its W reads no weight
        for stage, _, inner in log.within("W"):
            assert stage == 0 or set(inner) <= {"product"}, inner


def on_two_dimensions(schedule):
    """Each gradient is scattered over one dimension of the mesh and summed over the other, once."""
    events = as_unsplit(schedule, alone(), on_both_dimensions(**STAYS))
    assert counts(events) == [(4 + 4 * TO_LEARN, 4), (4, 4)], counts(events)
    assert [log.collectives()["allreduce_"] for log in events] == [4, 4]


def replicated(schedule):
    def wrap(part):
        replicate(part.mixer, mesh=on()["dp"])
        return replicate(part, mesh=on()["dp"])

    _, *later = as_unsplit(schedule, on(), wrap)  # in the first one stages of torch 2.15 vote on how they learn shapes
    for log in later:
        assert log.collectives() == {"allreduce_": 4}, log.collectives()


def frees_as_unsplit(schedule):
    """After each forward and each I: as many bytes of unsharded weights as with whole backwards."""
    for options in (STAYS, RESHARDS):
        seen = {}
        for unsplit in (False, True):
            training = Training(schedule, on(), sharded(**options), unsplit=unsplit)
            training.step(0, patched=not unsplit)
            seen[unsplit] = watch_memory(training)
            training.step(1, patched=not unsplit)
        different = [(split, whole) for split, whole in zip(*seen.values(), strict=True) if split != whole]
        assert not different, (options, different)
        assert max(entry[-1] for entry in seen[False]) > 0


def watch_memory(training):
    """What a stage's unsharded weights take after each of its forwards, and after each I or whole backward; of the first stage,
    whose I does nothing, after its forwards alone."""
    seen = []

    def around(stage, action, run):
        result = run()
        if action[1] == "F" or (action[1] in "IB" and not stage.is_first):
            seen.append((action.replace("I", "B"), unsharded_bytes(stage.submod)))
        return result

    for stage in training.stages:
        watch(stage, functools.partial(around, stage))
    return seen


def borrowed(schedule):
    for reduce_dtype, rtol in ((None, 1e-12), (torch.float32, 1e-3)):  # sums are rounded to it
        wrap = sharded(**STAYS, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        check_borrowing(schedule, on(), wrap, rtol=rtol, atol=rtol)


def of_compiled(schedule):
    def wrap(part):
        compiled(part.mixer)
        return sharded()(part)

    with watching_compiled() as watch:
        Training(schedule, on(), wrap).run()
    assert watch.calls > 0
    assert watch.not_split == []


CASES = cases_of(
    *(stays_unsharded, not_nested, mixed, mixed_and_reshards, checkpointed, recomputed, convolution),
    *(on_two_dimensions, replicated, frees_as_unsplit, borrowed, of_compiled),
)
# Whether another forward runs between I and W, which frees the weights, is the schedule's.
CASES |= {f"reshards-{name}": Case(functools.partial(reshards, name), module="torch") for name in ZERO_BUBBLE}
CASES["late_weight_passes"] = Case(functools.partial(late_weight_passes, ZERO_BUBBLE[0]), module="torch")
ranks = ranks_of(__file__, CASES, world=4)


@pytest.mark.dist
@pytest.mark.parametrize("case", by_lane(CASES))
def test_gradients_and_collectives(case, ranks):
    ranks(case)
