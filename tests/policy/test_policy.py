"""The policy: what is left to W, what is kept for it, how it adds."""

import copy
import gc
import signal
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.functions import Asks, FusedWithDummy, Planned, function_of, raising
from support.leaks import no_collector
from support.oracle import Stage, check, fresh, input_pass, needs_zbpipe, zb
from support.processes import python
from support.rounding import equal
from torch import nn
from torch.nn import functional as F

from zbpipe import _policy  # what is read when zbpipe is imported

pytestmark = [pytest.mark.drops_groups, needs_zbpipe]

f32, f64 = torch.float32, torch.float64
D, T = 8, 5


def block():
    return Stage(
        lambda m, x: m.b(m.a(m.norm(x)).relu() * m.scale) + m.shift,
        norm=nn.LayerNorm(D, dtype=f64),
        a=nn.Linear(D, 2 * D, dtype=f64),
        scale=(2 * D,),
        b=nn.Linear(2 * D, D, dtype=f64),
        shift=(D,),
    )


def groups_of(m):
    return input_pass(m, fresh(T, D))[1]


def held(m, **choices):
    with zb.policy(**choices):
        return sum(group.bytes_held for group in groups_of(m))


CHOICES = [{"defer": "matrices"}, {"defer": "all"}, {"defer": "nothing"}, {"defer": "all", "fused": True}]


def tied(m, x):
    h = m.f(m.f(m.f(x).tanh()).tanh())
    return h @ m.f.weight + m.scale * (m.scale * h).sin()


def mixed(m, x):
    """Uses with a cast, of a computed weight, and in a Function, among plain ones."""
    h = F.linear(F.linear(F.linear(x.float(), m.w).sin(), m.w.double().float()), m.w * 2.0)
    return F.linear(squared(F.linear(h, m.w), m.w), m.w.t()).double()


squared = function_of(lambda x, w: x @ (w * w), lambda x, w, grad: (grad @ (w * w).t(), 2 * w * (x.t() @ grad)))


OFTEN = {
    "tied": lambda: Stage(tied, f=nn.Linear(D, D, dtype=f64), scale=(D,)),
    "mixed": lambda: Stage(mixed, w=nn.Parameter(torch.randn(D, D))),
    "recurrent": lambda: Stage(lambda m, x: m.f(x.view(T, 1, D))[0], f=nn.GRU(D, D, bidirectional=True, dtype=f64)),
    "branches": lambda: Stage(
        lambda m, x: sum(m.f(m.g(x.roll(i, 0)).tanh() if i % 2 else x) for i in range(5)),
        f=nn.Linear(D, D, dtype=f64),
        g=nn.Linear(D, D, dtype=f64),
    ),
}


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("kind", OFTEN)
def test_a_weight_that_is_used_often(kind, choices):
    """Note [The order of sums], csrc/core/pass/zbp_book.h: to the bits of an ordinary backward."""
    torch.manual_seed(0)
    with zb.policy(**choices):
        check(OFTEN[kind](), (T, D), microbatches=3, exact="fused" not in choices)


@pytest.mark.parametrize("kind", OFTEN)
def test_sums_of_a_weight_that_is_used_often_can_be_added_again(kind):
    m, x = OFTEN[kind](), fresh(T, D)
    m(x).sum().backward()
    wanted = [2 * w.grad for w in m.parameters()]
    m.zero_grad()
    with zb.policy(defer="nothing"):
        groups = zb.stage_backward_input([m(x).sum()], None, [x], m.parameters())[1]
    zb.stage_backward_weight(m.parameters(), groups, retain_graph=True)
    zb.stage_backward_weight(m.parameters(), groups)
    torch.testing.assert_close([w.grad for w in m.parameters()], wanted)


# Of the block above. By default matrices wait, and the light weights' own gradients; each group counts its output gradient.
HELD = {
    "matrices": 8 * (T * D + T * 2 * D + (T * 2 * D + T * D) + (2 * D + 2 * D + D)),
    "all": 8 * ((2 * T * D + 2 * T * 2 * D) + 2 * T + (T * D + 2 * T * 2 * D + 2 * T * D)),
    "nothing": 8 * sum(w.numel() for w in block().parameters()),
}


