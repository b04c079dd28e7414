"""Pipelines that torch's tracer cut, and training that is saved on one module and goes on on the other."""

import functools
import io

import pytest
import torch
from support.blocks import Linears, batch, blocks
from support.oracle import needs_zbpipe
from support.pipelines import Case, Model, Pipeline, assert_close, count_of, ranks_of, train, unpipelined
from support.ranks import on
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

STAGES, WORLD = 4, 2
MODEL = Model(functools.partial(blocks, kind=Linears), optimizer=functools.partial(torch.optim.AdamW, lr=1e-2), steps=4)
# Traced stages do not know a V.
TRACED = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleavedZeroBubble")
# Schedule, then the module that trains the first half of the steps, and the one that goes on.
RESUMED = [
    (schedule, *modules)
    for schedule in ("ScheduleZBVZeroBubble", "ScheduleInterleavedZeroBubble")
    for modules in (("torch", "zbpipe"), ("zbpipe", "torch"), ("zbpipe", "zbpipe"))
]


def traced(name):
    count = count_of(name)
    at = {f"{i * STAGES // count}": SplitPoint.BEGINNING for i in range(1, count)}
    example = batch(0)[0].chunk(MODEL.microbatches)[0]
    pipe = pipeline(nn.Sequential(*blocks(STAGES, Linears)), mb_args=(example,), split_spec=at)
    line = Pipeline(name, blocks(count, Linears))
    line.stages = [pipe.build_stage(i, torch.device("cpu")) for i in line.mine]
    line.start()
    parts = {int(i): part for stage in line.stages for i, part in stage.submod.named_children() if i.isdigit()}
    return train(MODEL, parts, line.step)


def resumed(schedule, *modules):
    """Each half begins anew, with what the one before has saved."""
    seen, saved = {}, io.BytesIO()
    for half, module in enumerate(modules):
        line = Pipeline(schedule, blocks(STAGES, Linears)).start()
        weights = nn.ModuleList(line.parts.values())
        optimizer = MODEL.optimizer(weights.parameters())
        if half:
            saved.seek(0)
            for what, state in zip((weights, optimizer), torch.load(saved), strict=True):
                what.load_state_dict(state)
        first = half * MODEL.steps // 2
        model = Model(batch=lambda step, first=first: batch(first + step), optimizer=lambda _, ours=optimizer: ours)
        with on(module):
            of_half = train(model, line.parts, line.step)
        seen |= {(first + step, *what): value for (step, *what), value in of_half.items()}
        torch.save((weights.state_dict(), optimizer.state_dict()), saved)
    return seen


CASES = {name: Case(functools.partial(traced, name)) for name in TRACED}
for run in RESUMED:
    CASES[" ".join(run)] = Case(functools.partial(resumed, *run), module="torch")
ranks = ranks_of(__file__, CASES, WORLD)
pytestmark = [pytest.mark.dist, pytest.mark.slow, needs_zbpipe]  # runs both modules itself


@pytest.mark.parametrize("schedule", TRACED)
def test_traced_stages_train_as_the_model_does(schedule, ranks):
    assert_close(ranks.together(schedule), unpipelined(MODEL, STAGES))


@pytest.mark.parametrize(("schedule", "first", "second"), RESUMED)
def test_training_goes_on_where_it_was_saved(schedule, first, second, ranks):
    got, wanted = ranks.together(f"{schedule} {first} {second}"), unpipelined(MODEL, STAGES)
    assert_close({what: got[what] for what in wanted}, wanted)
