"""Hooks: each fires once, with what an ordinary backward gives it, and what it returns counts."""

import pytest
import torch
from support import oracle
from support.oracle import (
    Stage,
    case,
    check,
    fresh,
    input_pass,
    needs_zbpipe,
    small,
    watch_weights,
    weight,
    wrong_on_torch,
    zb,
)
from torch import nn

f64 = torch.float64
TWICE = "runs in I and in W"
NO_ACCUMULATORS = "accumulators do not run"


def doubles(grad):
    return grad * 2.0


def logged(m, name, tensor):
    tensor.register_hook(m.log(name))
    return tensor


def doubled(m, tensor):
    """Its gradient is doubled, and logged then."""
    tensor.register_hook(doubles)
    return logged(m, "after", tensor)


def on_node(m, tensor, *kinds):
    """Hooks of its node: "pre", "post"."""
    for kind in kinds:
        register = tensor.grad_fn.register_prehook if kind == "pre" else tensor.grad_fn.register_hook
        register(m.log(f"{kind} {tensor.grad_fn.name()}"))
    return tensor


def kept(m, tensor):
    m.keep("kept", tensor)
    return tensor


def layer(forward, net):
    return Stage(lambda m, x: forward(m, m.net(x)), net=net.double())


def net():
    return layer(lambda m, h: h * 2.0, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))


# On weights, and what is registered before the stage runs.


def double_two_weights(m):
    doubled(m, m.a)
    m.s.register_hook(doubles)


def watch_accumulators(m):
    """As DDP and FSDP do."""
    m.accumulators = [w.view_as(w).grad_fn.next_functions[0][0] for w in m.parameters()]
    for name, node in zip("abcst", m.accumulators, strict=True):
        node.register_prehook(m.log(f"pre {name}"))
        node.register_hook(m.log(f"post {name}"))


def watch_modules(m):
    for i, part in enumerate(m.net):
        part.register_full_backward_pre_hook(m.log(f"pre {i}", lambda module, grads: grads))
        part.register_full_backward_hook(m.log(f"post {i}", lambda module, ins, outs: [ins, outs]))


def change_gradients_of_modules(m):
    m.net[0].register_full_backward_hook(lambda module, ins, outs: (ins[0] * 2.0,))
    m.net[2].register_full_backward_pre_hook(lambda module, outs: (outs[0] * 3.0,))


def watch_stage(m):
    m.register_full_backward_hook(m.log("stage", lambda module, ins, outs: [ins, outs]))


# Within the stage.


def changed_by_a_prehook(m, x):
    h = x @ m.a
    h.grad_fn.register_prehook(lambda grads: (grads[0] * 2.0,))
    return h.sin()


def changed_by_a_posthook(m, h):
    h.grad_fn.register_hook(lambda grads, _: tuple(g if g is None else g * 2.0 for g in grads))
    return h.sin()


def post_accumulate_on_the_input(m, x):
    x.register_post_accumulate_grad_hook(m.log("x", lambda p: p.grad))
    return x @ m.a


def of_several_tensors(m, x):
    h = x @ m.a
    g = h.sin() @ m.b
    torch.autograd.graph.register_multi_grad_hook((h, g), m.log("all", lambda grads: list(grads)))
    return g * m.s


def removed(m, x):
    h = x @ m.a
    h.register_hook(m.log("removed")).remove()
    h.grad_fn.register_prehook(m.log("removed too")).remove()
    return h.sin()


def in_order(m, x):
    h = x @ m.a
    g = h.sin() @ m.b
    for name, node in (("g", g), ("h", h), ("x", x)):
        node.register_hook(m.log("order", lambda grad, name=name: name))
    return g.sum()


def with_a_backward_of_its_own(m, x):
    """As a reentrant checkpoint's."""
    h = x.sin()

    def nested(grad):
        y = m.s.detach().requires_grad_()
        with torch.enable_grad():
            (y * 3.0).sum().backward()
        m.records.setdefault(("nested", m.microbatch), []).append(y.grad)

    h.register_hook(nested)
    return h @ m.a


def posthook_registered_during_the_input_pass(m, x):
    h = x @ m.a
    node, log = h.grad_fn, m.log("post")
    out = h.sin()
    if node is not None:
        out.register_hook(lambda _: node.register_hook(lambda *_: log()) and None)
    return out