@pytest.mark.parametrize("defer", HELD)
def test_bytes_held(defer):
    assert held(block(), defer=defer) == HELD[defer]


def test_bytes_held_without_an_excluded_matrix_are_its_gradient():
    m = block()
    light = [m.norm.weight, m.norm.bias, m.scale, m.shift]
    excluded = [m.b.weight, m.b.bias]  # the node that serves one of them runs whole
    waits = T * D + T * 2 * D  # a's factors
    expected = 8 * waits + sum(w.nbytes for w in light + excluded)
    assert held(m, exclude=[m.b.weight]) == expected
    assert held(m, exclude=iter([m.b.bias])) == expected
    assert held(m, exclude=m.parameters()) == held(m, defer="nothing")
    assert held(m, defer="all", exclude=m.parameters()) == held(m, defer="nothing")
    assert held(m, exclude=[nn.Parameter(torch.ones(1))]) == held(m), "a parameter that the stage has not"


def test_the_parameter_behind_a_computed_weight_is_excluded():
    m = Stage(lambda m, x: x @ (m.w * 2) @ m.v, w=(D, D), v=(D, D))
    assert held(m, exclude=[m.w]) == 8 * (D * D + 2 * T * D)


@pytest.mark.parametrize("defer", ["matrices", "all"])
@pytest.mark.parametrize("names", [["a.weight"], ["a.bias", "scale"], ["norm.weight", "b.weight", "shift"]])
def test_gradients_where_parameters_are_excluded(names, defer):
    """Not by check(), which runs copies: parameters are excluded by identity."""
    m = block()
    ordinary = copy.deepcopy(m)
    with zb.policy(defer=defer, exclude=[m.get_parameter(name) for name in names]):
        for _ in range(3):
            x = fresh(T, D)
            same = x.detach().clone().requires_grad_()
            out, expected = m(x), ordinary(same)
            grad = torch.randn_like(out)
            expected.backward(grad)
            (got,), groups = zb.stage_backward_input([out], [grad], [x], m.parameters())
            zb.stage_backward_weight(m.parameters(), groups)
            assert equal(got, same.grad)
    for w, other in zip(m.parameters(), ordinary.parameters(), strict=True):
        assert equal(w.grad, other.grad)


def test_work_of_an_excluded_parameter_is_done_in_the_input_pass():
    calls = []

    def work(x, grad):
        calls.append(1)
        return x.t() @ grad

    m = Stage(lambda m, x: Asks.apply(x, m.w, None, lambda x, w, g: (zb.defer(work, 1, (x, g)), None)), w=(D, D))
    for excluded, made_in_i in (([], 0), ([m.w], 1)):
        calls.clear()
        with zb.policy(exclude=excluded):
            groups = groups_of(m)
        assert len(calls) == made_in_i
        zb.stage_backward_weight([m.w], groups)
        assert len(calls) == 1


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"defer": "some"}, "defer is 'some'; expected one of 'matrices', 'all', 'nothing'"),
        ({"defer": None}, "defer is None"),
        ({"defer": lambda p: True}, "defer is .*; expected one of"),
        ({"exclude": torch.ones(3)}, "exclude is .*; expected an iterable of parameters"),
        ({"exclude": 1}, "exclude is 1; expected an iterable of parameters"),
        ({"exclude": [torch.ones(3), "w"]}, r"exclude\[1\] is 'w'; expected a parameter"),
        ({"checkpoint": "drop"}, "checkpoint is 'drop'; expected one of 'keep', 'recompute', 'input_pass'"),
        ({"fused": 1}, "fused is 1; expected True or False"),
        ({"main_grad": "yes"}, "main_grad is 'yes'"),
        ({"defr": "all"}, "'defr' is no choice of a policy; expected one of 'defer', 'exclude', .*'main_grad'"),
    ],
)
def test_choices_that_there_are_none_of(choices, message):
    before = zb.get_policy()
    with pytest.raises((TypeError, ValueError), match=message), zb.policy(**choices):
        pass
    with pytest.raises((TypeError, ValueError), match=message):
        zb.set_policy(**choices)
    assert zb.get_policy() == before


