"""policy(held_at_most=...): how many bytes wait for W, over microbatches in flight and two steps, beside an ordinary
backward."""

import subprocess
import sys
import warnings

import pytest
import torch
from support.oracle import needs_zbpipe
from support.processes import environment
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe import _C

pytestmark = needs_zbpipe

WIDTH, HIDDEN, TOKENS, MICROBATCHES, STEPS = 32, 64, 256, 3, 2
FLOAT = 4
# Of one block, per microbatch: its weights' gradients; and what W would read, each storage once.
GRADIENTS = (2 * WIDTH * HIDDEN + WIDTH + HIDDEN) * FLOAT
# Both linear layers' input and output gradient; a block's input gradient is not the next one's output gradient: x + f(x).
FACTORS = 2 * (WIDTH + HIDDEN) * TOKENS * FLOAT


FORGETS_AFTER = 2 * 256  # times that nothing waits any more, at the latest: ZBP_MOST_PERIODS of core/pass/zbp_budget.h


@pytest.fixture(autouse=True)
def nothing_learned():
    """What has waited at most is forgotten for what comes, which is less."""
    assert _C.held_within_budgets() == 0
    small = nn.Linear(2, 2)
    with zbpipe.policy(held_at_most=10**9):
        for _ in range(FORGETS_AFTER):
            x = torch.ones(1, 2, requires_grad=True)
            zbpipe.stage_backward_input([small(x)], None, [x], small.parameters())
    assert _C.held_within_budgets() == 0


class Blocks(nn.Module):
    def __init__(self, around=lambda block, x: block(x), count=4):
        super().__init__()
        self.around = around
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(count)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + self.around(block, x)
        return x


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False)


