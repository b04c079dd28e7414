"""W of several microbatches together: their products for a weight are added in one sweep over its gradient.

The oracle is an ordinary backward, microbatch after microbatch: equal to the last bit, whatever was given together.
"""

import copy
import random

import pytest
import torch
from support.oracle import Stage, needs_zbpipe, weight, zb
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from zbpipe import memory

pytestmark = needs_zbpipe

ROWS, COLUMNS = 1100, 260  # three panels
PANEL = 384 * COLUMNS * 4  # the largest of them
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm_.default)


class Products(TorchDispatchMode):
    """Counts products, and runs out of memory at one of them."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.fails_at = fails_at
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in PRODUCTS:
            if len(self.sizes) == self.fails_at:
                raise torch.OutOfMemoryError("out of memory")
            self.sizes.append(args[-1].size(-2))
        return function(*args, **(kwargs or {}))


def parameter(*shape):
    return weight(*shape, dtype=torch.float32)


def column_major(rows, columns):
    return nn.Parameter(torch.randn(columns, rows).t())


def two_layers():
    return Stage(
        lambda m, x: F.linear(torch.tanh(F.linear(x, m.a, m.b)), m.c.t()),
        a=parameter(ROWS, COLUMNS),
        b=parameter(ROWS),
        c=parameter(ROWS, COLUMNS),
    )


FORMS = {
    "two layers": two_layers,
    "column-major": lambda: Stage(lambda m, x: x @ m.w, w=column_major(COLUMNS, ROWS)),
    "bmm": lambda: Stage(lambda m, x: torch.bmm(x.view(2, -1, COLUMNS), m.w), w=parameter(2, COLUMNS, 600)),
    "einsum": lambda: Stage(lambda m, x: torch.einsum("td,hde->the", x, m.w), w=parameter(4, COLUMNS, 300)),
    "convolution between": lambda: Stage(
        lambda m, x: F.conv1d(F.linear(x, m.w)[:, None], m.v).sum(1), w=parameter(ROWS, COLUMNS), v=parameter(3, 1, 5)
    ),
    "used twice": lambda: Stage(lambda m, x: torch.tanh(x @ m.w.t()) @ m.w, w=parameter(ROWS, COLUMNS)),
    "used twice, and a head": lambda: Stage(
        lambda m, x: F.linear(torch.tanh(x @ m.w.t()) @ m.w, m.v), w=parameter(ROWS, COLUMNS), v=parameter(700, COLUMNS)
    ),
    "whichever way round": lambda: Stage(
        lambda m, x: x @ (m.w if x.size(0) % 2 else m.w.clone(memory_format=torch.contiguous_format)),
        w=column_major(COLUMNS, ROWS),
    ),
}


class Run:
    """A stage's microbatches up to W, beside a copy on which each had an ordinary backward."""

    def __init__(self, m, count=4, existing=True, before=lambda m: None):
        self.m, self.twin = m, copy.deepcopy(m)
        self.groups = []
        torch.manual_seed(0)
        for stage in (self.m, self.twin):
            for w in stage.parameters() if existing else ():
                w.grad = torch.ones_like(w)
            before(stage)
        for k in range(count):
            x = torch.randn(16 + 2 * k, COLUMNS, requires_grad=True)
            stage_input = x.detach().clone().requires_grad_()
            out = self.m(stage_input)
            grad = torch.randn_like(out)
            self.groups.append(zb.stage_backward_input([out], [grad], [stage_input], self.m.parameters())[1])
            self.twin(x).backward(grad)

    @property
    def together(self):
        return [group for groups in self.groups for group in groups]

    def weight_pass(self, groups=None, **kwargs):
        zb.stage_backward_weight(list(self.m.parameters()), self.together if groups is None else groups, **kwargs)

    def check(self):
        for (name, w), expected in zip(self.m.named_parameters(), self.twin.parameters(), strict=True):
            assert torch.equal(w.grad, expected.grad), name


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_microbatches_together_equal_one_after_the_other(form, existing):
    run = Run(FORMS[form](), existing=existing)
    run.weight_pass()
    run.check()


def test_groups_in_any_order_that_keeps_the_microbatches():
    """Weight by weight, and mixed: a weight's microbatches stay in their order."""
    for seed in range(4):
        run = Run(two_layers())
        dice = random.Random(seed)
        waiting = [list(groups) for groups in zip(*run.groups, strict=True)]
        order = []
        while waiting:
            queue = dice.choice(waiting)
            order.append(queue.pop(0))
            waiting = [queue for queue in waiting if queue]
        run.weight_pass(order)
        run.check()


def test_panels_are_outside_and_microbatches_within():
    run = Run(Stage(lambda m, x: x @ m.w.t(), w=parameter(ROWS, COLUMNS)), count=3)
    with Products() as products:
        run.weight_pass()
    tokens = [16, 18, 20]
    assert products.sizes == tokens * 3
    run.check()


def test_no_more_memory_than_a_panel():
    run = Run(Stage(lambda m, x: x @ m.w.t(), w=parameter(ROWS, COLUMNS)))
    with memory.record() as rec:
        run.weight_pass()
    (phase,) = rec.phases
    assert phase.peak - phase.live_begin == PANEL


def test_retained_groups_are_swept_again():
    m = Stage(lambda m, x: x @ m.w.t(), w=parameter(ROWS, COLUMNS))
    run = Run(m)
    once = Run(copy.deepcopy(m))
    run.weight_pass(retain_graph=True)
    run.check()
    run.weight_pass()
    for groups in (once.groups, once.groups):
        once.weight_pass([group for some in groups for group in some], retain_graph=True)
    assert torch.equal(run.m.w.grad, once.m.w.grad)