def test_blocks_nest_and_go_back():
    def inner():
        with zb.policy(fused=True):
            assert zb.get_policy() == zb.Policy(defer="all", fused=True)
            raise ZeroDivisionError

    assert zb.get_policy() == zb.Policy()
    with zb.policy(defer="all") as outer:
        assert outer == zb.get_policy() == zb.Policy(defer="all")
        with pytest.raises(ZeroDivisionError):
            inner()
        assert zb.get_policy() == outer
    assert zb.get_policy() == zb.Policy()


def test_what_one_call_of_policy_returns_serves_many_blocks():
    excluding = zb.policy(exclude=iter([torch.ones(3)]))
    count = excluding(lambda: len(zb.get_policy().exclude))
    assert [count(), count()] == [1, 1]
    with excluding, excluding:
        assert count() == 1
    assert zb.get_policy() == zb.Policy()


async def coroutine():
    return zb.get_policy()


def generator():
    yield zb.get_policy()


class Coroutine:
    async def __call__(self):
        return zb.get_policy()


@pytest.mark.parametrize(
    ("function", "name"), [(coroutine, "coroutine"), (generator, "generator"), (Coroutine(), "^a Coroutine")]
)
def test_a_function_that_runs_after_its_call_is_refused(function, name):
    with pytest.raises(TypeError, match=f"{name} runs after its call has returned"):
        zb.policy(defer="all")(function)


def test_process_default_holds_in_every_thread_and_a_block_in_its_own():
    seen = {}

    def look(name):
        with ThreadPoolExecutor(1) as pool:
            seen[name] = pool.submit(zb.get_policy).result().defer

    before = zb.set_policy(defer="nothing")
    try:
        look("default")
        with zb.policy(defer="all"):
            look("other thread")
            assert zb.get_policy().defer == "all"
        assert zb.get_policy().defer == "nothing"
    finally:
        zb.set_policy(before)
    assert zb.get_policy() == before
    assert seen == {"default": "nothing", "other thread": "nothing"}


def test_set_policy_within_a_block_is_refused():
    with zb.policy(fused=True), pytest.raises(RuntimeError, match="within a policy\\(\\) block"):
        zb.set_policy(defer="all")
    with pytest.raises(TypeError, match="policy is 'all'; expected a Policy"):
        zb.set_policy("all")
    assert zb.get_policy() == zb.Policy()


def test_policies_are_equal_by_what_they_choose():
    a, b = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    assert zb.Policy(exclude=[a, b]) == zb.Policy(exclude=(b, a)) and hash(zb.Policy()) == hash(zb.Policy())
    assert zb.Policy(exclude=[a]) != zb.Policy(exclude=[b]) and zb.Policy() != "matrices"
    assert zb.Policy(exclude=[a]).as_dict()["exclude"] == ["(2, 2) torch.float32"]
    assert str(zb.Policy()) == ("Policy(defer='matrices', exclude=[], checkpoint='keep', fused=False, main_grad=False)")


def test_environment_variable(monkeypatch):
    code, given = "import zbpipe; print(zbpipe.get_policy())", "defer=all, checkpoint=recompute,fused=1,main_grad=0"
    assert (
        python("-c", code, ZBPIPE_POLICY=given).stdout
        == f"{zb.Policy(defer='all', checkpoint='recompute', fused=True)}\n"
    )
    monkeypatch.setenv("ZBPIPE_POLICY", "")
    assert _policy._from_environment() == zb.Policy()


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("defer=some", "ZBPIPE_POLICY is 'defer=some': defer is 'some'"),
        ("fused=yes", "ZBPIPE_POLICY says 'fused=yes'; expected fused=0 or fused=1"),
        ("all", "ZBPIPE_POLICY says 'all'"),
        ("exclude=w", "ZBPIPE_POLICY says 'exclude=w'"),
    ],
)
def test_an_environment_variable_that_says_nothing_that_there_is(variable, message, monkeypatch):
    monkeypatch.setenv("ZBPIPE_POLICY", variable)
    with pytest.raises(ValueError, match=message):
        _policy._from_environment()


