"""zbpipe.defer: work that a Function's backward hands over in I is done in W, once, and added as all else is."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import oracle
from support.functions import Asks, FailsAt, Planned, Scaled, hand_over, product_of, raising
from support.oracle import check, fresh, input_pass, late, one_weight_pass, sharing, small, weight, without_collector
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe import _C  # what a compiled backward asks before it cuts itself in two

pytestmark = [pytest.mark.drops_groups, oracle.needs_zbpipe]  # torch's module takes no work over

f64 = torch.float64


# What a Function hands over: each is given `note`, which tells where the work is done.


def handed(note):
    def work(x, grad):
        note()
        return x.mT @ grad, grad.sum(0)

    return lambda x, w, grad: zbpipe.defer(work, weights=(1, 2), saved=(x, grad))


def half(x, grad):
    return x.mT @ grad / 2


def partly(note):
    """The matrix's gradient in two halves; the vector's is returned."""

    def ask(x, w, grad):
        first = zbpipe.defer(lambda x, grad: note() or half(x, grad), weights=1, saved=(x, grad))
        second = zbpipe.defer(lambda x, grad: note() or half(x, grad), weights=(1,), saved=(x, grad))[0]
        return None if first is None else first + second, grad.sum(0)

    return ask


def half_now(note):
    def ask(x, w, grad):
        now = half(x, grad)
        later = zbpipe.defer(lambda x, grad: note() or half(x, grad), weights=1, saved=(x, grad))
        return now if later is None else now + later, grad.sum(0)

    return ask


def as_it_is(note):
    """The bias is a matrix, of the gradient's shape."""
    return lambda x, w, grad: zbpipe.defer(lambda x, g: note() or (x.mT @ g, g), (1, 2), (x, grad))


def vector_alone(note):
    return lambda x, w, grad: (None, zbpipe.defer(lambda grad: note() or grad.sum(0), 2, (grad,)))


def vector_beside(note):
    return lambda x, w, grad: (x.mT @ grad, zbpipe.defer(lambda grad: note() or grad.sum(0), 2, (grad,)))


def by_index(note):
    class Index:
        def __index__(self):
            return 1

    return lambda x, w, grad: (zbpipe.defer(lambda x, g: note() or x.mT @ g, Index(), (x, grad)), grad.sum(0))


def none_and_mended(note):
    """No gradient for the matrix; the vector's is of a dtype that autograd mends."""
    return lambda x, w, grad: zbpipe.defer(lambda grad: note() or (None, grad.sum(0).float()), (1, 2), (grad,))


def by_autograd(note):
    def work(x, grad):
        note()
        w = x.new_zeros(4, 4).requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(x @ w, [w], grad)[0], grad.sum(0)

    return lambda x, w, grad: zbpipe.defer(work, (1, 2), (x, grad))


def adds_itself(which):
    """As fused kernels do: the parameter comes to the work as it is, with its attributes."""

    def how(note):
        def accumulate(x, grad, w):
            note()
            w.main_grad += x.mT @ grad

        def ask(x, w, grad):
            zbpipe.defer(accumulate, weights=which, saved=(x, grad, w))
            return None, grad.sum(0)

        return ask

    return how


def on_a_thread(note):
    """Nobody can say there that a pass runs: at once."""

    def ask(x, w, grad):
        result = []
        work = (lambda x, grad: note() or x.mT @ grad, 1, (x.detach(), grad))
        thread = threading.Thread(target=lambda: result.append(zbpipe.defer(*work)))
        thread.start()
        thread.join()
        return result[0], grad.sum(0)

    return ask


class SavesOutput(Function):
    """tanh(x @ w)."""

    @staticmethod
    def forward(ctx, x, w):
        y = (x @ w).tanh()
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, w, y = ctx.saved_tensors
        dw = zbpipe.defer(lambda x, y, grad: x.mT @ (grad * (1 - y * y)), 1, (x, y, grad))
        return (grad * (1 - y * y)) @ w.mT, dw


class Ruled(Function):
    """x @ w + b with a vmap rule."""

    generate_vmap_rule = True
    forward = staticmethod(product_of)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, w, _ = ctx.saved_tensors
        return grad @ w.mT, *zbpipe.defer(lambda x, grad: (x.mT @ grad, grad.sum(0)), (1, 2), (x, grad))


# Stages. Each is a function of (m, layer, *inputs), where layer(x, w, b, how) is x @ w + b.


def hooked(kind):
    def forward(m, layer, x):
        h = layer(x @ m.c, m.a, m.s)
        hook = m.log(kind)
        {"tensor": h.register_hook, "pre": h.grad_fn.register_prehook, "post": h.grad_fn.register_hook}[kind](hook)
        return h.sin()

    return forward