@pytest.mark.parametrize("existing", [False, True])
def test_sweep_that_fails_goes_on_where_it_stopped(existing):
    """At each product in turn, all together again."""
    for number in range(40):
        run = Run(two_layers(), existing=existing)
        with Products(number) as products:
            try:
                run.weight_pass()
            except torch.OutOfMemoryError:
                failed = True
            else:
                failed = False
        if failed:
            run.weight_pass()
        run.check()
        if not failed:
            assert number == len(products.sizes) > 12
            return
    raise AssertionError("it never ran through")


@pytest.mark.parametrize("number", [1, 5, 7, 11])
@pytest.mark.parametrize("main_grad", [False, True])
def test_groups_of_a_sweep_that_failed_go_on_one_by_one(number, main_grad):
    m = Stage(lambda m, x: x @ m.w.t(), w=parameter(ROWS, COLUMNS))
    run = Run(m)
    place = torch.ones(ROWS, COLUMNS)
    if main_grad:
        run.m.w.main_grad = place
    else:
        run.m.w.grad = place
    with zb.policy(main_grad=main_grad):
        with Products(number), pytest.raises(torch.OutOfMemoryError):
            run.weight_pass()
        assert place.ne(1).any()
        for groups in reversed(run.groups):
            run.weight_pass(groups)
    torch.testing.assert_close(place, run.twin.w.grad, rtol=1e-6, atol=1e-5)


def test_sweep_that_failed_is_refused_when_the_gradient_is_another():
    run = Run(Stage(lambda m, x: x @ m.w.t(), w=parameter(ROWS, COLUMNS)))
    with Products(5), pytest.raises(torch.OutOfMemoryError):
        run.weight_pass()
    place, run.m.w.grad = run.m.w.grad, torch.ones_like(run.m.w)
    for groups in (run.together, run.groups[0], run.groups[3]):
        with pytest.raises(RuntimeError, match="since then its gradient was replaced"):
            run.weight_pass(groups)
    assert run.m.w.grad.eq(1).all()
    run.m.w.grad = place
    run.weight_pass()
    run.check()


def test_hooks_of_watched_weights_fire_once_per_microbatch():
    calls = []

    def watch(m):
        m.a.register_post_accumulate_grad_hook(lambda w: calls.append(w.grad.clone()))

    run = Run(two_layers(), before=watch)
    calls.clear()
    run.weight_pass()
    assert len(calls) == 4
    assert torch.equal(calls[-1], run.m.a.grad)
    assert torch.equal(run.m.c.grad, run.twin.c.grad)
    torch.testing.assert_close(run.m.a.grad, run.twin.a.grad)


@pytest.mark.parametrize("form", FORMS)
def test_fused_sweep_is_close(form):
    run = Run(FORMS[form]())
    with zb.policy(fused=True):
        run.weight_pass()
    for w, expected in zip(run.m.parameters(), run.twin.parameters(), strict=True):
        torch.testing.assert_close(w.grad, expected.grad, rtol=1e-3, atol=1e-3)


def test_stages_that_share_a_weight():
    """Of two stages' groups one has the tied weight beside another: what lies between two products stays there."""
    w, v = parameter(ROWS, COLUMNS), parameter(ROWS, COLUMNS)
    stages = [
        Stage(lambda m, x: x @ m.w.t(), w=w),
        Stage(lambda m, x: torch.tanh(x @ m.w.t()) @ (m.w + m.v), w=w, v=v),
        Stage(lambda m, x: torch.tanh(x @ m.w.t()) @ m.w, w=w),
    ]
    twins = copy.deepcopy(stages)  # with one copy of the weight
    for parameters in ((w, v), (twins[1].w, twins[1].v)):
        for one in parameters:
            one.grad = torch.ones_like(one)
    groups = []
    for k in range(6):
        x = torch.randn(16, COLUMNS, requires_grad=True)
        out = stages[k % 3](x)
        grad = torch.randn_like(out)
        twins[k % 3](x.detach()).backward(grad)
        groups += zb.stage_backward_input([out], [grad], [x], [w, v])[1]
    zb.stage_backward_weight([w, v], groups)
    for grad, expected in ((w.grad, twins[0].w.grad), (v.grad, twins[1].v.grad)):
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_random_sizes(dtype):
    dice = random.Random(str(dtype))
    for _ in range(12):
        rows, columns = dice.choice(
            [(dice.randint(529, 1300), dice.randint(1, 500))] * 2 + [(dice.randint(1, 300), 700)]
        )
        make = dice.choice([parameter, column_major])
        m = Stage(
            lambda m, x: F.linear(x[:, : m.w.size(1)], m.w), w=nn.Parameter(make(rows, columns).detach().to(dtype))
        )
        twin = copy.deepcopy(m)
        m.w.grad, twin.w.grad = torch.ones_like(m.w), torch.ones_like(m.w)
        groups = []
        for _ in range(3):
            x = torch.randn(dice.randint(1, 40), columns, dtype=dtype, requires_grad=True)
            out = m(x)
            grad = torch.randn_like(out)
            twin(x.detach()).backward(grad)
            groups += zb.stage_backward_input([out], [grad], [x], [m.w])[1]
        zb.stage_backward_weight([m.w], groups)
        assert torch.equal(m.w.grad, twin.w.grad), (rows, columns, make)
