"""Schedules from files through torch's schedule runtime, stages with a dw_builder, and evaluation on a V."""

import csv
import functools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.blocks import BATCH, STEPS, WIDTH, ZERO_BUBBLE, batch, blocks, f64, loss_function
from support.functions import Asks
from support.oracle import wrong_on_torch
from support.pipelines import Case, Model, Pipeline, assert_close, ranks_of, sgd, train, unpipelined
from torch import nn
from torch.distributed.pipelining.schedules import FORWARD, OVERLAP_F_B, _PipelineScheduleRuntime, _wait_batch_p2p

STAGES, MICROBATCHES, WORLD = 4, 4, 2
LOOP, ZBV, DUAL = ZERO_BUBBLE
MODEL = Model(optimizer=sgd, microbatches=MICROBATCHES)

FORWARDS = {"FORWARD", "SEND_F", "RECV_F", "WAIT_SEND_F"}

# One row per rank. All weight passes wait: first the input passes of every stage, then W from the last microbatch on;
# and in one stage per rank a microbatch's backward is whole.
BY_HAND = {
    LOOP: (
        "0F0,0F1,0F2,0F3,2F0,2F1,2F2,2F3,2I0,2I1,2B2,2I3,0I0,0I1,0I2,0B3,2W3,2W1,2W0,0W2,0W1,0W0",
        "1F0,1F1,1F2,1F3,3F0,3F1,3F2,3F3,3I0,3I1,3I2,3B3,1I0,1B1,1I2,1I3,3W2,3W1,3W0,1W3,1W2,1W0",
    ),
    ZBV: (
        "0F0,0F1,0F2,0F3,3F0,3F1,3F2,3F3,3I0,3I1,3B2,3I3,0I0,0I1,0I2,0B3,3W3,3W1,3W0,0W2,0W1,0W0",
        "1F0,2F0,1F1,2F1,1F2,2F2,1F3,2F3,2I0,1I0,2I1,1B1,2I2,1I2,2B3,1I3,2W2,1W3,2W1,1W2,2W0,1W0",
    ),
}


def pipeline_of(schedule, parts=None, **given):
    return Pipeline(schedule, parts or blocks(STAGES), **given)


def from_file(line, path, format="compute_only"):
    line.schedule = _PipelineScheduleRuntime(line.stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)
    line.schedule._load_csv(str(path), format=format)
    return train(MODEL, line.parts, line.step)


def dumped(schedule, format):
    """A schedule of torch's, written to a file and read from it."""
    line = pipeline_of(schedule).start(microbatches=MICROBATCHES)
    with tempfile.NamedTemporaryFile("r", newline="") as file:
        line.schedule._dump_csv(file.name, format=format)
        assert len(list(csv.reader(file))) == WORLD
        return from_file(line, file.name, format)


def by_hand(schedule):
    with tempfile.NamedTemporaryFile("w") as file:
        Path(file.name).write_text("\n".join(BY_HAND[schedule]))
        return from_file(pipeline_of(schedule), file.name)


class Stored(nn.Module):
    """A block whose first product goes to a store of the stage's, as in Megatron; the rest is autograd's."""

    def __init__(self, block):
        super().__init__()
        self.norm, self.weight, self.down = block.norm, block.up.weight, block.down
        self.store = []

    def forward(self, x):
        return x + Asks.apply(self.norm(x), self.weight.t(), None, self.ask).tanh() @ self.down

    def ask(self, x, w, grad):
        def product():
            added = grad.t() @ x
            self.weight.grad = added if self.weight.grad is None else self.weight.grad + added

        self.store.append(product)
        return None, None

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


def made_of(kind, count):
    return [kind(part) for part in blocks(count)]


