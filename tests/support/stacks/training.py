"""Trains a pipelined and otherwise parallel model two steps, beside a reference that is neither."""

import contextlib
import functools
import math

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor

import zbpipe
from support.blocks import ZERO_BUBBLE
from support.pipelines import Case, Pipeline, in_turn, named, places, unwatch
from support.stacks import model
from support.stacks.events import Events


def cases_of(*functions):
    """CASES of `functions` of a schedule's name."""
    return {
        f"{function.__name__}-{schedule}": Case(
            functools.partial(function, schedule), in_turn(number, schedule), "torch"
        )
        for number, function in enumerate(functions)
        for schedule in ZERO_BUBBLE
    }


@functools.cache
def mesh(*names):
    """Of four ranks: two pipeline ranks by two of another kind, or one by two by two."""
    others = len(names) - 1
    return init_device_mesh("cpu", (4 >> others, *[2] * others), mesh_dim_names=names)


class Training(Pipeline):
    """A schedule with its stages on this rank, an optimizer, and the reference.

    on: a mesh with a dimension "pp". Over the others, but "tp", are replicas, whatever else is sharded over them.
    wrap: from a stage's block to the module of the stage; what it shards it shards in place.
    make: from a number to blocks, with the same numbers in every process.
    sequence: the inputs' shape between batch and width.
    unsplit: the schedule's order of actions, with whole backwards in the place of I, and no W.
    sends: how many may be under way, of torch 2.15's schedules, which then free sent outputs before their backward.
    """

    def __init__(
        self,
        name,
        on,
        wrap,
        make=model.make_parts,
        unsplit=False,
        sequence=(),
        release_outputs=None,
        sends=None,
        compute_dtype=None,
        **given,
    ):
        self.sequence, self.release_outputs, self.compute_dtype = sequence, release_outputs, compute_dtype
        count = 2 * on["pp"].size()
        super().__init__(name, make(count=count), wrap, lambda i: given, group=on["pp"].get_group())
        limits = {} if sends is None else {"max_outstanding_sends": sends}
        self.start(model.loss_function, model.MICROBATCHES, **limits)
        if unsplit:
            orders = self.schedule.pipeline_order.items()
            run_orders(self, {rank: [a for action in row for a in whole_backwards(action)] for rank, row in orders})
        self.reference = make(count=count)
        self.modules = [stage.submod for stage in self.stages]
        of = (
            [weight for module in self.modules for weight in module.parameters()],
            torch.nn.ModuleList(self.reference).parameters(),
        )
        self.optimizers = [torch.optim.SGD(weights, lr=model.LEARNING_RATE) for weights in of]
        replicas = [on[dim] for dim in on.mesh_dim_names if dim not in ("pp", "tp")]
        self.replicas = math.prod(dim.size() for dim in replicas)
        self.replica = functools.reduce(lambda n, dim: n * dim.size() + dim.get_local_rank(), replicas, 0)

    def step(self, step, patched=True, prepare=lambda x: x):
        """One step, without the optimizer's. Returns its events."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        dtype = next(self.reference[0].parameters()).dtype
        args, keywords = self.given(*map(prepare, model.batch(step, self.replica, dtype, self.sequence)), None)
        with zbpipe.patch(self.release_outputs) if patched else contextlib.nullcontext(), Events() as events:
            for stage in self.stages:
                events.watch(stage)
            self.schedule.step(*args, **keywords)
            for stage in self.stages:
                unwatch(stage)
        return events

    def run_reference(self, step):
        model.run_reference(self.reference, step, self.replicas, self.compute_dtype, self.sequence)

    def check(self, step, **tolerances):
        """Every weight's gradient is the reference's."""
        expected = {i: self.reference[i] for i in self.mine}
        wanted, got = ({name: whole(w.grad) for name, w in named(parts).items()} for parts in (expected, self.parts))
        assert got.keys() == wanted.keys()
        for name, grad in wanted.items():
            torch.testing.assert_close(got[name], grad, msg=lambda m, n=name: f"step {step}, {n}: {m}", **tolerances)

    def optimize(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def run(self, patched=True, steps=model.STEPS, prepare=lambda x: x, **tolerances):
        """Steps with an optimizer between, checked after each. Returns the steps' events."""
        events = []
        for step in range(steps):
            events.append(self.step(step, patched, prepare))
            self.run_reference(step)
            self.check(step, **tolerances)
            self.optimize()
        return events


