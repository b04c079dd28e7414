"""What each process of test_runtime.py runs: schedules that a user writes down, stages that defer W themselves, evaluation.

    python runtime_ranks.py RANK WORLD FOLDER

What each run recorded goes to FOLDER.
"""

import csv
import functools
import sys
from pathlib import Path

import torch
from support.blocks import BATCH, STEPS, WIDTH, Block, batch, blocks, f64, loss_function
from support.ranks import UNDER_TEST, run_apart
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    FORWARD,
    OVERLAP_F_B,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)

STAGES, MICROBATCHES = 4, 4

# One row per rank. All weight passes wait: first the input passes of every stage, then W from the last microbatch on;
# and in one stage per rank a microbatch's backward is whole.
BY_HAND = {
    "loop": (
        "0F0,0F1,0F2,0F3,2F0,2F1,2F2,2F3,2I0,2I1,2B2,2I3,0I0,0I1,0I2,0B3,2W3,2W1,2W0,0W2,0W1,0W0",
        "1F0,1F1,1F2,1F3,3F0,3F1,3F2,3F3,3I0,3I1,3I2,3B3,1I0,1B1,1I2,1I3,3W2,3W1,3W0,1W3,1W2,1W0",
    ),
    "v": (
        "0F0,0F1,0F2,0F3,3F0,3F1,3F2,3F3,3I0,3I1,3B2,3I3,0I0,0I1,0I2,0B3,3W3,3W1,3W0,0W2,0W1,0W0",
        "1F0,2F0,1F1,2F1,1F2,2F2,1F3,2F3,2I0,1I0,2I1,1B1,2I2,1I2,2B3,1I3,2W2,1W3,2W1,1W2,2W0,1W0",
    ),
}
FORWARDS = {"FORWARD", "SEND_F", "RECV_F", "WAIT_SEND_F"}


def stages_of(rank, shape):
    return [rank, STAGES - 1 - rank] if shape == "v" else [rank, rank + 2]


