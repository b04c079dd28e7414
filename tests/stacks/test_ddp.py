"""Stages in DistributedDataParallel, or in the composable replicate that is made of it: gradients, and when what is reduced.

Two pipeline ranks of two replicas, under the zero-bubble schedules.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from support.pipelines import by_lane, ranks_of
from support.stacks import model
from support.stacks.events import Events
from support.stacks.training import Training, cases_of, check_borrowing, compiled, mesh, watching_compiled
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

LARGE_WEIGHT = 2 * model.WIDTH * model.WIDTH * 8
BUCKET_MB = LARGE_WEIGHT / 2**20  # every large weight fills a bucket, once the buckets are as DDP wants them
on = functools.partial(mesh, "pp", "dp")


class NeverUsed(model.Block):
    def __init__(self):
        super().__init__()
        self.never = nn.Linear(model.WIDTH, model.WIDTH)


class Unused(NeverUsed):
    """Has a layer that nothing uses, and one that only some inputs use: not the same on all replicas."""

    def __init__(self):
        super().__init__()
        self.sometimes = nn.Linear(model.WIDTH, model.WIDTH)

    def forward(self, x):
        y = super().forward(x)
        return y + self.sometimes(y) if x.detach().sum() > 0 else y


def of(block):
    return functools.partial(model.make_parts, block)


def in_ddp(hook=None, **options):
    def wrap(part):
        group = on()["dp"].get_group()
        ddp = DistributedDataParallel(part, process_group=group, bucket_cap_mb=BUCKET_MB, **options)
        if hook is not None:
            ddp.register_comm_hook(group, hook)
        return ddp

    return wrap


def replicated(**options):
    return lambda part: replicate(part, process_group=on()["dp"].get_group(), bucket_cap_mb=BUCKET_MB, **options)


def train(schedule, wrap, block=model.Block, is_static=False, steps=model.STEPS, tolerances=None, **options):
    ordinary = ordinary_reductions(wrap, block)
    training = Training(schedule, on(), wrap, of(block), **options)
    events = training.run(steps=steps, **(tolerances or {}))
    # Broadcast are the buckets; replicate checks the weights when it makes its DDP.
    check_reductions(training, events, ordinary, others=["broadcast_", "allgather_"], is_static=is_static)
    return training


def ordinary_reductions(wrap, block=model.Block):
    """How often DDP reduces in the first backward, and in later ones, of one block that is not pipelined. Once a backward
    has shown the order of the gradients it has other buckets."""
    module = wrap(model.make_parts(block)[0])
    counts = []
    for step in range(3):
        x, target = model.batch(step, on()["dp"].get_local_rank())
        with Events() as events:
            model.loss_function(module(x), target).backward()
        counts.append(events.collectives()["allreduce_"])
    return counts[0], counts[-1]


def check_reductions(training, events, ordinary, others=(), is_static=False):
    """All reductions are in the stage's last W or whole backward, as many as in an `ordinary` step, and they begin before
    it ends. A static graph's first backward is reduced too."""
    for step, log in enumerate(events):
        expected = [0] * (model.MICROBATCHES - 1) + [ordinary[min(step, 1)]]
        if is_static and step == 0:
            expected = [ordinary[0], *expected[1:-1], ordinary[0] - 1]  # the map of used weights goes with the first
        for i in training.mine:
            contributions = [inner for _, _, inner in log.within("WB", i)]
            reductions = [inner.count("allreduce_") for inner in contributions]
            assert reductions == expected, (step, i, reductions, expected)
            if step > 0:
                last = contributions[-1]
                assert last.index("allreduce_") < len(last) - 1 - last[::-1].index("product"), (step, i, last)
        collectives = log.collectives()
        votes = len(training.mine) if step == 0 and torch.__version__ >= (2, 15) else 0  # how stages learn their shapes
        assert collectives["allreduce_"] == len(training.mine) * sum(expected) + votes, collectives
        assert set(collectives) <= {"allreduce_", *others}, collectives
    assert ordinary[1] >= 4


def plain(schedule):
    train(schedule, in_ddp())


def finds_unused(schedule):
    train(schedule, in_ddp(find_unused_parameters=True), Unused)


def static(schedule):
    train(schedule, in_ddp(static_graph=True), NeverUsed, is_static=True, steps=3)


def views_of_buckets(schedule):
    training = train(schedule, in_ddp(gradient_as_bucket_view=True))
    for part in training.parts.values():
        grads = [weight.grad for weight in part.parameters()]
        assert len({grad.untyped_storage().data_ptr() for grad in grads}) < len(grads)
    # Gradients that stay where they are, zeroed, from one step to the next.
    for optimizer in training.optimizers:
        optimizer.zero_grad = functools.partial(optimizer.zero_grad, set_to_none=False)
    training.run()


def hooked(schedule):
    seen = []

    def double(group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.is_last())
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])  # the sum: twice the mean of two

    ordinary = ordinary_reductions(in_ddp(double))
    training = Training(schedule, on(), in_ddp(double))
    events = []
    for step in range(model.STEPS):
        seen.clear()
        events.append(training.step(step))
        assert len(seen) == len(training.mine) * ordinary[step]
        assert sum(seen) == len(training.mine)
        training.run_reference(step)
        for weight in nn.ModuleList(training.reference).parameters():
            weight.grad *= 2
        training.check(step)
        training.optimize()
    check_reductions(training, events, ordinary, others=["broadcast_"])


def ended_by_hand(schedule):
    """The user ends a step's reductions (torch 2.15). A static graph's first one of all, which is one more, ends before."""
    for static_graph in (False, True):
        training = Training(schedule, on(), in_ddp(static_graph=static_graph))
        for module in training.modules:
            module.require_manual_backward_finalization = True
        for step in range(3):
            training.step(step)
            for module in training.modules:
                module.finalize_backward()
            training.run_reference(step)
            training.check(step)
            training.optimize()


def borrowed(schedule):
    check_borrowing(schedule, on(), in_ddp())


def compressed(schedule):
    train(schedule, in_ddp(fp16_compress_hook), tolerances={"rtol": 2**-8, "atol": 2**-4})  # of gradients up to 30


def of_compiled(schedule):
    with watching_compiled() as watch:
        train(schedule, lambda part: in_ddp()(compiled(part)))
    assert watch.calls > 0
    assert watch.not_split == []


def composable(schedule):
    train(schedule, replicated())


def composable_finds_unused(schedule):
    """DDP looks for unused weights from the outputs: those are kept for it, or, where torch itself frees what it has
    sent (2.15, if few sends may be under way), what they are made of is looked at."""
    sends = 3 if torch.__version__ >= (2, 15) else None
    train(schedule, replicated(find_unused_parameters=True), Unused, release_outputs=True, sends=sends)


KINDS = [plain, finds_unused, static, views_of_buckets, hooked, borrowed, compressed]
KINDS += [composable, composable_finds_unused]
if hasattr(DistributedDataParallel, "finalize_backward"):
    KINDS.append(ended_by_hand)
CASES = cases_of(*KINDS, of_compiled)
ranks = ranks_of(__file__, CASES, world=4)


@pytest.mark.dist
@pytest.mark.parametrize("case", by_lane(CASES))
def test_gradients_and_reductions(case, ranks):
    ranks(case)
