"""torch's schedules over two gloo processes, patched, against the same model unpipelined.

Its stages are plain, compiled by zbpipe, checkpointed, or of Functions that hand over their weights' gradients.
"""

import collections
import functools

import pytest
import torch
import torch.distributed as dist
from support import pipelines
from support.blocks import MICROBATCHES, SCHEDULES, STEPS, ZERO_BUBBLE
from support.compiled import Block, Watch
from support.functions import Asks
from support.oracle import needs_zbpipe, wrong_on_torch
from support.pipelines import Case, Model, assert_close, joined, pipelined, ranks_of, sgd, train, unpipelined, watch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe import memory

WORLD, STAGES = 2, 4
PLAIN = Model()
splits = wrong_on_torch("two weights that are summed get one .grad")
zero_bubble = pytest.mark.parametrize("name", ZERO_BUBBLE)
pytestmark = [pytest.mark.dist, pytest.mark.slow]


def pipeline_of(model, name):
    _, parts = model.build(pipelines.count_of(name))
    return pipelines.Pipeline(name, parts)


# torch 2.15: microbatches that the caller has split, few sends under way, reductions that are waited for later.


def split_by_the_caller(name):
    line = pipeline_of(PLAIN, name).start(defer_reduce_grad_wait=True, max_outstanding_sends=3)  # two are too few

    def step(x, target):
        losses = []
        given = {"target_mbs": list(target.chunk(MICROBATCHES)), "losses": losses} if STAGES - 1 in line.mine else {}
        if 0 in line.mine:
            given["arg_mbs"] = [(part,) for part in x.chunk(MICROBATCHES)]
        line.schedule.step(**given)
        return losses

    actions = [str(action) for action in line.schedule.pipeline_order_with_comms[dist.get_rank()]]
    return train(PLAIN, line.parts, step), actions


# Compiled stages.

COMPILED = Model(optimizer=sgd)


def compiled(name):
    with Watch() as watched:
        wrap = functools.partial(zbpipe.compile, backend="aot_eager", dynamic=False)
        return pipelined(COMPILED, name, wrap), watched.calls, watched.not_split


# Checkpointed stages.


class Checkpointed(nn.Sequential):
    """Counts its blocks' forwards."""

    computed = 0

    def compute(self, block, x):
        self.computed += 1
        return block(x)

    def forward(self, x):
        for block in self:
            x = checkpoint(self.compute, block, x, use_reentrant=False)
        return x


BLOCKS, WIDTH, TOKENS = 2, 32, 64


def checkpointed_parts(count):
    torch.manual_seed(1)
    return [Checkpointed(*(Block(WIDTH) for _ in range(BLOCKS))) for _ in range(count)]


def sequences(step):
    torch.manual_seed(2 + step)
    return torch.randn(2, 6, TOKENS, WIDTH).unbind()


CHECKPOINTED = Model(checkpointed_parts, nn.functional.mse_loss, sequences, microbatches=6)


def checkpointed(name):
    """What was trained, the last step's peak of memory, and how often a stage computed its blocks in it."""
    line = pipeline_of(CHECKPOINTED, name).start(CHECKPOINTED.loss, CHECKPOINTED.microbatches)
    peaks = []

    def step(x, target):
        for part in line.parts.values():
            part.computed = 0
        with memory.record(max_events=0) as recording:
            losses = line.step(x, target)
        peaks.append(recording.peak)
        return losses

    return train(CHECKPOINTED, line.parts, step), peaks[-1], [part.computed for part in line.parts.values()]


# Functions that hand over their weights' gradients.

SIZE = 8
passes = [""]  # of this process: which pass of a stage runs; none where torch's stages learn shapes


class Layer(nn.Module):
    """Of the kind "gated": its w comes from the stage's input."""

    def __init__(self, kind, is_plain):
        super().__init__()
        self.kind, self.is_plain, self.calls = kind, is_plain, []
        self.w = nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.float64) / 3)
        self.b = nn.Parameter(torch.randn(SIZE, dtype=torch.float64))
        if kind == "fused":
            self.w.main_grad, self.b.main_grad = torch.zeros_like(self.w), torch.zeros_like(self.b)

    def forward(self, x):
        w = self.w * torch.sigmoid(x.mean() + self.b[0]) if self.kind == "gated" else self.w
        return x @ w + self.b if self.is_plain else Asks.apply(x, w, self.b, self.ask)

    def ask(self, x, w, grad):
        """Work that returns the weights' gradients, or adds them to main_grad itself."""

        def work(x, grad):
            self.calls.append(passes[-1])
            return x.mT @ grad, grad.sum(0)

        def fused(x, grad):
            if passes[-1]:  # else of memory that is not initialised
                for weight, added in zip((self.w, self.b), work(x, grad), strict=True):
                    weight.main_grad += added

        if self.kind != "fused":
            return zbpipe.defer(work, weights=(1, 2), saved=(x, grad))
        zbpipe.defer(fused, weights=None, saved=(x, grad))
        return None, None


