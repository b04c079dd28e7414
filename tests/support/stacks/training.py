"""Trains a pipelined and otherwise parallel model two steps, beside a reference that is neither."""

import contextlib
import functools

import torch
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor

import zbpipe
from support.stacks import model
from support.stacks.events import Events

ZERO_BUBBLE = ("ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV")


def cases_of(functions):
    """CASES of `functions` of a schedule's name: each is fast on one schedule, these in turn, and long on the others."""
    return {
        f"{function.__name__}-{schedule}": (
            "fast" if number % len(ZERO_BUBBLE) == of else "long",
            functools.partial(function, schedule),
        )
        for number, function in enumerate(functions)
        for of, schedule in enumerate(ZERO_BUBBLE)
    }


def stages_of(name, pipeline_rank, pipeline_size):
    """Two of a rank."""
    if name in ("ZBVZeroBubble", "DualPipeV"):
        return [pipeline_rank, 2 * pipeline_size - 1 - pipeline_rank]
    return [pipeline_rank, pipeline_rank + pipeline_size]


class Training:
    """A schedule with its stages on this rank, an optimizer, and the reference.

    mesh: has a dimension "pp".
    wrap: from a stage's block to the module of the stage; what it shards it shards in place.
    sequence: the inputs' shape between batch and width.
    unsplit: the schedule's order of actions, with whole backwards in the place of I, and no W.
    sends: how many may be under way, of torch 2.15's schedules, which then free sent outputs before their backward.
    """

    def __init__(
        self,
        name,
        mesh,
        wrap,
        parts=None,
        reference=None,
        unsplit=False,
        sequence=(),
        release_outputs=None,
        sends=None,
        **stage_arguments,
    ):
        self.sequence = sequence
        self.release_outputs = release_outputs
        pipeline = mesh["pp"]
        self.mine = stages_of(name, pipeline.get_local_rank(), pipeline.size())
        count = 2 * pipeline.size()
        self.parts = model.make_parts(count=count) if parts is None else parts
        self.reference = model.make_parts(count=count) if reference is None else reference
        self.modules = {i: wrap(self.parts[i]) for i in self.mine}
        self.stages = [
            PipelineStage(
                self.modules[i],
                i,
                count,
                torch.device("cpu"),
                group=pipeline.get_group(),
                **stage_arguments,
            )
            for i in self.mine
        ]
        schedule = getattr(schedules, f"Schedule{name}")
        limits = {} if sends is None else {"max_outstanding_sends": sends}
        self.schedule = schedule(
            self.stages, model.MICROBATCHES, loss_fn=model.loss_function, scale_grads=False, **limits
        )
        if unsplit:
            self.schedule = without_split(self.schedule, self.stages)
        weights = [weight for i in self.mine for weight in self.modules[i].parameters()]
        self.optimizer = torch.optim.SGD(weights, lr=model.LEARNING_RATE)
        self.reference_optimizer = torch.optim.SGD(
            [weight for part in self.reference for weight in part.parameters()], lr=model.LEARNING_RATE
        )

    def step(self, step, replica, patched=True, prepare=lambda x: x):
        """One step, without the optimizer's. Returns its events."""
        self.optimizer.zero_grad()
        self.reference_optimizer.zero_grad()
        dtype = next(self.reference[0].parameters()).dtype
        x, target = model.batch(step, replica, dtype, self.sequence)
        args = [prepare(x)] if 0 in self.mine else []
        kwargs = {"target": prepare(target)} if len(self.parts) - 1 in self.mine else {}
        with zbpipe.patch(self.release_outputs) if patched else contextlib.nullcontext():
            events = Events()
            for stage in self.stages:
                events.watch(stage)
            with events:
                self.schedule.step(*args, **kwargs)
            for stage in self.stages:
                for hidden in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                    vars(stage).pop(hidden)
        return events

    def check(self, step, **tolerances):
        """Every weight's gradient is the reference's."""
        for i in self.mine:
            expected = {name: weight.grad for name, weight in self.reference[i].named_parameters()}
            got = {name: whole(weight.grad) for name, weight in self.parts[i].named_parameters()}
            assert got.keys() == expected.keys()
            for name, grad in expected.items():
                torch.testing.assert_close(
                    got[name], grad, msg=lambda m, n=f"stage {i}, {name}": f"step {step}, {n}: {m}", **tolerances
                )

    def optimize(self):
        self.optimizer.step()
        self.reference_optimizer.step()

    def run(
        self,
        replica,
        replicas=model.REPLICAS,
        patched=True,
        steps=model.STEPS,
        prepare=lambda x: x,
        compute_dtype=None,
        **tolerances,
    ):
        """Steps with an optimizer between, checked after each. Returns the steps' events."""
        events = []
        for step in range(steps):
            events.append(self.step(step, replica, patched, prepare))
            model.run_reference(self.reference, step, replicas, compute_dtype, self.sequence)
            self.check(step, **tolerances)
            self.optimize()
        return events


def whole(grad):
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def with_late_weight_passes(stages):
    """A schedule of one pipeline rank, in which the next microbatch's forward comes between each I and its W."""
    order = []
    for microbatch in range(model.MICROBATCHES):
        order += [f"{i}F{microbatch}" for i in range(len(stages))]
        if microbatch:
            order += [f"{i}W{microbatch - 1}" for i in reversed(range(len(stages)))]
        order += [f"{i}I{microbatch}" for i in reversed(range(len(stages)))]
    order += [f"{i}W{model.MICROBATCHES - 1}" for i in reversed(range(len(stages)))]
    runtime = schedules._PipelineScheduleRuntime(
        stages, model.MICROBATCHES, loss_fn=model.loss_function, scale_grads=False
    )
    runtime._prepare_schedule_with_comms({0: [schedules._Action.from_str(action) for action in order]})
    return runtime


class Borrower(model.Block):
    """May use a weight of another stage of its rank, which it does not list."""

    owner = (None,)

    def forward(self, x):
        y = super().forward(x)
        (owner,) = self.owner
        return y if owner is None else y + (x @ owner.mixer.extra.t()).tanh() @ owner.mixer.extra


def check_borrowing(name, mesh, wrap, replica, **tolerances):
    """One weight that both stages of a rank use: gradients are those of whole backwards, which the same data parallelism
    reduces."""
    earlier, later = sorted(stages_of(name, mesh["pp"].get_local_rank(), mesh["pp"].size()))
    steps = []
    for unsplit in (False, True):
        parts = model.make_parts(Borrower)
        parts[later].owner = (parts[earlier],)
        training = Training(name, mesh, wrap, parts=parts, unsplit=unsplit)
        for step in range(model.STEPS):
            training.step(step, replica)
            steps.append(
                {f"{i}.{n}": whole(w.grad).clone() for i in training.mine for n, w in parts[i].named_parameters()}
            )
            training.optimize()
    torch.testing.assert_close(steps[: model.STEPS], steps[model.STEPS :], **tolerances)
    assert steps[0][f"{earlier}.mixer.extra"].ne(0).all()


def without_split(schedule, stages):
    """A schedule of the same order, in which each I is a whole backward, and which has no W."""
    orders = {}
    for rank, actions in schedule.pipeline_order.items():
        orders[rank] = []
        for action in actions:
            orders[rank] += whole_backwards(action)
    runtime = schedules._PipelineScheduleRuntime(
        stages, model.MICROBATCHES, loss_fn=model.loss_function, scale_grads=False
    )
    runtime._prepare_schedule_with_comms(orders)
    return runtime


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