def batch_norm(m, x):
    return F.batch_norm(x, torch.zeros(D, dtype=f64), torch.ones(D, dtype=f64), m.w, m.b, training=True)


LIGHT = {
    "layer norm": lambda m, x: F.layer_norm(x, (D,), m.w, m.b),
    "layer norm, scale alone": lambda m, x: F.layer_norm(x, (D,), m.w),
    "layer norm, shift alone": lambda m, x: F.layer_norm(x, (D,), None, m.b),
    "layer norm of a computed scale": lambda m, x: F.layer_norm(x, (D,), m.w.exp(), m.b),
    "rms norm": lambda m, x: F.rms_norm(x, (D,), m.w),
    "group norm": lambda m, x: F.group_norm(x, 2, m.w, m.b),
    "group norm, scale alone": lambda m, x: F.group_norm(x, 2, m.w),
    "batch norm": batch_norm,
    "scale": lambda m, x: x * m.w,
    "scale by a matrix": lambda m, x: m.matrix * x,
    "shift": lambda m, x: x + m.w,
    "difference": lambda m, x: m.w - x,
    "shift in place": lambda m, x: x.sin().add_(m.b),
    "scale of itself": lambda m, x: (x * m.w) * (x * m.w),
    "bias of a frozen matrix": lambda m, x: torch.addmm(m.rows, x, x.detach().t()),
    "output of a norm": lambda m, x: (h := F.layer_norm(x, (D,), m.w), h.sin()),
}


def light(name):
    return Stage(LIGHT[name], w=(D,), b=(D,), matrix=(T, D), rows=(T,))


@pytest.mark.parametrize("name", LIGHT)
def test_light_weights_that_wait(name):
    with zb.policy(defer="all"):
        check(light(name), (T, D), microbatches=3)


def test_activation_that_a_deferred_norm_reads_is_watched():
    m = Stage(lambda m, x: F.layer_norm(m.kept_h[-1], (D,), m.w), w=(D,))
    x = fresh(T, D)
    m.kept_h = [x * 2]
    with zb.policy(defer="all"):
        _, groups = input_pass(m, x)
    m.kept_h[0].data.add_(0)  # through .data, nobody sees it
    m.kept_h[0].detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        zb.stage_backward_weight(m.parameters(), groups)
    assert m.w.grad is None


@pytest.mark.parametrize("name", LIGHT)
def test_node_that_ran_in_an_input_pass_that_failed_is_spent(name):
    """As after a failed ordinary backward, and not half usable."""
    m = light(name)
    x = fresh(T, D)
    h = x.sin()
    h.register_hook(raising())
    outs = m(h)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    grads = [torch.ones_like(out) for out in outs]
    with zb.policy(defer="all"), pytest.raises(RuntimeError) as error:
        zb.stage_backward_input(outs, grads, [x], m.parameters())
    assert isinstance(error.value.__cause__, Planned)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.backward(outs, grads)
    with pytest.raises(RuntimeError):
        zb.stage_backward_input(outs, grads, [x], m.parameters())


# main_grad


def megatron(m, dtype=f32):
    for w in m.parameters():
        w.main_grad = torch.zeros(w.shape, dtype=dtype)
        w.grad_added_to_main_grad = False


def float32_reference(m, xs, grads):
    """The sum over microbatches in float32 of gradients computed in the weights' dtype."""
    sums = [torch.zeros(w.shape) for w in m.parameters()]
    for x, grad in zip(xs, grads, strict=True):
        for w in m.parameters():
            w.grad = None
        m(x).backward(grad)
        for total, w in zip(sums, m.parameters(), strict=True):
            total += w.grad
    for w in m.parameters():
        w.grad = None
    return sums