def hooked_within(m, layer, x):
    """The node gets its post hook when I runs."""
    h = layer(x @ m.c, m.a, m.s)
    node, hook = h.grad_fn, m.log("post")
    h.register_hook(lambda _: node.register_hook(hook) and None)
    return h.sin()


def in_a_region(reentrant, computed):
    def forward(m, layer, x):
        def region(x):
            return layer(x, computed(m, x), m.s).sin()

        return checkpoint(region, x, use_reentrant=reentrant) @ m.b

    return forward


def parameter(m, x):
    return m.a


def gated(m, x):
    return m.a * x.mean()


def batched(m, layer, x):
    x = torch.vmap(lambda x: Ruled.apply(x, m.a, None))(x)
    return torch.vmap(lambda x: Ruled.apply(x, m.a, m.s))(x)


def compiled(m, layer, x):
    run = torch.compile(lambda x: Asks.apply(x, m.a, m.s, hand_over).sin(), backend="aot_eager")
    return run(x) @ m.c


def shared_cast():
    product = sharing(lambda m: m.a.float().double())

    def forward(m, layer, x):
        product(m, x)  # makes it, once
        return layer(x, m.shared, m.s)

    return forward


def main_grad(m):
    m.a.main_grad = torch.zeros_like(m.a)
    m.kept["a", "main"] = oracle.MainGrad(m.a)


class Keep:
    """Keeps an object alive as long as the oracle's run."""

    grad = None

    def __init__(self, what):
        self.what = what


def on_accumulators(m):
    for name, w in m.named_parameters():
        node = torch.autograd.graph.get_gradient_edge(w).node
        node.register_prehook(m.log(f"pre {name}"))
        node.register_hook(m.log(f"post {name}", lambda outputs, grads: grads))
        m.kept[name, "node"] = Keep(node)


def freeze(*names):
    def setup(m):
        for name in names:
            getattr(m, name).requires_grad_(False)

    return setup


def unlike_autograd(forward, *inputs, **options):
    """Where autograd alone gives other gradients, or other Functions are called than `layer`."""
    return forward, "W", inputs, {"is_like_plain": False, **options}


def row(forward, *inputs, where="W", **options):
    """where: in which pass the work is done. Its input is of 3 x 4 unless given."""
    return forward, where, inputs, options


def ones():
    return torch.ones(3, 4, dtype=f64)