@oracle.table(
    case("weights", lambda m, x: (x @ m.a).sin() @ m.b, setup=lambda m: [logged(m, "a", m.a), logged(m, "b", m.b)]),
    case(
        "weights of several uses get the sum",
        lambda m, x: (x @ m.a).sin() @ m.a + (x * m.s) @ m.a.t() * m.s,
        setup=lambda m: [logged(m, "a", m.a), logged(m, "s", m.s)],
        wrong="backward twice",
    ),
    case("weights' gradients changed", lambda m, x: (x @ m.a).sin() + m.s, setup=double_two_weights),
    case("accumulators", lambda m, x: (x @ m.a).sin() * m.s, setup=watch_accumulators, wrong=NO_ACCUMULATORS),
    case(
        "post-accumulate hooks see the sum so far",
        lambda m, x: (x @ m.a).sin() @ m.a * m.s,
        setup=watch_weights,
        existing=True,
        wrong=NO_ACCUMULATORS,
    ),
    case(
        "post-accumulate hook of the input",
        post_accumulate_on_the_input,
        wrong="the input's .grad is set from outside, so its accumulator does not run",
    ),
    case("outputs of split nodes", lambda m, x: logged(m, "g", logged(m, "h", x @ m.a).sin() * m.s) @ m.b, wrong=TWICE),
    case("activation without weights", lambda m, x: logged(m, "h", x.sin()) @ m.a),
    case("activations' gradients changed", lambda m, x: doubled(m, doubled(m, x @ m.a).sin() @ m.b), wrong=TWICE),
    case("stage output", lambda m, x: logged(m, "out", x @ m.a), wrong=TWICE),
    case("within the weights' own computation", lambda m, x: x @ (w := doubled(m, m.a @ m.b)).sin() + x.cos() @ w),
    case("input", lambda m, x: logged(m, "x", x) @ m.a + x),
    case("input's gradient changed", lambda m, x: (doubled(m, x) @ m.a) * x),
    # Of nodes.
    case("prehooks", lambda m, x: on_node(m, on_node(m, x @ m.a, "pre").sin(), "pre") * m.s, wrong=TWICE),
    case("gradient changed by a prehook", changed_by_a_prehook, wrong=TWICE),
    *(
        case(
            f"posthooks of {name}",
            layer(lambda m, h: on_node(m, on_node(m, h, "post").sin(), "post"), net),
            shape,
            wrong=TWICE,
        )
        for name, net, shape in (
            ("a linear layer", nn.Linear(4, 4), (3, 4)),
            ("a linear layer without bias", nn.Linear(4, 4, bias=False), (3, 4)),
            ("a convolution", nn.Conv1d(2, 3, 2), (2, 2, 5)),
        )
    ),
    case("gradients changed by a posthook", layer(changed_by_a_posthook, nn.Linear(4, 4))),
    case("between product and weight", lambda m, x: x @ logged(m, "view", m.a.view(4, 4))),
    case("nodes of the weights' own computation", lambda m, x: x @ on_node(m, m.a @ m.b, "pre", "post")),
    case("posthook registered during I", posthook_registered_during_the_input_pass, wrong=TWICE),
    # retain_grad.
    case("retained of a split node", lambda m, x: kept(m, x @ m.a).sin() @ m.b, wrong=TWICE),
    case("retained of a plain node", lambda m, x: kept(m, (x @ m.a).sin()) @ m.b),
    case("retained of an output", lambda m, x: kept(m, (x @ m.a).sin() @ m.b), wrong=TWICE),
    case("retained beside a hook", lambda m, x: kept(m, doubled(m, x @ m.a)).sin(), wrong=TWICE),
    case("retained of a computed weight", lambda m, x: x @ kept(m, m.a @ m.b)),
    # Of modules, and others.
    case("modules", net(), setup=watch_modules),
    case("gradients changed by modules' hooks", net(), setup=change_gradients_of_modules),
    case("the whole stage", net(), setup=watch_stage, wrong=TWICE),
    case("several tensors", of_several_tensors),
    case("removed", removed),
    case("in the order of an ordinary backward", in_order, output_grads=oracle.no_grads, wrong=TWICE),
    case("with a backward of its own", with_a_backward_of_its_own),
)
def test_hooks(stage, inputs, options):
    check(stage, *inputs, **options)