@pytest.mark.parametrize("how", ["split", "unsplit", "hooked"])
@pytest.mark.parametrize("dtype", [f32, torch.bfloat16])
def test_main_grad_takes_the_sums(dtype, how):
    net = nn.Sequential(nn.Linear(16, 1200, dtype=dtype), nn.GELU(), nn.Linear(1200, 16, dtype=dtype))
    m = Stage(lambda m, x: m.net(x) * m.scale, net=net, scale=nn.Parameter(torch.ones(16, dtype=dtype)))
    xs = [torch.randn(6, 16, dtype=dtype, requires_grad=True) for _ in range(4)]
    grads = [torch.randn(6, 16, dtype=dtype) for _ in range(4)]
    expected = float32_reference(m, xs, grads)
    dinputs = [x.grad for x in xs]
    for x in xs:
        x.grad = None
    megatron(m)
    calls = []
    if how == "hooked":
        for w in m.parameters():
            w.register_post_accumulate_grad_hook(lambda w: calls.append((w.grad, w.grad_added_to_main_grad)))
    with zb.policy(main_grad=True):
        for x, grad, dinput in zip(xs, grads, dinputs, strict=True):
            if how == "unsplit":
                assert equal(zb.stage_backward(m(x), grad, [x])[0], dinput)
                assert x.grad is None
            else:
                (got,), groups = zb.stage_backward_input([m(x)], [grad], [x], m.parameters())
                assert equal(got, dinput)
                assert zb.stage_backward_weight(m.parameters(), groups) == (None,) * 5
    for w, total in zip(m.parameters(), expected, strict=True):
        assert w.grad is None
        assert w.grad_added_to_main_grad is True
        torch.testing.assert_close(w.main_grad, total, rtol=1e-6, atol=1e-5)
    assert calls == ([(None, True)] * 20 if how == "hooked" else [])


@pytest.mark.parametrize(
    "outputs",
    [lambda y: (y, torch.ones_like(y)), lambda y: (y.sum().view(1), None), lambda y: (y.unbind(), [*y.detach()])],
    ids=["output", "loss", "outputs of one node"],
)
def test_a_second_whole_backward_into_main_grad_is_refused(outputs):
    """As torch.autograd.backward does: a schedule keeps the losses of a step that failed."""
    m, x = block(), fresh(T, D)
    megatron(m, f64)
    output, grads = outputs(m(x))
    with zb.policy(main_grad=True):
        zb.stage_backward(output, grads, [x])
        with pytest.raises(RuntimeError) as error:
            zb.stage_backward(output, grads, [x])
    assert "backward through the graph a second time" in str(error.value.__cause__)


def test_a_policy_within_compiled_code_is_in_force_there_and_nothing_is_said(monkeypatch):
    said = []
    monkeypatch.setattr(sys, "unraisablehook", lambda failed: said.append(failed.exc_value))
    seen = torch._dynamo.disable(lambda: zb.get_policy().defer)

    def run(x):
        with zb.policy(defer="all"):
            return x.sin(), seen()

    assert torch.compile(run, backend="eager")(torch.ones(2))[1] == "all"
    gc.collect()
    assert zb.get_policy().defer == "matrices" and not said


def test_weights_without_main_grad_keep_their_grad():
    m = block()
    m.a.weight.main_grad = torch.zeros(m.a.weight.shape)
    m.b.weight.main_grad = None
    with zb.policy(main_grad=True):
        zb.stage_backward_weight(m.parameters(), groups_of(m))
    assert m.a.weight.grad is None
    assert m.a.weight.main_grad.abs().sum() > 0
    assert all(w.grad is not None for w in m.parameters() if w is not m.a.weight)
    assert not hasattr(m.a.weight, "grad_added_to_main_grad")


def test_main_grad_is_left_alone_unless_asked_for():
    m = block()
    megatron(m)
    zb.stage_backward_weight(m.parameters(), groups_of(m))
    assert all(w.grad is not None and not w.main_grad.any() for w in m.parameters())
    assert not any(w.grad_added_to_main_grad for w in m.parameters())