def dumped(kind, format):
    """A schedule of torch's, written to a file and read from it."""

    def make(stages, rank, folder):
        torchs = kind(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
        file = folder / f"{kind.__name__} {format} {rank}.csv"
        torchs._dump_csv(str(file), format=format)
        with open(file, newline="") as rows:
            assert len(list(csv.reader(rows))) == 2
        schedule = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
        schedule._load_csv(str(file), format=format)
        return schedule

    return make


def by_hand(shape):
    def make(stages, rank, folder):
        file = folder / f"{shape} {rank}.csv"
        file.write_text("\n".join(BY_HAND[shape]))
        schedule = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
        schedule._load_csv(str(file))
        return schedule

    return make


SCHEDULES = {
    "by hand, loop": ("loop", by_hand("loop")),
    "by hand, V": ("v", by_hand("v")),
    "interleaved zero bubble, dumped": ("loop", dumped(ScheduleInterleavedZeroBubble, "compute_only")),
    "ZBV, dumped": ("v", dumped(ScheduleZBVZeroBubble, "compute_only")),
    "ZBV with its sends, dumped": ("v", dumped(ScheduleZBVZeroBubble, "compute_comms")),
}


class StoredLinear(torch.autograd.Function):
    """As in Megatron: the weight's product goes to a store that belongs to the stage."""

    @staticmethod
    def forward(ctx, x, weight, store):
        ctx.save_for_backward(x, weight)
        ctx.store = store
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors

        def product():
            added = grad.t() @ x
            weight.grad = added if weight.grad is None else weight.grad + added

        ctx.store.append(product)
        return grad @ weight, None, None


class Stored(nn.Module):
    """A block whose first product goes to a store; the rest is autograd's."""

    def __init__(self, block):
        super().__init__()
        self.norm, self.weight, self.down = block.norm, block.up.weight, block.down
        self.store = []

    def forward(self, x):
        return x + StoredLinear.apply(self.norm(x), self.weight, self.store).tanh() @ self.down

    def dw_builder(self):
        """Called after a backward: what it left to do."""
        products = self.store[:]
        self.store.clear()

        def run():
            for product in products:
                product()

        return run


class Ordinary(Stored):
    """The same without a store: the reference."""

    def forward(self, x):
        return x + (self.norm(x) @ self.weight.t()).tanh() @ self.down


def train(parts, step_once):
    seen = {}
    named = {f"{i}.{name}": w for i, part in parts.items() for name, w in part.named_parameters()}
    optimizer = torch.optim.SGD(named.values(), 1e-2)
    for step in range(STEPS):
        for k, loss in enumerate(step_once(*batch(step))):
            seen[step, "loss", k] = loss.detach()
        for name, w in named.items():
            seen[step, "grad", name] = None if w.grad is None else w.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    seen.update({(STEPS, "weight", name): w.detach().clone() for name, w in named.items()})
    return seen


def parts_of(kind):
    return [part if kind is Block else kind(part) for part in blocks(STAGES)]


def reference(kind=Block):
    """`train` of the model unpipelined, of `Block`s or `Ordinary`s."""
    parts = parts_of(kind)
    net = nn.Sequential(*parts)

    def step_once(x, target):
        losses = []
        for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            losses.append(loss_function(net(part), goal))
            losses[-1].backward()
        return losses

    return train(dict(enumerate(parts)), step_once)


def stepper(schedule, mine):
    def step_once(x, target):
        losses = []
        given = {"target": target, "losses": losses} if STAGES - 1 in mine else {}
        schedule.step(*([x] if 0 in mine else []), **given)
        return losses

    return step_once


def written_down(name, rank, folder):
    shape, make = SCHEDULES[name]
    mine, parts = stages_of(rank, shape), blocks(STAGES)
    stages = [PipelineStage(parts[i], i, STAGES, torch.device("cpu")) for i in mine]
    return train({i: parts[i] for i in mine}, stepper(make(stages, rank, folder), mine))


def stored(rank, folder):
    """ZBV on stages with a dw_builder.

    Their shapes are given: torch would infer them by a backward whose products would wait in the store, and be added.
    """
    mine, parts = stages_of(rank, "v"), parts_of(Stored)
    x = torch.empty(BATCH // MICROBATCHES, WIDTH, dtype=f64)
    shapes = [{"input_args": x.clone().requires_grad_(i > 0), "output_args": x.clone().requires_grad_()} for i in mine]
    stages = [
        PipelineStage(parts[i], i, STAGES, torch.device("cpu"), dw_builder=parts[i].dw_builder, **given)
        for i, given in zip(mine, shapes, strict=True)
    ]
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    return train({i: parts[i] for i in mine}, stepper(schedule, mine))


def evaluated(rank, folder):
    """ZBV with an evaluation before every step, by ZBV's forwards alone, on stages of its own.

    torch's `eval` of a V runs the backwards' actions too, and fails where a gradient is handed over on the same rank.
    """
    mine, parts = stages_of(rank, "v"), blocks(STAGES)
    stages = [PipelineStage(parts[i], i, STAGES, torch.device("cpu")) for i in mine]
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    twins = [PipelineStage(parts[i], i, STAGES, torch.device("cpu")) for i in mine]
    forwards = ScheduleZBVZeroBubble(twins, MICROBATCHES, loss_fn=loss_function)
    forwards.pipeline_order_with_comms = {
        owner: [action for action in row if action.computation_type.name in FORWARDS]
        for owner, row in forwards.pipeline_order_with_comms.items()
    }
    outputs, evaluation_losses = [], []
    train_once = stepper(schedule, mine)

    def step_once(x, target):
        given = {"target": target, "losses": evaluation_losses} if STAGES - 1 in mine else {}
        with torch.no_grad():
            outputs.append(forwards.eval(*([x] if 0 in mine else []), **given))
        return train_once(x, target)

    seen = train({i: parts[i] for i in mine}, step_once)
    if STAGES - 1 in mine:
        seen.update({(step, "evaluation", ""): out for step, out in enumerate(outputs)})
    return seen


class OwnFunctions:
    """A program's own functions for actions: a stage's forward, and one beside a backward, which is whole, or I and W."""

    def __init__(self, schedule, stages, is_split):
        self.schedule, self.is_split, self.overlaps = schedule, is_split, 0
        self.stages = {stage.stage_index: stage for stage in stages}
        schedule.register_custom_function(FORWARD, self.forward)
        schedule.register_custom_function(OVERLAP_F_B, self.overlap)

    def forward(self, action, context):
        i, microbatch = action.stage_index, action.microbatch_index
        if i > 0 and i - 1 not in self.stages:
            _wait_batch_p2p(self.schedule.fwd_recv_ops.pop((i, microbatch)))
        args, kwargs = context.arg_mbs[microbatch], context.kwarg_mbs[microbatch]
        output = self.stages[i].forward_one_chunk(microbatch, args, kwargs)
        self.schedule._maybe_compute_loss(self.stages[i], output, context.target_mbs, microbatch)
        if i + 1 in self.stages:
            self.stages[i + 1].set_local_fwd_input(output, microbatch)

    def overlap(self, action, context):
        forward, backward = action.sub_actions
        self.forward(forward, context)
        self.overlaps += 1
        i, microbatch, stage = backward.stage_index, backward.microbatch_index, self.stages[backward.stage_index]
        if i < STAGES - 1 and i + 1 not in self.stages:
            _wait_batch_p2p(self.schedule.bwd_recv_ops.pop((i, microbatch)))
        loss = self.schedule._maybe_get_loss(stage, microbatch)
        self.schedule.backward_counter[i] += 1
        is_last = self.schedule.backward_counter[i] == MICROBATCHES
        if self.is_split:
            stage.backward_one_chunk(microbatch, loss=loss, full_backward=False)
            stage.backward_weight_one_chunk(microbatch, last_backward=is_last)
        else:
            stage.backward_one_chunk(microbatch, loss=loss, full_backward=True, last_backward=is_last)
        if i - 1 in self.stages:
            self.stages[i - 1].set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)


def with_own_functions(rank, folder, is_split):
    mine, parts = stages_of(rank, "v"), blocks(STAGES)
    stages = [PipelineStage(parts[i], i, STAGES, torch.device("cpu")) for i in mine]
    schedule = ScheduleDualPipeV(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    own = OwnFunctions(schedule, stages, is_split)
    seen = train({i: parts[i] for i in mine}, stepper(schedule, mine))
    return {**seen, ("overlaps", rank): own.overlaps}


def main(rank, world, folder):
    runs = {name: lambda rank, folder, name=name: written_down(name, rank, folder) for name in SCHEDULES}
    runs |= {"dw_builder": stored, "evaluation": evaluated}
    for kind in ("whole", "split"):
        runs[f"own functions, {kind}"] = functools.partial(with_own_functions, is_split=kind == "split")
    for name, run in runs.items():
        run_apart(name, UNDER_TEST, functools.partial(run, rank, folder), rank, world, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