@wrong_on_torch(NO_ACCUMULATORS)
def test_optimizer_in_the_backward():
    """A post-accumulate hook that steps and drops the gradient."""

    def step(p):
        with torch.no_grad():
            p.records_of_steps = getattr(p, "records_of_steps", 0) + 1
        p.grad = None

    m = Stage(lambda m, x: (x @ m.a).sin() @ m.b, a=(4, 4), b=(4, 4))
    for w in m.parameters():
        w.register_post_accumulate_grad_hook(step)
    _, groups = input_pass(m, fresh())
    returned = zb.stage_backward_weight(m.parameters(), groups)
    assert returned == (None, None)
    assert [w.records_of_steps for w in m.parameters()] == [1, 1]


def test_hook_removed_between_the_passes_stays_removed():
    m = small(lambda m, x: x @ m.a)
    handle = m.a.register_hook(m.log("a"))
    _, groups = input_pass(m, fresh())
    handle.remove()
    zb.stage_backward_weight(m.parameters(), groups)
    assert m.records == {}


def test_handles_of_hooks_on_split_nodes_can_still_be_removed_after_the_input_pass():
    m, x = small(lambda m, x: x @ m.a), fresh()
    out = m(x)
    handles = [out.register_hook(m.log("t")), out.grad_fn.register_prehook(m.log("n"))]
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    for handle in handles:
        handle.remove()
    zb.stage_backward_weight(m.parameters(), groups)
    assert [len(calls) for calls in m.records.values()] == [1, 1]


def test_no_new_hook_is_left_on_weights_inputs_or_nodes():
    m = Stage(lambda m, x: (x @ m.a).sin(), a=(4, 4))
    x = fresh()
    out = m(x)
    node = out.grad_fn
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    zb.stage_backward_weight(m.parameters(), groups)
    for tensor in (m.a, x, out):
        assert not tensor._backward_hooks
        assert not getattr(tensor, "_post_accumulate_grad_hooks", None)
    assert node.metadata == {}


@wrong_on_torch("finds no accumulators while gradients are off")
@pytest.mark.parametrize("dtype", [f64, torch.float32], ids=["sum", "cast"])
def test_hook_in_the_weight_pass_that_runs_the_input_pass_of_the_next_microbatch(dtype):
    def nested(run):
        def hook(_):
            if run.groups[1] is None:
                run.input(1)

        for k in run.microbatches:
            run.forward(k)
        run.input(0)
        run.stage.a.register_hook(hook)
        run.weight(0)
        assert run.groups[1]
        run.weight(1)

    compute = oracle.sharing(lambda m: m.a + 1.0 if dtype == f64 else m.a.double())
    check(Stage(compute, a=weight(4, 4, dtype=dtype)), (3, 4), orders=(nested,))


@oracle.needs_zbpipe
@pytest.mark.parametrize("plain", [lambda w: w.t(), lambda w: w.view(4, 5)], ids=["transposed", "viewed"])
@pytest.mark.parametrize("how", ["tensor hook", "prehook", "posthook"])
def test_hook_registered_between_product_and_weight_between_the_passes(how, plain):
    m = Stage(lambda m, x: None, a=(5, 4))
    seen = []
    for k in range(2):
        x = fresh()
        t = plain(m.a)
        out = x @ t
        _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
        if how == "tensor hook":
            t.register_hook(lambda grad: seen.append(grad.shape))
        elif how == "prehook":
            t.grad_fn.register_prehook(lambda grads: seen.append(grads[0].shape))
        else:
            t.grad_fn.register_hook(lambda grads, _: seen.append(grads[0].shape))
        zb.stage_backward_weight(m.parameters(), groups)
        assert seen == [(5, 4) if how == "posthook" else (4, 5)] * (k + 1)


@needs_zbpipe
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_nodes_metadata_is_there_in_its_hooks(kind):
    """As where a tracing tool put it, and what a hook adds stays."""
    m, x = Stage(lambda m, x: x @ m.a, a=(4, 4)), fresh()
    out, seen = m(x), []
    node = out.grad_fn
    node.metadata["microbatch"] = 0

    def look(*_):
        seen.append(dict(node.metadata))
        node.metadata["seen"] = True

    (node.register_prehook if kind == "pre" else node.register_hook)(look)
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    assert seen == [{"microbatch": 0}] and node.metadata == {"microbatch": 0, "seen": True}
    zb.stage_backward_weight(m.parameters(), groups)