STAGES = {
    "two layers": row(
        lambda m, layer, x: layer(layer(x, m.a, m.s).sin(), m.b, None),
        exact=True,
        orders=(*oracle.ORDERS, one_weight_pass),
    ),
    "existing gradients": row(lambda m, layer, x: layer(x, m.a, m.s), existing=True, exact=True),
    "accumulators' hooks": row(lambda m, layer, x: layer(x, m.a, m.s), setup=on_accumulators),
    "hook of its result": row(hooked("tensor")),
    "prehook of its node": row(hooked("pre")),
    "posthook of its node": row(hooked("post"), where="I"),  # it is owed all gradients at once
    "posthook that I puts there": row(hooked_within, where="I"),
    "two works, and one returned": row(lambda m, layer, x: layer(x, m.a, m.s, partly).sin()),
    "one half returned": row(lambda m, layer, x: layer(x, m.a, m.s, half_now).sin()),
    "by numbers of other types": row(lambda m, layer, x: layer(x, m.a, m.s, by_index).sin()),
    "by autograd": row(lambda m, layer, x: layer(x, m.a, m.s, by_autograd).sin()),
    "on another thread of the backward": row(lambda m, layer, x: layer(x, m.a, m.s, on_a_thread), where="I"),
    "None, and a gradient to mend": unlike_autograd(
        lambda m, layer, x: layer(x, m.a, m.s, none_and_mended).sin(), rtol=1e-6, atol=0
    ),
    "adds it itself, and names it": unlike_autograd(
        lambda m, layer, x: layer(x, m.a, m.s, adds_itself(1)).sin() @ m.b, setup=main_grad
    ),
    "adds it itself, and names none": unlike_autograd(
        lambda m, layer, x: layer(x, m.a, m.s, adds_itself(None)).sin() @ m.b, setup=main_grad
    ),
    "its output is saved": unlike_autograd(lambda m, layer, x: SavesOutput.apply(x, m.a)),
    "a vmap rule": unlike_autograd(lambda m, layer, x: Ruled.apply(Ruled.apply(x, m.a, None), m.a, m.s)),
    # What a backward within vmap computes on does not live until W: it runs at once.
    "within vmap": unlike_autograd(batched, (2, 3, 4)),
    "within compiled code": unlike_autograd(compiled),  # traced, it is part of the compiled backward
    # Which weights.
    "also of a product": row(lambda m, layer, x: layer(x @ m.a, m.a, m.s).sin() @ m.a.mT),
    "given twice": row(lambda m, layer, x: layer(x, m.a, m.a, as_it_is).sin(), (4, 4)),
    "two Functions'": row(lambda m, layer, x: layer(layer(x, m.a, m.s), m.a, m.s)),
    "two views'": row(lambda m, layer, x: layer(layer(x, m.a.mT, m.s), m.a.view(16).view(4, 4), None)),
    "a view of a view": row(lambda m, layer, x: layer(x, m.a.reshape(2, 8)[:, :].reshape(4, 4).mT, None) @ m.c),
    "a slice": row(lambda m, layer, x: layer(x, torch.cat([m.a, m.a])[2:6].mT, None).sin() @ m.c),
    "a cast": row(lambda m, layer, x: layer(x, m.a.mT.float().double(), None).sin() @ m.c),
    "a cast for each of two": row(
        lambda m, layer, x: layer(layer(x, m.a.float().double(), m.s), m.a.float().double(), m.s)
    ),
    "a cast that all microbatches share": row(shared_cast()),
    "computed": row(lambda m, layer, x: layer(x, (m.a.sin() * m.s[:, None]).mT, None).sin() @ m.c),
    "computed by a Function that hands over": row(lambda m, layer, x: layer(x, Scaled.apply(m.a).mT, None) @ m.c),
    "computed from the input": row(
        lambda m, layer, x: layer(x, m.a * torch.sigmoid((x @ m.s).mean()), m.s), (4, 4), where="I"
    ),
    "its only one is": row(
        lambda m, layer, x: layer(x, m.a * torch.sigmoid((x @ m.s).mean()), None), (4, 4), where="I"
    ),
    "both are": row(lambda m, layer, x: layer(x, m.a * x.mean(), m.s * x.sum()), (4, 4), where="I"),
    "of the input alone": row(lambda m, layer, x: layer(x, x.mT @ x, m.s) @ m.a, (4, 4), where="I"),
    "a view of the input": row(lambda m, layer, x: layer(x[:, :4], x[:4, :4], m.s) @ m.a, (4, 4), where="I"),
    "the input itself": row(lambda m, layer, x: layer(x[:4], x.view(4, 4), None) @ m.a, (4, 4), where="I"),
    "one is, one is not": row(lambda m, layer, x: layer(layer(x, gated(m, x), m.s), m.a, m.s), where=None),
    "behind another": row(lambda m, layer, x: layer(x, layer(m.a, gated(m, x), None), m.s), (4, 4), where=None),
    **{
        f"a{view} stage input{bias}": row(
            lambda m, layer, x, w, of=of, b=b: layer(x, of(w), m.s if b else None) @ m.a * m.t,
            *((3, 4), (4, 4)),
            where="I",
        )
        for view, of in ((" ", lambda w: w), (" view of a", lambda w: w.mT))
        for bias, b in (("", False), (", and a bias", True))
    },
    # Whether anyone asks.
    "frozen": row(lambda m, layer, x: layer(layer(x, m.a, m.s), m.b, None), setup=freeze("a", "s")),
    "frozen beside one that is not": row(lambda m, layer, x: layer(x, m.a, m.s), setup=freeze("a"), where=None),
    "not given to the passes": row(lambda m, layer, x: layer(layer(x, m.a, m.s), m.b, None), weights=lambda m: [m.b]),
    "one given, one not": row(lambda m, layer, x: layer(x, m.a, m.s), weights=lambda m: [m.a]),
    # There the whole Function runs in W, and its work at once.
    "no input needs a gradient": row(lambda m, layer, x: layer(x, m.a, m.s).sin() @ m.c, ones),
    "no input, no bias": row(lambda m, layer, x: layer(x, m.a, None), ones),
    "no input, a computed weight, no bias": row(lambda m, layer, x: layer(x, m.a.sin(), None) @ m.b, ones),
    "no input, frozen": row(lambda m, layer, x: layer(x, m.a, m.s), ones, setup=freeze("a")),
    # Policies.
    "nothing waits": row(lambda m, layer, x: layer(x, m.a, m.s).sin(), where="I", policy={"defer": "nothing"}),
    "vectors do not": row(
        lambda m, layer, x: layer(x, ones()[0].diag(), m.s, vector_alone).sin(), where="I", policy={"defer": "matrices"}
    ),
    "a vector beside a matrix does not": row(
        lambda m, layer, x: layer(x, m.a, m.s, vector_beside).sin(), where="I", policy={"defer": "matrices"}
    ),
    "vectors too": row(
        lambda m, layer, x: layer(x, ones()[0].diag(), m.s, vector_alone).sin(), policy={"defer": "all"}
    ),
    "checkpointed": row(in_a_region(False, parameter)),
    "checkpointed, computed from the input": row(in_a_region(False, gated), where="I"),
    # An ordinary backward within I.
    "reentrant": row(in_a_region(True, parameter), where="backward", untouched=False),
    "reentrant, computed from the input": row(in_a_region(True, gated), where="backward", untouched=False),
    **{
        f"checkpointed, {choice}": row(
            in_a_region(False, parameter), where="I" if choice == "input_pass" else "W", policy={"checkpoint": choice}
        )
        for choice in ("keep", "recompute", "input_pass")
    },
}


