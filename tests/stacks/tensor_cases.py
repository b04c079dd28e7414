"""Stages whose weights are DTensors, sharded over two ranks, in a pipeline of two: tensor and sequence parallel."""

import functools
import itertools

import torch
from support.stacks import model
from support.stacks.events import Events
from support.stacks.training import Training, cases_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
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


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(model.WIDTH, 2 * model.WIDTH)
        self.gate = nn.Linear(model.WIDTH, 2 * model.WIDTH, bias=False)
        self.down = nn.Linear(2 * model.WIDTH, model.WIDTH)

    def forward(self, x):
        return self.down(self.up(x).tanh() * self.gate(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(model.WIDTH)
        self.mixer = Mixer()

    def forward(self, x):
        return x + self.mixer(self.norm(x))


@functools.cache
def mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))


def tensor_parallel(part):
    """Plain tensors, the same on both ranks, between the stages and around the mixer."""
    plan = {"mixer.up": ColwiseParallel(), "mixer.gate": ColwiseParallel(), "mixer.down": RowwiseParallel()}
    return parallelize_module(part, mesh()["tp"], plan)


def sequence_parallel(part):
    """DTensors between the stages, sharded over the sequence; the norm works on its shard."""
    plan = {
        "norm": SequenceParallel(sequence_dim=1),
        "mixer": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mixer.up": ColwiseParallel(use_local_output=False),
        "mixer.gate": ColwiseParallel(use_local_output=False),
        "mixer.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return parallelize_module(part, mesh()["tp"], plan)


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
    return parallelize_module(sequence_parallel(part), mesh()["tp"], plan)


def as_unsplit(schedule, wrap, on=mesh, replicas=1, **arguments):
    """Gradients right, and the collectives of the same schedule whose backwards are not split, on torch's own module.
    Returns how often each ran in each step, and asserts that none ran in W."""
    prepare = arguments.pop("prepare", lambda x: x)
    count = 2 * on()["pp"].size()
    replica = on()["dp"].get_local_rank() if replicas > 1 else 0
    runs = []
    for patched in (True, False):
        training = Training(
            schedule,
            on(),
            wrap,
            parts=model.make_parts(Block, count=count),
            reference=model.make_parts(Block, count=count),
            unsplit=not patched,
            sequence=SEQUENCE,
            **({"get_mesh": lambda names, layout: on()["tp"]} if KNOWS_DTENSORS else {}),
        )
        runs.append(training.run(replica, replicas, patched, prepare=prepare))
    split, unsplit = runs
    for log, expected in zip(split, unsplit, strict=True):
        assert log.collectives() == expected.collectives(), (log.collectives(), expected.collectives())
        for stage, microbatch, inner in log.within("W"):
            # Stage 0's W is its whole backward. Of the others', each block has three products.
            assert stage == 0 or inner == ["product"] * inner.count("product"), (stage, microbatch, inner)
            assert inner.count("product") >= 3
    return [log.collectives() for log in split]


BACKWARDS = 2 * model.MICROBATCHES  # of two stages a step; as many forwards


def tensor(schedule):
    # Forward: the mixer's output. Backward: what `up` and `gate` each give to their input.
    steps = as_unsplit(schedule, tensor_parallel)
    assert steps[1] == {"all_reduce": 3 * BACKWARDS}


def sharded_sequence(x):
    return distribute_tensor(x, mesh()["tp"], [Shard(1)])


def sequence(schedule):
    steps = as_unsplit(schedule, sequence_parallel, prepare=sharded_sequence)
    losses = model.MICROBATCHES if mesh()["pp"].get_local_rank() == training_last(schedule) else 0
    expected = {"all_gather_into_tensor": 2 * BACKWARDS, "reduce_scatter_tensor": 2 * BACKWARDS}
    assert steps[1] == {**expected, **({"all_reduce": losses} if losses else {})}


def training_last(schedule):
    """The pipeline rank of the last stage, which computes the losses: sums over the shards."""
    return 1 if schedule == "InterleavedZeroBubble" else 0


def local_sequence(schedule):
    steps = as_unsplit(schedule, local_sequence_parallel, prepare=lambda x: sharded_sequence(x).to_local())
    assert steps[1] == {"all_gather_into_tensor": 2 * BACKWARDS, "reduce_scatter_tensor": 2 * BACKWARDS}


@functools.cache
def mesh_of_one_pipeline_rank():
    return init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


def tensor_and_sharded(schedule):
    """Weights that are DTensors and that fully_shard shards once more."""
    on = mesh_of_one_pipeline_rank

    def wrap(part):
        plan = {"mixer.up": ColwiseParallel(), "mixer.gate": ColwiseParallel(), "mixer.down": RowwiseParallel()}
        parallelize_module(part, on()["tp"], plan)
        for module in (part.mixer, part):
            fully_shard(module, mesh=on()["dp"], reshard_after_forward=True)
        return part

    steps = as_unsplit(schedule, wrap, on=on, replicas=2)
    assert steps[1]["_reduce_scatter_base_"] == 4


# How the factors of a product lie on one dimension of a mesh, and on two: all, and as many that they meet on each.
PAIRS = [*itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2)]
PAIRS_OF_PAIRS = [*itertools.product(PAIRS, repeat=2)]
SOME_OF_THEM = [(pair, PAIRS[(number + ahead) % len(PAIRS)]) for number, pair in enumerate(PAIRS) for ahead in (0, 4)]


def every_layout(on, layouts):
    """Gradients of a product of two DTensors, however they lie on the mesh; the second time there is a gradient to add to.
    No collective but an ordinary backward's."""
    on = on()
    torch.manual_seed(0)
    x, w = torch.randn(8, 4, dtype=torch.float64), torch.randn(4, 12, dtype=torch.float64)
    grad = torch.randn(8, 12, dtype=torch.float64)
    for x_lies, w_lies in (zip(*pairs, strict=True) for pairs in layouts):
        seen = []
        for split in (True, False):
            leaf = distribute_tensor(x, on, x_lies).requires_grad_()
            weight = nn.Parameter(distribute_tensor(w, on, w_lies))
            with Events() as events:
                for _ in range(2):
                    out = torch.matmul(leaf, weight)
                    out_grad = distribute_tensor(grad, on, [Replicate()] * on.ndim).redistribute(
                        on, plain(out.placements)
                    )
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


CASES = {
    "every_layout": ("fast", lambda: every_layout(lambda: mesh()["tp"], [(pair,) for pair in PAIRS])),
    "some_layouts-two_dimensions": ("fast", lambda: every_layout(mesh, SOME_OF_THEM)),
    "every_layout-two_dimensions": ("long", lambda: every_layout(mesh, PAIRS_OF_PAIRS)),
    **cases_of([tensor, sequence, local_sequence, tensor_and_sharded]),
}
if not KNOWS_DTENSORS:
    CASES.update(
        {
            name: ("torch 2.11's stages send no DTensors", case)
            for name, (_, case) in CASES.items()
            if name.startswith("sequence")
        }
    )