KINDS = ("defer", "gated", "fused")


def layers(count, is_plain=False):
    torch.manual_seed(1)
    return [nn.Sequential(*(Layer(kind, is_plain) for kind in KINDS), nn.Tanh()) for _ in range(count)]


HANDED = Model(layers, optimizer=functools.partial(torch.optim.SGD, lr=1e-3))
BY_AUTOGRAD = Model(functools.partial(layers, is_plain=True), optimizer=HANDED.optimizer)


def handed_over(name):
    """What was trained, and in which passes each layer's work was done."""
    line = pipeline_of(HANDED, name).start()

    def around(action, run):
        passes.append(action[1])
        try:
            return run()
        finally:
            passes.pop()

    def step(x, target):
        losses = line.step(x, target)
        for w in (w for part in line.parts.values() for w in part.parameters() if hasattr(w, "main_grad")):
            w.grad = w.main_grad.clone()
            w.main_grad.zero_()
        return losses

    for stage in line.stages:
        watch(stage, around)
    seen = train(HANDED, line.parts, step)
    return seen, {(i, j): part[j].calls for i, part in line.parts.items() for j in range(len(KINDS))}


CASES = {
    **{f"{name} plain": Case(functools.partial(pipelined, PLAIN, name)) for name in SCHEDULES},
    **{f"{name} compiled": Case(functools.partial(compiled, name), module="zbpipe") for name in ZERO_BUBBLE},
    **{f"{name} handed over": Case(functools.partial(handed_over, name), module="zbpipe") for name in ZERO_BUBBLE},
    **{
        f"{name} checkpointed {module}": Case(functools.partial(checkpointed, name), module=module)
        for name in ZERO_BUBBLE
        for module in ("zbpipe", "torch")
    },
}
if torch.__version__ >= (2, 15):
    CASES |= {f"{name} split": Case(functools.partial(split_by_the_caller, name)) for name in ZERO_BUBBLE}
ranks = ranks_of(__file__, CASES)


@pytest.mark.parametrize("name", [pytest.param(n, marks=splits if n in ZERO_BUBBLE else ()) for n in SCHEDULES])
def test_plain_stages(name, ranks):
    assert_close(ranks.together(f"{name} plain"), unpipelined(PLAIN, WORLD * SCHEDULES[name][0]))


@pytest.mark.skipif(torch.__version__ < (2, 15), reason="new in torch 2.15")
@zero_bubble
def test_split_microbatches_and_actions_that_wait_for_sends(name, ranks):
    """WAIT_SEND_F and WAIT_SEND_B are in the order of actions, and what they wait for is."""
    seen, of_ranks = zip(*ranks(f"{name} split"), strict=True)
    for actions in of_ranks:
        for what in ("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD"):
            assert any(what in action for action in actions)
    assert_close(joined(seen), unpipelined(PLAIN))


@zero_bubble
def test_compiled_stages(name, ranks):
    """And the split did take place."""
    seen, calls, lines = zip(*ranks(f"{name} compiled"), strict=True)
    assert_close(joined(seen), unpipelined(COMPILED))
    whole = 0 if name != "ScheduleDualPipeV" else MICROBATCHES * STEPS  # it splits only some microbatches
    assert sum(calls) >= (STAGES - 1) * (MICROBATCHES * STEPS - whole) + (1 if whole else 0)
    assert not any(lines)


@zero_bubble
def test_checkpointed_stages(name, ranks):
    """With the policy that nobody chose: never more memory than torch's module takes, and each block once more."""
    seen, peaks, computed = zip(*ranks(f"{name} checkpointed zbpipe"), strict=True)
    _, theirs, _ = zip(*ranks(f"{name} checkpointed torch"), strict=True)
    assert_close(joined(seen), unpipelined(CHECKPOINTED))
    assert all(peak < limit for peak, limit in zip(peaks, theirs, strict=True)), (peaks, theirs)
    assert all(count == 2 * BLOCKS * CHECKPOINTED.microbatches for counts in computed for count in counts)


@needs_zbpipe
@zero_bubble
def test_stages_of_functions_that_hand_over_their_weights_gradients(name, ranks):
    """Every piece of work is done once, in W where the schedule has one."""
    seen, calls = zip(*ranks(f"{name} handed over"), strict=True)
    wanted = unpipelined(BY_AUTOGRAD)
    assert_close(joined(seen), wanted)
    for (stage, layer), passes in joined(calls).items():
        counts = collections.Counter(filter(None, passes))
        assert sum(counts.values()) == MICROBATCHES * STEPS, f"stage {stage}, {KINDS[layer]}: {counts}"
        if stage == 0:  # its W is a whole backward
            assert counts.keys() <= {"W", "B"}
        elif KINDS[layer] == "gated":  # the weight's gradient is needed in I
            assert counts.keys() <= {"I", "B"}
        else:
            assert counts["W"] > 0
            assert counts.keys() <= ({"W", "B"} if name == "ScheduleDualPipeV" else {"W"})