def with_stores():
    """ZBV on stages with a dw_builder.

    Their shapes are given: torch would infer them by a backward whose products would wait in the store, and be added.
    """
    parts, x = made_of(Stored, STAGES), torch.empty(BATCH // MICROBATCHES, WIDTH, dtype=f64)

    def given(i):
        shapes = {"input_args": x.clone().requires_grad_(i > 0), "output_args": x.clone().requires_grad_()}
        return {"dw_builder": parts[i].dw_builder, **shapes}

    line = pipeline_of(ZBV, parts, given=given).start(microbatches=MICROBATCHES)
    return train(MODEL, line.parts, line.step)


def evaluated():
    """ZBV with an evaluation before every step, by ZBV's forwards alone, on stages of its own.

    torch's `eval` of a V runs the backwards' actions too, and fails where a gradient is handed over on the same rank.
    """
    parts, outputs = blocks(STAGES), []
    line, twin = (pipeline_of(ZBV, parts).start(microbatches=MICROBATCHES) for _ in range(2))
    twin.schedule.pipeline_order_with_comms = {
        owner: [action for action in row if action.computation_type.name in FORWARDS]
        for owner, row in twin.schedule.pipeline_order_with_comms.items()
    }

    def step(x, target):
        args, keywords = line.given(x, target, [])
        with torch.no_grad():
            outputs.append(twin.schedule.eval(*args, **keywords))
        return line.step(x, target)

    seen = train(MODEL, line.parts, step)
    if STAGES - 1 in line.mine:
        seen |= {(step, "evaluation", ""): out for step, out in enumerate(outputs)}
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


def with_own_functions(is_split):
    line = pipeline_of(DUAL).start(microbatches=MICROBATCHES)
    own = OwnFunctions(line.schedule, line.stages, is_split)
    return {**train(MODEL, line.parts, line.step), ("overlaps", dist.get_rank()): own.overlaps}


FILES = {
    "by hand, loop": Case(functools.partial(by_hand, LOOP)),
    "by hand, V": Case(functools.partial(by_hand, ZBV)),
    "interleaved zero bubble, dumped": Case(functools.partial(dumped, LOOP, "compute_only")),
    "ZBV, dumped": Case(functools.partial(dumped, ZBV, "compute_only")),
    "ZBV with its sends, dumped": Case(functools.partial(dumped, ZBV, "compute_comms")),
}
CASES = {
    **FILES,
    "dw_builder": Case(with_stores),
    "evaluation": Case(evaluated),
    "own functions, whole": Case(functools.partial(with_own_functions, False)),
    "own functions, split": Case(functools.partial(with_own_functions, True)),
}
ranks = ranks_of(__file__, CASES)
pytestmark = [pytest.mark.dist, pytest.mark.slow]
splits = wrong_on_torch("two weights that are summed get one .grad")


# By hand, a whole backward comes before the first W of each stage: the weights have gradients of their own then.
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n.startswith("by hand") else splits) for n in FILES])
def test_a_schedule_from_a_file_trains_as_unpipelined(name, ranks):
    assert_close(ranks.together(name), unpipelined(MODEL))


def test_stages_that_defer_their_own_weights_train_as_unpipelined(ranks):
    model = Model(functools.partial(made_of, Ordinary), optimizer=sgd, microbatches=MICROBATCHES)
    assert_close(ranks.together("dw_builder"), unpipelined(model))


@splits
@pytest.mark.parametrize("kind", ["whole", "split"])
def test_a_program_may_run_forwards_and_overlapped_backwards_itself(kind, ranks):
    got = ranks.together(f"own functions, {kind}")
    assert sum(got.pop(("overlaps", rank)) for rank in range(WORLD)) > 0
    assert_close(got, unpipelined(MODEL))


@splits
def test_evaluations_between_steps_of_a_v_change_nothing(ranks):
    got = ranks.together("evaluation")
    outputs = [got.pop((step, "evaluation", "")) for step in range(STEPS)]
    assert_close(got, unpipelined(MODEL))
    with torch.no_grad():
        torch.testing.assert_close(outputs[0], nn.Sequential(*blocks(STAGES))(batch(0)[0]))