class Phases:
    """Which pass runs, and where `note()` was called: "forward", "I", "W" or "backward"."""

    def __init__(self):
        self.calls, self.phase = [], "forward"

    def __call__(self):
        self.calls.append(self.phase)


@pytest.fixture
def phases(monkeypatch):
    note = Phases()

    def watch(owner, name, phase):
        run = getattr(owner, name)

        def wrapped(*args, **kwargs):
            before, note.phase = note.phase, phase
            try:
                return run(*args, **kwargs)
            finally:
                note.phase = before

        monkeypatch.setattr(owner, name, wrapped)

    watch(zbpipe, "stage_backward_input", "I")
    watch(zbpipe, "stage_backward_weight", "W")
    watch(torch.autograd, "backward", "backward")
    return note


def with_layer(forward, layer):
    return small(lambda m, *inputs: forward(m, layer, *inputs))


def gradients_of(stage, inputs):
    inputs = [x.clone().detach().requires_grad_() for x in inputs]
    stage(*inputs).sum().backward()
    return [leaf.grad for leaf in (*inputs, *stage.parameters())]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces a Function
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", STAGES)
def test_work(name, watched, phases):
    """Done once, where it should; gradients and hooks as in an ordinary backward, and as without a Function."""
    forward, where, inputs, options = STAGES[name]
    options = {"orders": (late, oracle.groups_reversed), **options}
    inputs, prepare, is_like_plain = inputs or ((3, 4),), options.pop("setup", None), options.pop("is_like_plain", True)
    if watched:  # no hook's call belongs to a microbatch then
        options["orders"] = [order for order in options["orders"] if order is not one_weight_pass]
    policies = [options.pop("policy")] if "policy" in options else [{"defer": "matrices"}, {"defer": "all"}]

    def layer(x, w, b, how=handed):
        return Asks.apply(x, w, b, how(phases))

    def setup(m):
        if prepare:
            prepare(m)
        for of, w in m.named_parameters():
            if watched and w.requires_grad and "weights" not in options:
                w.register_hook(m.log(f"hook {of}"))
                w.register_post_accumulate_grad_hook(m.log(f"post {of}", lambda w: w.grad))

    stage = with_layer(forward, layer)
    for policy in policies:
        phases.calls.clear()
        with zbpipe.policy(**policy):
            check(stage, *inputs, setup=setup, **options)
        if is_like_plain and where:
            assert {phase for phase in phases.calls if phase != "backward"} == {where} - {"backward"}
            split = sum(phase != "backward" for phase in phases.calls)
            assert 2 * split == len(phases.calls) or where == "backward" or name == "not given to the passes"
    if is_like_plain:  # by autograd alone, without any Function of ours
        plain = with_layer(forward, lambda x, w, b, how=handed: product_of(x, w, b))
        plain.load_state_dict(stage.state_dict())
        given = [fresh(*shape) if isinstance(shape, tuple) else shape() for shape in inputs]
        oracle.close(gradients_of(stage, given), gradients_of(plain, given), "gradients")


def split(x, w, ask, *others):
    """I of Asks behind and before a sine: the groups. The outputs' gradients are ones."""
    out = Asks.apply(x.sin(), w, None, ask).sin()
    return zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w, *others])[1]


def expected(x, w):
    return torch.autograd.grad((x.sin() @ w).sin().sum(), [w])[0]


def test_autograd_grad_computes_only_what_it_is_asked_for(phases):
    x, w, b = fresh(), weight(4, 5), weight(5)
    out = Asks.apply(x, w, b, handed(phases)).sin()
    (dx,) = torch.autograd.grad(out.sum(), [x], retain_graph=True)
    assert phases.calls == []
    (dw,) = torch.autograd.grad(out.sum(), [w])
    assert phases.calls == ["forward"]
    torch.testing.assert_close((dx, dw), torch.autograd.grad((x @ w + b).sin().sum(), [x, w]))