@pytest.mark.parametrize(
    ("main_grad", "message"),
    [
        (torch.zeros(3), r"main_grad of the weight of float64\[16, 8\] on cpu is float32\[3\] on cpu"),
        (torch.zeros(16, 8, dtype=torch.int64), "is int64"),
        (torch.zeros(16, 8).requires_grad_(), "requires a gradient"),
        (torch.zeros(16, 8, device="meta"), "on meta"),
        (7, "is a int; expected a tensor or None"),
    ],
)
def test_main_grad_that_does_not_fit_is_refused(main_grad, message):
    m = block()
    megatron(m)
    m.a.weight.main_grad = main_grad
    groups = groups_of(m)
    with zb.policy(main_grad=True), pytest.raises((TypeError, ValueError), match=message):
        zb.stage_backward_weight(m.parameters(), groups)
    others = [w for w in m.parameters() if w is not m.a.weight]
    assert all(not w.main_grad.any() and not w.grad_added_to_main_grad for w in others)
    zb.stage_backward_weight(m.parameters(), groups)
    assert all(w.grad is not None for w in m.parameters())


def test_main_grad_of_a_hook_that_raises_is_added_once():
    m = Stage(lambda m, x: (x @ m.a) @ m.b, a=(D, D), b=(D, D))
    megatron(m, f64)
    x = fresh(T, D)
    expected = torch.autograd.grad(m(x).sum(), list(m.parameters()))
    hook, given = raising(), []
    m.a.register_post_accumulate_grad_hook(lambda w: given.append(w) or hook(w))
    _, groups = input_pass(m, x)
    with zb.policy(main_grad=True):
        with pytest.raises(Planned):
            zb.stage_backward_weight(m.parameters(), groups)
        assert given == [m.a]
        zb.stage_backward_weight(m.parameters(), groups)
    for w, total in zip(m.parameters(), expected, strict=True):
        torch.testing.assert_close(w.main_grad, total)