def offloaded(block, x):
    with torch.autograd.graph.save_on_cpu():
        return block(x)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(8, 4, 3, padding=1)

    def forward(self, x):
        return self.second(self.first(x.view(-1, 4, 8)).relu()).view_as(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        for _ in range(3):
            x = self.linear(x).tanh() * self.scale
        return x @ self.linear.weight


class Handed(torch.autograd.Function):
    @staticmethod
    def forward(x, weight):
        return x @ weight.T

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, zbpipe.defer(lambda x, grad: grad.T @ x, weight, (x, grad))


class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        for linear in self.linear:
            x = Handed.apply(x, linear.weight).tanh()
        return x


STAGES = {
    "plain": Blocks,
    "checkpointed": lambda: Blocks(checkpointed),
    "nested": lambda: Blocks(lambda block, x: checkpointed(lambda x: checkpointed(block, x), x)),
    "offloaded": lambda: Blocks(offloaded),
    "convolutions": Convolutions,
    "tied": Tied,
    "functions": Functions,
}


def make(name):
    torch.manual_seed(7)
    return STAGES[name]()


def microbatch(number, tokens=TOKENS):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(tokens, WIDTH, generator=generator, requires_grad=True)
    return x, torch.randn(tokens, WIDTH, generator=generator)


class Counted:
    """How often each weight's hook is called."""

    def __init__(self, stage):
        self.calls = dict.fromkeys((name for name, _ in stage.named_parameters()), 0)
        for name, weight in stage.named_parameters():
            weight.register_hook(lambda grad, name=name: self.count(name))

    def count(self, name):
        self.calls[name] += 1


def ordinary(stage, numbers, tokens):
    inputs = []
    for number in numbers:
        x, grad = microbatch(number, tokens)
        stage(x).backward(grad)
        inputs.append(x.grad)
    return inputs


def input_passes(stage, numbers, tokens):
    """All in flight. What each has returned, and what waited behind it."""
    results, waiting = [], []
    for number in numbers:
        x, grad = microbatch(number, tokens)
        results.append(zbpipe.stage_backward_input([stage(x)], [grad], [x], stage.parameters()))
        storages = sum(group.bytes_held for _, groups in results for group in groups)
        waiting.append(_C.held_within_budgets())
        assert waiting[-1] <= storages, "groups share storages"
    return results, waiting


def run_steps(stage, tokens=TOKENS):
    """Per step, what waited behind each I."""
    waiting, inputs = [], []
    for step in range(STEPS):
        results, waited = input_passes(stage, range(step * MICROBATCHES, (step + 1) * MICROBATCHES), tokens)
        inputs += [grads[0] for grads, _ in results]
        while results:
            zbpipe.stage_backward_weight(stage.parameters(), results.pop(0)[1])
        assert _C.held_within_budgets() == 0
        waiting.append(waited)
    return waiting, inputs


def unlimited(name, tokens=TOKENS):
    with zbpipe.policy(held_at_most=2**40, checkpoint="keep"):
        return run_steps(make(name), tokens)[0][0][-1]


def least(name, tokens=TOKENS):
    with zbpipe.policy(held_at_most=0), pytest.warns(RuntimeWarning, match="cannot be kept"):
        return run_steps(make(name), tokens)[0][0][-1]


@pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("defer", ["matrices", "all"])
@pytest.mark.parametrize("name", STAGES)
def test_a_step_that_has_run_before_is_within_the_budget(name, defer, hooks):
    ours, theirs = make(name), make(name)
    counted = [Counted(stage) for stage in (ours, theirs)] if hooks else []
    with zbpipe.policy(defer=defer):
        most, fewest = unlimited(name), least(name)
        assert fewest < most
        wanted = ordinary(theirs, range(STEPS * MICROBATCHES), TOKENS)
        rounds = 0
        for budget in (most, (most + fewest) // 2, (most + 7 * fewest) // 8, fewest):
            ours.zero_grad()
            with zbpipe.policy(held_at_most=budget), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                waiting, inputs = run_steps(ours)
            rounds += 1
            assert max(waiting[1]) <= budget
            # A pass that is above the budget says so, and only such a pass.
            assert len(said) == sum(bytes_ > budget for bytes_ in waiting[0])
            for got, want in zip(inputs, wanted, strict=True):
                assert torch.equal(got, want)
            for got, want in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(got.grad, want.grad)
    if hooks:
        assert counted[0].calls == {name: rounds * calls for name, calls in counted[1].calls.items()}


def waiting_under(budget, stage, tokens=TOKENS, **choices):
    """Of one microbatch."""
    x, grad = microbatch(0, tokens)
    with zbpipe.policy(held_at_most=budget, **choices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, groups = zbpipe.stage_backward_input([stage(x)], [grad], [x], stage.parameters())
    held = _C.held_within_budgets()
    assert held == sum(group.bytes_held for group in groups)
    del groups
    assert _C.held_within_budgets() == 0, "dropped groups are forgotten"
    return held


def test_to_the_byte_what_fits_is_kept_and_the_rest_computed():
    stage = Blocks(count=4)
    assert waiting_under(2**40, stage) == 4 * FACTORS
    assert waiting_under(4 * FACTORS, stage) == 4 * FACTORS
    assert waiting_under(0, stage) == 4 * GRADIENTS
    # The last block fits, and what the other three need at least is kept free.
    assert waiting_under(FACTORS + 3 * GRADIENTS, stage) == FACTORS + 3 * GRADIENTS
    # Of the next block one product fits, not both.
    layer = FACTORS // 2
    one_more = FACTORS + 3 * GRADIENTS + layer - (WIDTH * HIDDEN + WIDTH) * FLOAT
    assert waiting_under(one_more, stage) == one_more
    # Then the layer before it does, whose bias is wider: its gradients are the larger ones.
    assert waiting_under(one_more - 1, stage) == one_more - (HIDDEN - WIDTH) * FLOAT


def test_what_is_kept_where_the_gradients_are_larger():
    tokens = 4
    factors = FACTORS * tokens // TOKENS
    assert factors < GRADIENTS
    assert waiting_under(0, Blocks(count=4), tokens) == 4 * factors


def test_checkpointed_regions_stay_packed_where_gradients_are_larger():
    tokens = 8
    factors = FACTORS * tokens // TOKENS
    packed = factors // 2  # output gradients
    assert packed < factors < GRADIENTS
    calls = 0

    def run(block, x):
        nonlocal calls
        calls += 1
        return block(x)

    stage = Blocks(lambda block, x: checkpoint(run, block, x, use_reentrant=False))
    assert waiting_under(2**40, stage, tokens) == 4 * factors
    assert waiting_under(0, stage, tokens) == 4 * packed
    x, grad = microbatch(0, tokens)
    with zbpipe.policy(held_at_most=2 * factors + 2 * packed):
        _, groups = zbpipe.stage_backward_input([stage(x)], [grad], [x], stage.parameters())
        calls = 0
        zbpipe.stage_backward_weight(stage.parameters(), groups)
    # The first region that does not fit is computed again with those before it; two are kept.
    assert calls == 2


@pytest.mark.parametrize("checkpoint_choice", ["auto", "keep", "recompute"])
def test_one_budget_is_for_all_that_waits(checkpoint_choice):
    tokens = 8
    factors = FACTORS * tokens // TOKENS
    stage = Blocks(checkpointed)
    with zbpipe.policy(held_at_most=6 * factors, checkpoint=checkpoint_choice):
        results, waiting = input_passes(stage, range(2), tokens)
        assert waiting[-1] <= 6 * factors
        assert waiting[0] == (2 if checkpoint_choice == "recompute" else 4) * factors
        del results
    assert _C.held_within_budgets() == 0


def test_a_pass_that_fails_leaves_nothing_counted():
    stage = Blocks()

    def fail(grad):
        raise ValueError("in the middle")

    x, grad = microbatch(0)
    for budget in (2**40, GRADIENTS, 0):
        hidden = stage.blocks[0](x)
        hidden.register_hook(fail)
        out = stage.blocks[2](stage.blocks[1](hidden))
        with zbpipe.policy(held_at_most=budget), pytest.raises(RuntimeError) as raised:
            zbpipe.stage_backward_input([out], [grad], [x], stage.parameters())
        assert isinstance(raised.value.__cause__, ValueError)
        assert _C.held_within_budgets() == 0
        del raised


def test_without_a_budget_nothing_is_counted():
    stage = Blocks()
    x, grad = microbatch(0)
    _, groups = zbpipe.stage_backward_input([stage(x)], [grad], [x], stage.parameters())
    assert _C.held_within_budgets() == 0
    assert sum(group.bytes_held for group in groups) == 4 * FACTORS


def test_the_warning_names_both_numbers():
    stage = Blocks()
    x, grad = microbatch(0)
    with zbpipe.policy(held_at_most=3), pytest.warns(RuntimeWarning) as said:
        _, groups = zbpipe.stage_backward_input([stage(x)], [grad], [x], stage.parameters())
    assert f"held_at_most=3) cannot be kept: {4 * GRADIENTS} bytes wait" in str(said[0].message)
    assert said[0].filename == __file__
    del groups


@pytest.mark.parametrize(
    ("value", "error"), [(-1, ValueError), (2**64, ValueError), (True, TypeError), (1e9, TypeError), ("1GB", TypeError)]
)
def test_what_is_no_number_of_bytes_is_refused(value, error):
    before = zbpipe.get_policy()
    for change in (zbpipe.set_policy, lambda **choice: zbpipe.policy(**choice).__enter__(), zbpipe.Policy):
        with pytest.raises(error, match="held_at_most is"):
            change(held_at_most=value)
    assert zbpipe.get_policy() == before


def asked(value):
    code = "import zbpipe; print(zbpipe.get_policy().held_at_most)"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environment(), "ZBPIPE_POLICY": f"held_at_most={value}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_of_the_environment():
    assert asked("1000000").stdout.split() == ["1000000"]
    assert "held_at_most= and a number of bytes" in asked("1GB").stderr
    assert "held_at_most" in asked(str(2**64)).stderr


def in_flight(stages_and_budgets):
    """Bytes that wait at most, and warnings, of a step that has one microbatch of each waiting at once."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        waiting = []
        for stage, budget in stages_and_budgets:
            x = torch.randn(TOKENS, WIDTH, requires_grad=True)
            out = stage(x)
            with zbpipe.policy(held_at_most=budget):
                waiting.append((stage, zbpipe.stage_backward_input([out], [out], [x], stage.parameters())[1]))
        most = _C.held_within_budgets()
        for stage, groups in waiting:
            zbpipe.stage_backward_weight(stage.parameters(), groups)
    return most, len(said)


def test_stages_of_several_budgets_learn_from_each_other():
    one, other = Blocks(), Blocks()
    budget = 4 * 4 * GRADIENTS + FACTORS
    step = [(one, budget), (other, budget + 1), (one, budget), (other, budget + 1)]
    in_flight(step)
    for _ in range(3):
        most, warned = in_flight(step)
        assert most <= budget
        assert warned == 0


def test_a_step_with_much_more_in_flight_is_forgotten_in_time():
    stage = Blocks()
    budget = 2 * 4 * FACTORS
    usual = [(stage, budget)] * 2
    before = in_flight(usual)
    in_flight([(stage, budget)] * 40)
    assert in_flight(usual) < before
    nothing = [(nn.Linear(WIDTH, 1), budget)]
    for _ in range(FORGETS_AFTER):
        in_flight(nothing)
    assert in_flight(usual) == before


class HandedBeside(torch.autograd.Function):
    """Hands over the gradient of a small weight, which needs large factors, and returns that of a large one."""

    @staticmethod
    def forward(x, small, large):
        return x @ small.T + large.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, small, large = ctx.saved_tensors
        work = zbpipe.defer(lambda x, grad: grad.T @ x, small, (x, grad))
        return grad @ small, work, grad.sum().expand_as(large).contiguous()


def test_handed_over_work_is_weighed_against_the_gradients_that_it_computes():
    small, large = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(512, 512))
    x = torch.randn(4096, 8, requires_grad=True)
    out = HandedBeside.apply(x * 1.0, small, large)
    with zbpipe.policy(held_at_most=0), pytest.warns(RuntimeWarning, match="held_at_most=0"):
        _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [small, large])
    assert _C.held_within_budgets() == small.nbytes + large.nbytes
    zbpipe.stage_backward_weight([small, large], groups)


IN_THREADS = """
import sys, threading, warnings, torch, zbpipe
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

warnings.simplefilter("ignore")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
sys.setswitchinterval(1e-5)
zbpipe.set_policy(held_at_most=100_000)

def train(seed):
    torch.manual_seed(seed)
    weights = [nn.Parameter(distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)])) for _ in range(4)]
    for _ in range(40):
        x = distribute_tensor(torch.randn(8, 16), mesh, [Replicate()]).requires_grad_()
        h = x
        for weight in weights:
            h = (h @ weight).tanh()
        _, groups = zbpipe.stage_backward_input([h], [torch.ones_like(h)], [x], weights)
        zbpipe.stage_backward_weight(weights, groups)

threads = [threading.Thread(target=train, args=(seed,), daemon=True) for seed in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
dist.destroy_process_group()
print("ended")
"""


@pytest.mark.slow
def test_threads_with_dtensors_do_not_wait_for_each_other():
    """What a DTensor holds is asked in Python, for which a thread needs the GIL."""
    ran = subprocess.run(
        [sys.executable, "-c", IN_THREADS], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout == "ended\n", ran.stderr