def test_an_ordinary_backward_can_be_differentiated():
    x, w = fresh(3, 3), fresh(3, 3)
    torch.autograd.gradcheck(lambda x, w: Asks.apply(x, w, None, hand_over), (x, w))
    torch.autograd.gradgradcheck(lambda x, w: Asks.apply(x, w, None, hand_over), (x, w))


@pytest.mark.parametrize("fused", [False, True])
def test_main_grad_of_another_dtype(fused):
    """Accumulated in float32 by zbpipe; the reference adds each microbatch's gradient itself."""
    w = nn.Parameter(torch.randn(4, 5, dtype=torch.bfloat16))
    w.main_grad = torch.ones(4, 5)
    total, seen = torch.ones(4, 5), []
    w.register_hook(seen.append)
    for _ in range(2):
        x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
        out = Asks.apply(x, w, None, hand_over)
        grad = torch.randn_like(out)
        total += (x.mT @ grad).detach()
        with zbpipe.policy(main_grad=True, fused=fused):
            _, groups = zbpipe.stage_backward_input([out], [grad], [x], [w])
            zbpipe.stage_backward_weight([w], groups)
    assert w.grad is None and len(seen) == 2
    torch.testing.assert_close(w.main_grad, total, rtol=0, atol=0)


# Errors and retries


def failing(failures, calls):
    """Raises what is left of the failures, one in each call."""

    def work(x, grad):
        calls.append(len(failures))
        if failures:
            raise failures.pop()
        return x.mT @ grad

    return lambda x, w, grad: (zbpipe.defer(work, weights=1, saved=(x, grad)), None)


FAILING = {
    "directly": lambda m, x, ask: Asks.apply(x @ m.b, m.a, None, ask),
    "behind a cast": lambda m, x, ask: Asks.apply(x @ m.b, m.a.mT.mT, None, ask),
    "behind nodes that have saved tensors": lambda m, x, ask: Asks.apply(x @ m.b.exp(), m.a.exp() * m.a, None, ask),
}


@pytest.mark.parametrize("how", FAILING)
@pytest.mark.parametrize("watched", [False, True])
def test_a_weight_pass_whose_work_raised_can_be_repeated(how, watched):
    """Twice; then everything has been added once, and work that had returned is not called again."""
    failures, calls, other_calls, hooks = [ValueError("first"), ValueError("second")], [], [], []
    first, second = failing(failures, calls), failing([], other_calls)
    m = small(lambda m, x: Asks.apply(FAILING[how](m, x, first).sin(), m.c, None, second))
    for w in (m.a, m.b, m.c) if watched else ():
        w.register_hook(lambda grad: hooks.append(1))
    x = fresh()
    _, groups = input_pass(m, x)
    for message in ("second", "first"):
        with pytest.raises(ValueError, match=message):
            zbpipe.stage_backward_weight(m.parameters(), groups)
    zbpipe.stage_backward_weight(m.parameters(), groups)
    assert calls == [2, 1, 0] and other_calls == [0] and len(hooks) == (3 if watched else 0)
    assert all(group.spent for group in groups)
    torch.testing.assert_close([m.a.grad, m.b.grad, m.c.grad], [*torch.autograd.grad(m(x).sum(), [m.a, m.b, m.c])])


@pytest.mark.parametrize("watched", [False, True])
def test_work_is_not_called_again_when_a_hook_raises_behind_it(watched):
    calls = []
    m = small(lambda m, x: Asks.apply(x, m.a, None, failing([], calls)).sin() @ m.b)
    (m.a if watched else m.b).register_hook(raising())
    x = fresh()
    _, groups = input_pass(m, x)
    with pytest.raises(Planned):
        zbpipe.stage_backward_weight(m.parameters(), groups)
    zbpipe.stage_backward_weight(m.parameters(), groups)
    assert calls == [0]
    wanted = torch.autograd.grad(((x @ m.a).sin() @ m.b).sum(), [m.a, m.b])
    torch.testing.assert_close((m.a.grad, m.b.grad), wanted)


def test_retained_groups_do_the_work_again():
    calls, x, w = [], fresh(), weight(4, 4)
    groups = split(x, w, failing([], calls))
    for retain in (True, True, False):
        zbpipe.stage_backward_weight([w], groups, retain_graph=retain)
    assert calls == [0, 0, 0]
    torch.testing.assert_close(w.grad, 3 * expected(x, w))