class Interrupting(torch.nn.Parameter):
    """Ctrl-C comes while its flag is put back."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "grad_added_to_main_grad" and value == self.__dict__.get("interrupts_at"):
            del self.__dict__["interrupts_at"]
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_flags_are_put_back_is_not_lost():
    m = Stage(lambda m, x: FusedWithDummy.apply(x, m.a), a=(4, 4))
    m.a = Interrupting(m.a.detach())
    m.a.main_grad, m.a.grad_added_to_main_grad = torch.zeros_like(m.a), "before"
    m.a.interrupts_at = "before"
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C
    try:
        with zb.policy(main_grad=True), pytest.raises(KeyboardInterrupt):
            input_pass(m, fresh(3, 4))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert m.a.grad_added_to_main_grad == "before"


def test_a_backward_into_main_grad_that_failed_leaves_no_cycle():
    m = Stage(lambda m, x: x @ m.a, a=(4, 4))
    megatron(m, f64)
    x = fresh(3, 4)
    out = m(x).sin()
    out.register_hook(raising())
    seen = weakref.ref(out)
    with no_collector():
        with zb.policy(main_grad=True), pytest.raises(RuntimeError, match="Failed to run stage backward"):
            zb.stage_backward(out, torch.ones(3, 4, dtype=f64), [x])
        del out
        assert seen() is None


USES = {
    "apart": lambda product, m, x: product(x, m.a).sin() @ m.b,
    "and a product of the same weight": lambda product, m, x: (product(x, m.a).sin() @ m.a) @ m.b,
    "twice": lambda product, m, x: product(product(x, m.a).sin(), m.a) @ m.b,
    "in no node of I": lambda product, m, x: x @ product(m.b, m.a),
}


@pytest.mark.parametrize("how", ["one by one", "in flight", "unsplit"])
@pytest.mark.parametrize("use", USES)
def test_the_dummy_of_a_fused_kernel_is_left_out(use, how):
    """Nobody resets the flag, which W sets too: only what the kernel's own node returned is left out."""
    shapes = {"a": (4, 4), "b": (4, 4)}
    m = Stage(lambda m, x: USES[use](FusedWithDummy.apply, m, x), **shapes)
    twin = Stage(lambda m, x: USES[use](torch.matmul, m, x), **shapes)
    twin.load_state_dict(m.state_dict())
    for w in m.parameters():
        w.main_grad, w.grad_added_to_main_grad = torch.zeros_like(w), False
    waiting = []
    with zb.policy(main_grad=True):
        for _ in range(6):
            x = fresh()
            grad = torch.randn_like(x)
            twin(x.detach()).backward(grad)
            if how == "unsplit":
                zb.stage_backward(m(x), grad, [x])
                continue
            waiting.append(zb.stage_backward_input([m(x)], [grad], [x], m.parameters())[1])
            if how == "one by one" or len(waiting) == 3:
                for groups in waiting:
                    zb.stage_backward_weight(m.parameters(), groups)
                waiting.clear()
    for w, expected in zip(m.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(w.main_grad, expected.grad)
        assert w.grad is None and w.grad_added_to_main_grad is True


# weights that are computed with a buffer which each forward rewrites


class DelayedScale(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.w, self.write = nn.Parameter(torch.randn(4, 4, dtype=f64)), write
        self.register_buffer("scale", torch.ones(4, dtype=f64))

    def forward(self, x):
        with torch.no_grad():
            self.write(self.scale, x.abs().amax(0) + 0.5)
        return (x / self.scale) @ (self.w * self.scale).t()


def two_in_flight(m, xs, grads):
    before = None
    for x, grad in zip(xs, grads, strict=True):
        out = m(x)
        if before is not None:
            zb.stage_backward_weight(m.parameters(), before)
        _, before = zb.stage_backward_input([out], [grad], [x], m.parameters())
    zb.stage_backward_weight(m.parameters(), before)


@pytest.mark.parametrize("write", [torch.Tensor.copy_, lambda scale, new: scale.data.copy_(new)], ids=["copy_", "data"])
@pytest.mark.parametrize("choice", ["exclude", "defer"])
def test_what_computes_an_excluded_weight_runs_in_the_input_pass(choice, write):
    m = nn.Sequential(nn.Linear(4, 4, dtype=f64), DelayedScale(write), nn.SiLU(), DelayedScale(write))
    twin = copy.deepcopy(m)
    xs, grads = [fresh() for _ in range(3)], [torch.randn(3, 4, dtype=f64) for _ in range(3)]
    for x, grad in zip(xs, grads, strict=True):
        twin(x.detach()).backward(grad)
    computed = [m[1].w, m[3].w]
    with zb.policy(**({"exclude": computed} if choice == "exclude" else {"defer": "nothing"})):
        two_in_flight(m, xs, grads)
    for w, expected in zip(m.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(w.grad, expected.grad)


def test_a_buffer_that_computes_a_weight_is_watched_and_the_advice_helps():
    m = nn.Sequential(nn.Linear(4, 4, dtype=f64), DelayedScale(torch.Tensor.copy_))
    xs, grads = [fresh() for _ in range(2)], [torch.randn(3, 4, dtype=f64) for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"needs where its weights were computed.*policy\(exclude=\[weight\]\)"):
        two_in_flight(m, xs, grads)
    with zb.policy(exclude=[m[1].w]):
        two_in_flight(m, xs, grads)


def test_what_an_output_reaches_by_itself_stays_with_the_weight_pass():
    """A regulariser of the computed weight: the input pass runs nothing of it."""
    m = Stage(lambda m, x: (x @ (m.a * m.s).t(), ((m.a * m.s) ** 2).sum()), a=(4, 4), s=(4,))
    x = fresh()
    out, penalty = m(x)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad([out, penalty], [m.a, m.s], [grad, None], retain_graph=True)
    with zb.policy(exclude=[m.a]):
        _, groups = zb.stage_backward_input([out, penalty], [grad, torch.ones((), dtype=f64)], [x], m.parameters())
        zb.stage_backward_weight(m.parameters(), groups)
    torch.testing.assert_close([m.a.grad, m.s.grad], list(expected))
