"""Stages with DTensor weights under the zero-bubble schedules: gradients, collectives, products in place.

The weights are sharded over two ranks, in a pipeline of two: tensor and sequence parallel.
"""

import functools
import itertools

import pytest
import torch
from support.pipelines import Case, by_lane, ranks_of
from support.stacks import model
from support.stacks.events import Events
from support.stacks.training import Training, as_unsplit, cases_of, compiled, mesh, watching_compiled
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zbpipe

SEQUENCE = (4,)
KNOWS_DTENSORS = torch.__version__ >= (2, 12)  # a stage, as what it sends and receives
on = functools.partial(mesh, "pp", "tp")
sharded = functools.partial(mesh, "pp", "dp", "tp")


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(model.WIDTH, 2 * model.WIDTH)
        self.gate = nn.Linear(model.WIDTH, 2 * model.WIDTH, bias=False)
        self.down = nn.Linear(2 * model.WIDTH, model.WIDTH)

    def forward(self, x):
        return self.down(self.up(x).tanh() * self.gate(x))


class Block(model.Block):
    def __init__(self):
        super().__init__()
        self.mixer = Mixer()


def tensor_parallel(part, over=on):
    """Plain tensors, the same on both ranks, between the stages and around the mixer."""
    plan = {"mixer.up": ColwiseParallel(), "mixer.gate": ColwiseParallel(), "mixer.down": RowwiseParallel()}
    return parallelize_module(part, over()["tp"], plan)


def sequence_parallel(part):
    """DTensors between the stages, sharded over the sequence; the norm works on its shard."""
    plan = {
        "norm": SequenceParallel(sequence_dim=1),
        "mixer": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mixer.up": ColwiseParallel(use_local_output=False),
        "mixer.gate": ColwiseParallel(use_local_output=False),
        "mixer.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return parallelize_module(part, on()["tp"], plan)


def local_sequence_parallel(part):
    """Each rank's part of the sequence, as a plain tensor, between the stages."""
    plan = {
        "": PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Shard(1),
            output_layouts=Shard(1),
            desired_output_layouts=Shard(1),
        )
    }
    return parallelize_module(sequence_parallel(part), on()["tp"], plan)


def collectives(schedule, wrap, over=on, **options):
    """How often each ran in each step."""
    given = {"get_mesh": lambda names, layout: over()["tp"]} if KNOWS_DTENSORS else {}
    make = functools.partial(model.make_parts, Block)
    events = as_unsplit(schedule, over(), wrap, products=3, make=make, sequence=SEQUENCE, **given, **options)
    return [log.collectives() for log in events]


BACKWARDS = 2 * model.MICROBATCHES  # of two stages a step; as many forwards


def tensor(schedule):
    # Forward: the mixer's output. Backward: what `up` and `gate` each give to their input.
    assert collectives(schedule, tensor_parallel)[1] == {"all_reduce": 3 * BACKWARDS}


def sharded_sequence(x):
    return distribute_tensor(x, on()["tp"], [Shard(1)])


AROUND_SEQUENCES = {"all_gather_into_tensor": 2 * BACKWARDS, "reduce_scatter_tensor": 2 * BACKWARDS}


def sequence(schedule):
    _, second = collectives(schedule, sequence_parallel, prepare=sharded_sequence)
    last = 1 if schedule == "ScheduleInterleavedZeroBubble" else 0  # the pipeline rank of the last stage
    losses = {"all_reduce": model.MICROBATCHES} if on()["pp"].get_local_rank() == last else {}  # sums over the shards
    assert second == {**AROUND_SEQUENCES, **losses}


def local_sequence(schedule):
    steps = collectives(schedule, local_sequence_parallel, prepare=lambda x: sharded_sequence(x).to_local())
    assert steps[1] == AROUND_SEQUENCES


def of_compiled(schedule):
    """The compiled code runs whole, and says so."""
    with watching_compiled() as watch:
        make = functools.partial(model.make_parts, Block)
        Training(schedule, on(), lambda part: compiled(tensor_parallel(part)), make, sequence=SEQUENCE).run()
    assert watch.calls == 0
    assert watch.not_split
    assert all("it takes tensors of the subclass DTensor" in line for line in watch.not_split)


def tensor_and_sharded(schedule):
    """Weights that are DTensors and that fully_shard shards once more."""

    def wrap(part):
        tensor_parallel(part, sharded)
        for module in (part.mixer, part):
            fully_shard(module, mesh=sharded()["dp"], reshard_after_forward=True)
        return part

    assert collectives(schedule, wrap, sharded)[1]["_reduce_scatter_base_"] == 4


# How the factors of a product lie on one dimension of a mesh, and on two: all, and as many that they meet on each.
PAIRS = [*itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2)]
PAIRS_OF_PAIRS = [*itertools.product(PAIRS, repeat=2)]
SOME_OF_THEM = [(pair, PAIRS[(number + ahead) % len(PAIRS)]) for number, pair in enumerate(PAIRS) for ahead in (0, 4)]


def every_layout(over, layouts):
    """Gradients of a product of two DTensors, however they lie on the mesh; the second time there is a gradient to add to.
    No collective but an ordinary backward's."""
    over = over()
    torch.manual_seed(0)
    x, w = torch.randn(8, 4, dtype=torch.float64), torch.randn(4, 12, dtype=torch.float64)
    grad = torch.randn(8, 12, dtype=torch.float64)
    for x_lies, w_lies in (zip(*pairs, strict=True) for pairs in layouts):
        seen = []
        for split in (True, False):
            leaf = distribute_tensor(x, over, x_lies).requires_grad_()
            weight = nn.Parameter(distribute_tensor(w, over, w_lies))
            with Events() as events:
                for _ in range(2):
                    out = torch.matmul(leaf, weight)
                    everywhere = distribute_tensor(grad, over, [Replicate()] * over.ndim)
                    out_grad = everywhere.redistribute(over, plain(out.placements))
                    if split:
                        _, groups = zbpipe.stage_backward_input([out], [out_grad], [leaf], [weight])
                        zbpipe.stage_backward_weight([weight], groups)
                    else:
                        out.backward(out_grad)
            seen.append((events.collectives(), weight.grad.placements))
            torch.testing.assert_close(weight.grad.full_tensor(), 2 * x.T @ grad)
            torch.testing.assert_close(leaf.grad.full_tensor(), 2 * grad @ w.T)
        assert seen[0] == seen[1], (x_lies, w_lies, seen)


def plain(placements):
    """An output that is a sum over ranks has a gradient that is the same on all."""
    return [Replicate() if placement.is_partial() else placement for placement in placements]


def layouts(over, layouts, lane="fast"):
    return Case(functools.partial(every_layout, over, layouts), lane, "torch")


CASES = {
    "every_layout": layouts(lambda: on()["tp"], [(pair,) for pair in PAIRS]),
    "some_layouts-two_dimensions": layouts(on, SOME_OF_THEM),
    "every_layout-two_dimensions": layouts(on, PAIRS_OF_PAIRS, "long"),
    **cases_of(tensor, *([sequence] if KNOWS_DTENSORS else []), local_sequence, tensor_and_sharded, of_compiled),
}
ranks = ranks_of(__file__, CASES, world=4)


@pytest.mark.dist
@pytest.mark.parametrize("case", by_lane(CASES))
def test_gradients_and_collectives(case, ranks):
    ranks(case)