WRONG = {
    "too few": ((torch.zeros(4, 4, dtype=f64),), "returned 1 gradients; expected 2"),
    "no sequence": (torch.zeros(4, 4, dtype=f64), "returned 1 gradients; expected 2"),
    "no tensor": ((3, None), "returned a int as gradient 0; expected a tensor or None"),
    "wrong shape": ((torch.zeros(3, 3, dtype=f64), None), "(?i)invalid gradient"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("watched", [False, True])
def test_results_that_are_no_gradients_are_refused(what, watched):
    value, message = WRONG[what]
    m = small(lambda m, x: Asks.apply(x, m.a, m.s, lambda *_: zbpipe.defer(lambda: value, (1, 2))).sin())
    if watched:
        m.a.register_hook(lambda grad: None)
    x = fresh()
    _, groups = input_pass(m, x)
    with pytest.raises(Exception, match=message):
        zbpipe.stage_backward_weight(m.parameters(), groups)
    assert m.a.grad is None and m.s.grad is None
    with pytest.raises(Exception, match=message):
        m(x).sum().backward()


def test_a_gradient_from_work_that_adds_them_itself_is_refused():
    """As a backward that calls the function at once refuses it."""
    m = small(lambda m, x: Asks.apply(x, m.a, m.s, lambda *_: zbpipe.defer(lambda: m.a * 1.0, None) or (None, None)))
    x = fresh()
    _, groups = input_pass(m, x)
    for run in (lambda: zbpipe.stage_backward_weight(m.parameters(), groups), lambda: m(x).sum().backward()):
        with pytest.raises(Exception, match="with weights=None returned a Tensor; expected None"):
            run()
    assert m.a.grad is None


REFUSED = {
    "function": (lambda x, w, g: zbpipe.defer(3, 1), TypeError, "function is 3; expected a callable"),
    "saved": (lambda x, w, g: zbpipe.defer(print, 1, [x]), TypeError, "saved is a list; expected a tuple"),
    "weights": (lambda x, w, g: zbpipe.defer(print, "w"), TypeError, "weights names 'w'; expected a weight's position"),
    "a tensor": (lambda x, w, g: zbpipe.defer(print, (w,)), TypeError, "weights names a Parameter; expected a weight"),
    "bool": (
        lambda x, w, g: zbpipe.defer(print, (True,)),
        TypeError,
        "weights names True; expected a weight's position",
    ),
    "empty": (lambda x, w, g: zbpipe.defer(print, ()), ValueError, "weights is empty"),
    "twice": (lambda x, w, g: zbpipe.defer(print, (1, 1)), ValueError, r"names a position twice: \(1, 1\); expected"),
    "position": (lambda x, w, g: zbpipe.defer(print, 4), ValueError, "weights names argument 4 of the forward of Asks"),
    "negative": (lambda x, w, g: zbpipe.defer(print, (1, -1)), ValueError, r"weights names argument -1 of"),
    "huge": (lambda x, w, g: zbpipe.defer(print, 1 << 80), ValueError, "weights names argument 9223372036854775807 of"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_arguments_are_refused_before_anything_is_called(what):
    ask, error, message = REFUSED[what]
    x, w = fresh(3, 3), weight(3, 3)
    out = Asks.apply(x, w, None, ask)
    with pytest.raises(RuntimeError) as failed:
        zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    for call in (lambda: raise_cause(failed.value), lambda: Asks.apply(x, w, None, ask).sum().backward()):
        with pytest.raises(error, match=message):
            call()
    assert w.grad is None


def raise_cause(error):
    raise error.__cause__


def will_defer(weights):
    """What a compiled backward asks before it cuts itself in two."""
    return _C.defer(None, weights, ())


FORMS = {
    "a tensor for a tuple": ((1,), lambda dw: dw, lambda got: got[0]),
    "a tuple for a position": (1, lambda dw: (dw,), lambda got: got),
    "a list": ((1,), lambda dw: [dw], lambda got: got[0]),
    "None for a tuple": ((1,), lambda dw: None, lambda got: got[0]),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces a Function
@pytest.mark.parametrize("form", FORMS)
def test_what_the_function_returns_may_have_each_form_also_where_it_is_compiled(form):
    weights, given, taken = FORMS[form]

    def ask(x, w, grad):
        return taken(zbpipe.defer(lambda x, grad: given(x.mT @ grad), weights, (x, grad))), None

    def run(x, w):
        return Asks.apply(x, w, None, ask).sin()

    def gradients(run):
        return torch.autograd.grad(run(x, w).sum(), [x, w], allow_unused=True)

    torch._dynamo.reset()
    x, w = fresh(), weight(4, 4)
    expected = gradients(run)
    assert (expected[1] is None) == form.startswith("None")
    for compiler in (torch.compile, zbpipe.compile):
        torch.testing.assert_close(gradients(compiler(run, backend="aot_eager")), expected)


def test_without_a_backward_the_function_is_called():
    assert torch.equal(zbpipe.defer(torch.neg, 1, (torch.ones(2),)), -torch.ones(2))
    assert zbpipe.defer(lambda: None, (0, 1)) == (None, None)
    assert not will_defer((0,))


@pytest.mark.parametrize(
    ("is_split", "listed", "choices", "said"),
    [
        (True, True, {}, (True, False, False, True)),
        (True, True, {"defer": "nothing"}, (False,) * 4),
        (True, False, {}, (False,) * 4),
        (False, True, {}, (False,) * 4),
    ],
)
def test_will_defer_says_what_defer_would_do(is_split, listed, choices, said):
    asked = []

    def ask(x, w, grad):
        asked.append((will_defer((1,)), will_defer((1, 0)), will_defer((0,)), will_defer(None)))
        return x.mT @ grad, None

    x, w, other = fresh(3, 3), weight(3, 3), weight(3, 3)
    out = Asks.apply(x, w, None, ask) @ other
    with zbpipe.policy(**choices):
        if is_split:
            zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w, other] if listed else [other])
        else:
            out.sum().backward()
    assert asked == [said]


# Memory


def telling(given):
    """Its work is given the weight too, and tells what it is given."""

    def work(x, grad, w):
        given.extend((x, grad, w))
        return x.mT @ grad

    return lambda x, w, grad: (zbpipe.defer(work, weights=1, saved=(x, grad, w)), None)


def test_saved_tensors_are_counted_each_storage_once_and_parameters_are_not():
    given, x, w = [], fresh(64, 32), weight(32, 32)
    groups = split(x, w, telling(given))
    (group,) = groups
    assert group.bytes_held == zbpipe.memory.held(groups).bytes == 2 * 64 * 32 * 8  # the input and the output gradient
    weights, _, (task,) = group._described
    assert task[1] == -1  # handed over
    assert [(role, shape) for role, _, _, shape, *_ in task[5]] == [("saved", (64, 32)), ("saved", (64, 32))]
    assert weights[0] is w and all(ends == [(0, -1)] for *_, ends in task[5])
    zbpipe.stage_backward_weight([w], groups)
    x, grad, same_w = given
    assert same_w is w
    assert x.grad_fn is None and not x.requires_grad and not grad.requires_grad
    assert group.bytes_held == 0


def test_a_stage_input_is_counted_and_goes_with_its_gradient():
    """It is a leaf that requires a gradient, as parameters are."""
    x, w = fresh(64, 32), weight(32, 32)
    out = Asks.apply(x, w, None, telling([]))
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    assert groups[0].bytes_held == 2 * 64 * 32 * 8
    kept = weakref.ref(x)
    del x
    assert kept() is None


@pytest.mark.parametrize("how", ["weight pass", "dropped"])
def test_everything_is_freed_at_once(how):
    """Without the garbage collector: nothing is in a cycle."""

    class Called:
        def __call__(self, x, grad):
            return x.mT @ grad

    with without_collector():
        work, w = Called(), weight(4, 4)
        kept = weakref.ref(work)
        groups = split(fresh(), w, lambda x, w, grad, work=work: (zbpipe.defer(work, 1, (x, grad)), None))
        del work
        assert kept() is not None
        if how == "weight pass":
            zbpipe.stage_backward_weight([w], groups)
        else:
            del groups
        assert kept() is None


class Queue:
    """Of a module that keeps its groups, and whose work asks it."""

    def __init__(self, w):
        self.groups = split(fresh(), w, lambda x, w, grad: (zbpipe.defer(self.compute, 1, (x, grad)), None))

    def compute(self, x, grad):
        return x.mT @ grad


def test_groups_that_their_own_work_reaches_are_garbage_when_nobody_else_has_them():
    w = weight(4, 4)
    gc.collect()
    queue = Queue(w)
    gone, group = weakref.ref(queue), weakref.ref(queue.groups[0])
    gc.collect()
    assert queue.groups[0].bytes_held == 2 * 3 * 4 * 8
    del queue
    assert gone() is not None
    gc.collect()
    assert gone() is None and group() is None
    assert w.grad is None


@pytest.mark.parametrize("hooked", [False, True])
def test_a_gradient_that_work_returns_becomes_the_weights_own(hooked):
    """It is taken, not copied, where nobody else has it."""
    addresses, w = [], weight(4, 4)

    def work(x, grad):
        result = x.mT @ grad
        addresses.append(result.data_ptr())
        return result

    if hooked:
        w.register_hook(lambda grad: None)
    groups = split(fresh(), w, lambda x, w, grad: (zbpipe.defer(work, 1, (x, grad)), None))
    zbpipe.stage_backward_weight([w], groups)
    assert w.grad.data_ptr() == addresses[-1]


def test_a_gradient_that_somebody_else_has_is_copied():
    buffer, w = torch.ones(4, 4, dtype=f64), weight(4, 4)
    groups = split(fresh(), w, lambda x, w, grad: (zbpipe.defer(lambda: buffer, 1), None))
    zbpipe.stage_backward_weight([w], groups)
    w.grad.add_(1)
    assert torch.equal(buffer, torch.ones(4, 4, dtype=f64))


# What runs around it


class Outer(Function):
    """(x @ w).sin() @ v by autograd within: its backward runs one over an inner Function that hands over too."""

    @staticmethod
    def forward(ctx, x, w, v, inner, outer):
        ctx.save_for_backward(x, w, v)
        ctx.inner, ctx.outer = inner, outer
        return (x @ w).sin() @ v

    @staticmethod
    def backward(ctx, grad):
        x, w, v = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = Asks.apply(Asks.apply(x, w, None, ctx.inner).sin(), v, None, ctx.inner)
            dx, dw = torch.autograd.grad(out, [x, w], grad)
        outer = ctx.outer

        def work(x, w, grad):
            outer()
            return (x @ w).sin().mT @ grad

        return dx, dw, zbpipe.defer(work, weights=2, saved=(x, w.detach(), grad)), None, None


def test_a_backward_within_the_functions_backward_runs_its_work_at_once(phases):
    outer = []
    inner = handed(phases)
    m = small(lambda m, x: Outer.apply(x, m.a, m.b, inner, lambda: outer.append(phases.phase)) @ m.c)
    check(m, (3, 4), orders=(late,))
    assert phases.calls[:2] == ["I"] * 2 and outer[:2] == ["W"] * 2


@pytest.mark.parametrize("device", ["cpu", "xpu", "mps", "hpu"])
def test_work_sees_autocast_of_any_device_as_it_was_where_it_was_handed_over(device):
    """Whether the device is there does not matter for that."""
    seen = []

    def work(x, grad):
        seen.append((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
        assert not torch.is_autocast_cache_enabled()  # what is cast here has no history
        return x.mT @ grad

    x, w = fresh(4, 4), weight(4, 4)
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    try:
        for on, dtype in ((True, torch.bfloat16), (False, torch.float16)):
            out = Asks.apply(x, w, None, lambda x, w, grad: (zbpipe.defer(work, 1, (x, grad)), None))
            torch.set_autocast_enabled(device, on)
            torch.set_autocast_dtype(device, dtype)
            _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
            torch.set_autocast_enabled(device, not on)
            torch.set_autocast_dtype(device, torch.float16)
            zbpipe.stage_backward_weight([w], groups)
            assert torch.is_autocast_enabled(device) == (not on) and torch.is_autocast_cache_enabled()
            assert torch.get_autocast_dtype(device) == torch.float16
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
    assert seen[0] == (True, torch.bfloat16)
    assert seen[1][0] is False


def test_both_passes_on_threads_and_of_several_models_at_once():
    def train(_):
        x, w = fresh(), weight(4, 4)
        groups = split(x, w, hand_over)
        with ThreadPoolExecutor(1) as other:
            other.submit(zbpipe.stage_backward_weight, [w], groups).result(timeout=60)
        torch.testing.assert_close(w.grad, expected(x, w))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, range(4)))


@pytest.mark.parametrize("watched", [False, True])
def test_results_of_work_are_kept_when_memory_runs_out_right_behind_it(watched):
    calls, m = [], small(lambda m, x: Asks.apply(x, m.a, m.s, ask))

    def work(x, grad):
        calls.append(1)
        return (x.mT @ grad).requires_grad_(), grad.sum(0).requires_grad_()  # which have a history, to be lost

    def ask(x, w, grad):
        return zbpipe.defer(work, weights=(1, 2), saved=(x, grad))

    if watched:
        m.s.register_hook(lambda grad: None)
    x = fresh()
    _, groups = input_pass(m, x)
    with FailsAt(1, torch.ops.aten.detach), pytest.raises(torch.OutOfMemoryError):
        zbpipe.stage_backward_weight(m.parameters(), groups)
    zbpipe.stage_backward_weight(m.parameters(), groups)
    assert calls == [1]
    grad = torch.ones(3, 4, dtype=f64)
    torch.testing.assert_close((m.a.grad, m.s.grad), (x.detach().mT @ grad, grad.sum(0)))
    assert m.a.grad.grad_fn is None and not m.a.grad.requires_grad
