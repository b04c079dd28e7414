"""fully_shard in a loop of one's own, on two ranks: gradients and collectives of ordinary backwards on a copy."""

import copy
import functools

import pytest
import torch
from support.pipelines import Case, ranks_of
from support.stacks.events import SCATTERS, Events
from support.stacks.model import WIDTH, Adapted, Block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zbpipe

EACH, ALL, WITHIN = "W behind each I", "all W's behind all I's", "W's within another backward"


def models(block, reduce_dtype):
    torch.manual_seed(0)
    model = nn.Sequential(block(), nn.Linear(WIDTH, WIDTH), block())  # the second is the root's
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=reduce_dtype and torch.bfloat16, reduce_dtype=reduce_dtype)
    for each in (model, copied := copy.deepcopy(model)):
        for part in (each[0], each[2], each):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    return model, copied


def say(model, is_last, syncs):
    """As one says to fully_shard before a backward; of a single microbatch nobody says anything."""
    if syncs is not None:
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last or syncs)


def compare(block=Block, count=3, order=EACH, syncs=None, reduce_dtype=None, main_grad=False, steps=2):
    ordinary, split = models(block, reduce_dtype)
    run = functools.partial(run_split, split, order, syncs, main_grad)
    for step in range(steps):
        torch.manual_seed(10 * step + torch.distributed.get_rank())
        data = [
            (torch.randn(4, WIDTH), torch.randn(4, WIDTH, dtype=reduce_dtype and torch.bfloat16)) for _ in range(count)
        ]
        scatters = []
        for model, passes in ((ordinary, lambda data: run_ordinary(ordinary, syncs, data)), (split, run)):
            with Events() as events:
                passes(data)
            scatters.append(sum(events.collectives().get(name, 0) for name in SCATTERS))
            assert all(weight.grad is not None for weight in model.parameters())
        assert scatters[0] == scatters[1] == 3 * (count if syncs is not False and order != WITHIN else 1), scatters
        for (name, weight), twin in zip(split.named_parameters(), ordinary.parameters(), strict=True):
            torch.testing.assert_close(
                weight.grad.full_tensor(), twin.grad.full_tensor(), msg=lambda m, n=name: f"{n}: {m}"
            )


def run_ordinary(model, syncs, data):
    for i, (x, grad) in enumerate(data):
        say(model, i == len(data) - 1, syncs)
        model(x.requires_grad_()).backward(grad)


def run_split(model, order, syncs, main_grad, data):
    waiting = []

    def weight_pass(i):
        say(model, i == len(data) - 1, syncs)
        zbpipe.stage_backward_weight(None, waiting[i])

    for i, (x, grad) in enumerate(data):
        x = x.detach().requires_grad_()
        out = model(x)
        if main_grad:
            with zbpipe.policy(main_grad=True):
                say(model, i == len(data) - 1, syncs)
                zbpipe.stage_backward(out, grad, [x])
        else:
            waiting.append(zbpipe.stage_backward_input([out], [grad], [x], None)[1])
        if order == EACH and not main_grad:
            weight_pass(i)
    if order == WITHIN:
        other = torch.ones(2, requires_grad=True)
        other.register_hook(lambda grad: [weight_pass(i) for i in range(len(data))] and None)
        other.sum().backward()
    for i in range(len(data)) if order == ALL else ():
        weight_pass(i)


def exclude_a_shard():
    """The root's, which I computes: what its group holds is its gradient, and the bias's."""
    _, model = models(Block, None)
    with zbpipe.policy(exclude=[model[1].weight]):
        x = torch.randn(4, WIDTH, requires_grad=True)
        _, groups = zbpipe.stage_backward_input([model(x)], [torch.ones(4, WIDTH)], [x], None)
    with pytest.raises(TypeError, match="expected a ParamGroup"):
        zbpipe.stage_backward_weight(None, [*groups, 3])
    held = [group.bytes_held for group in groups if any(w.shape == (WIDTH, WIDTH) for w in group.weights)]
    zbpipe.stage_backward_weight(None, groups)
    assert held == [4 * (WIDTH * WIDTH + WIDTH)], held


def refuse_main_grad():
    """fully_shard would reduce .grad alone. With the other policy the same groups are run."""
    _, model = models(Block, None)
    x = torch.randn(4, WIDTH, requires_grad=True)
    for name, weight in model.named_parameters():
        if name == "1.weight":
            weight.main_grad = torch.zeros(weight.shape)
    _, groups = zbpipe.stage_backward_input([model(x)], [torch.ones(4, WIDTH)], [x], None)
    with (
        zbpipe.policy(main_grad=True),
        pytest.raises(RuntimeError, match=r"main_grad of float32 \[.*, and fully_shard"),
    ):
        zbpipe.stage_backward_weight(None, groups)
    assert all(weight.grad is None for weight in model.parameters())
    zbpipe.stage_backward_weight(None, groups)
    assert all(weight.grad is not None for weight in model.parameters())


RUNS = {
    "one microbatch": {"count": 1},
    "three, each reduced": {},
    "three, each reduced, late": {"order": ALL},
    "three, each reduced, said so": {"syncs": True},
    "three, the last reduces": {"syncs": False},
    "three, the last reduces, late": {"syncs": False, "order": ALL},
    "three, the last reduces, mixed": {"syncs": False, "reduce_dtype": torch.float32},
    "three, the last reduces, late, mixed": {"syncs": False, "reduce_dtype": torch.float32, "order": ALL},
    "one, mixed": {"count": 1, "reduce_dtype": torch.float32},
    "reading": {"block": Adapted},
    "reading, late": {"block": Adapted, "syncs": False, "order": ALL},
    "within another backward": {"syncs": False, "order": WITHIN},
    "whole backwards, main_grad": {"main_grad": True},
}
CASES = {name: Case(functools.partial(compare, **options)) for name, options in RUNS.items()}
CASES["an excluded shard"] = Case(exclude_a_shard)
CASES["main_grad"] = Case(refuse_main_grad)
ranks = ranks_of(__file__, CASES, world=2)


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_reductions_are_those_of_ordinary_backwards(case, ranks):
    ranks(case)