def as_unsplit(schedule, on, wrap, products=2, prepare=lambda x: x, tolerances=None, **arguments):
    """Gradients right, and the collectives of the same schedule whose backwards are not split, on torch's own module; in W none,
    and in a stage's at least so many `products`."""
    runs = []
    for patched in (True, False):
        training = Training(schedule, on, wrap, unsplit=not patched, **arguments)
        runs.append(training.run(patched, prepare=prepare, **(tolerances or {})))
        assert all(unsharded_bytes(module) == 0 for module in training.modules)
    split, unsplit = runs
    for log, expected in zip(split, unsplit, strict=True):
        assert log.collectives() == expected.collectives(), (log.collectives(), expected.collectives())
        for stage, microbatch, inner in log.within("W"):  # stage 0's W is its whole backward
            assert stage == 0 or set(inner) == {"product"}, (stage, microbatch, inner)
            assert inner.count("product") >= products
    return split


def compiled(module):
    """In place, so that its parameters keep their names, and before anything is wrapped around it."""
    from zbpipe._compile import Backend  # as Watch

    module.compile(backend=Backend("aot_eager"), dynamic=False)
    return module


@contextlib.contextmanager
def watching_compiled():
    from support.compiled import Watch  # with dynamo, which most cases need not

    # Dynamo takes a compiled module in DDP apart at DDP's buckets, the first of which is larger than these whole modules.
    first_bucket = torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1
    try:
        with Watch() as watch:
            yield watch
    finally:
        torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = first_bucket


def whole(grad):
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def local(weight):
    return weight.to_local() if isinstance(weight, DTensor) else weight


def unsharded_bytes(stage_module):
    return sum(
        local(param._unsharded_param).untyped_storage().size()
        for module in stage_module.modules()
        if isinstance(module, FSDPModule)
        for group in fsdp_groups(module._get_fsdp_state())
        for param in group.fsdp_params
        if hasattr(param, "_unsharded_param")
    )


def fsdp_groups(state):
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups if groups is not None else [state._fsdp_param_group]


def run_orders(training, orders):
    training.schedule = schedules._PipelineScheduleRuntime(
        training.stages, model.MICROBATCHES, loss_fn=model.loss_function, scale_grads=False
    )
    training.schedule._prepare_schedule_with_comms(orders)


def run_weight_passes_late(training):
    """On one pipeline rank: the next microbatch's forward comes between each I and its W."""
    order, stages = [], range(len(training.stages))
    for microbatch in range(model.MICROBATCHES):
        order += [f"{i}F{microbatch}" for i in stages]
        order += [f"{i}W{microbatch - 1}" for i in reversed(stages) if microbatch]
        order += [f"{i}I{microbatch}" for i in reversed(stages)]
    order += [f"{i}W{model.MICROBATCHES - 1}" for i in reversed(stages)]
    run_orders(training, {0: [schedules._Action.from_str(action) for action in order]})


class Borrower(model.Block):
    """May use a weight of another stage of its rank, which it does not list."""

    owner = (None,)

    def forward(self, x):
        y = super().forward(x)
        (owner,) = self.owner
        return y if owner is None else y + (x @ owner.mixer.extra.t()).tanh() @ owner.mixer.extra


def check_borrowing(name, on, wrap, **tolerances):
    """One weight that both stages of a rank use: gradients are those of whole backwards, which the same data parallelism
    reduces."""
    steps = []

    def make(count):
        parts = model.make_parts(Borrower, count=count)
        earlier, later = sorted(places(name, count, on["pp"].get_group()))
        parts[later].owner = (parts[earlier],)
        return parts

    for unsplit in (False, True):
        training = Training(name, on, wrap, make, unsplit)
        for step in range(model.STEPS):
            training.step(step)
            steps.append({name: whole(w.grad).clone() for name, w in named(training.parts).items()})
            training.optimize()
    torch.testing.assert_close(steps[: model.STEPS], steps[model.STEPS :], **tolerances)
    assert steps[0][f"{min(training.mine)}.mixer.extra"].ne(0).all()


def whole_backwards(action):
    kinds = schedules._ComputationType
    if action is None:
        return [None]
    if action.computation_type == kinds.OVERLAP_F_B:
        return [part for sub in action.sub_actions for part in whole_backwards(sub)]
    if action.computation_type == kinds.BACKWARD_WEIGHT:
        return []
    if action.computation_type == kinds.BACKWARD_INPUT:
        return [schedules._Action(action.stage_index, kinds.FULL_BACKWARD, action.microbatch_index)]
    return [action]
