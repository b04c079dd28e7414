"""Hooks: each fires once, with what an ordinary backward gives it, and what it returns counts."""

import pytest
import torch
from support.oracle import Stage, check, needs_zbpipe, no_grads, sharing, weight, wrong_on_torch, zb
from torch import nn

f64 = torch.float64


def doubles(grad):
    return grad * 2.0


def test_tensor_hook_on_a_weight():
    check(
        Stage(lambda m, x: (x @ m.a).sin() @ m.b, a=(4, 4), b=(4, 4)),
        (3, 4),
        setup=lambda m: [w.register_hook(m.log(n)) for n, w in m.named_parameters()],
    )


@wrong_on_torch("backward twice")
def test_tensor_hook_on_a_weight_of_several_uses_gets_the_sum():
    def forward(m, x):
        return (x @ m.a).sin() @ m.a + (x * m.s) @ m.a.t() * m.s

    check(
        Stage(forward, a=(4, 4), s=(4,)),
        (3, 4),
        setup=lambda m: [m.a.register_hook(m.log("a")), m.s.register_hook(m.log("s"))],
    )


def test_tensor_hook_that_changes_the_gradient_of_a_weight():
    def setup(m):
        m.a.register_hook(doubles)
        m.a.register_hook(m.log("after"))
        m.b.register_hook(doubles)

    check(Stage(lambda m, x: (x @ m.a).sin() + m.b, a=(4, 4), b=(4,)), (3, 4), setup=setup)


def hooked(m, name, tensor):
    tensor.register_hook(m.log(name))
    return tensor


@wrong_on_torch("runs in I and in W")
def test_tensor_hook_on_the_output_of_a_split_node():
    def forward(m, x):
        h = hooked(m, "h", x @ m.a)
        g = hooked(m, "g", h.sin() * m.s)
        return g @ m.b

    check(Stage(forward, a=(4, 4), s=(4,), b=(4, 4)), (3, 4))


def test_tensor_hook_on_an_activation_without_weights():
    check(Stage(lambda m, x: hooked(m, "h", x.sin()) @ m.a, a=(4, 4)), (3, 4))


@wrong_on_torch("runs in I and in W")
def test_tensor_hook_that_changes_the_gradient_of_an_activation():
    def forward(m, x):
        h = x @ m.a
        h.register_hook(doubles)
        h.register_hook(m.log("after"))
        h = h.sin() @ m.b
        h.register_hook(doubles)
        return h

    check(Stage(forward, a=(4, 4), b=(4, 4)), (3, 4))


@wrong_on_torch("runs in I and in W")
def test_tensor_hook_on_a_stage_output():
    check(Stage(lambda m, x: hooked(m, "out", x @ m.a), a=(4, 4)), (3, 4))


def test_tensor_hook_within_the_weights_own_computation():
    def forward(m, x):
        w = hooked(m, "w", m.a @ m.b)
        w.register_hook(doubles)
        return x @ w.sin() + x.cos() @ w

    check(Stage(forward, a=(4, 4), b=(4, 4)), (3, 4))


def test_tensor_hook_on_an_input():
    check(Stage(lambda m, x: hooked(m, "x", x) @ m.a + x, a=(4, 4)), (3, 4))


def test_tensor_hook_that_changes_the_gradient_of_an_input():
    def forward(m, x):
        x.register_hook(doubles)
        x.register_hook(m.log("after"))
        return (x @ m.a) * x

    check(Stage(forward, a=(4, 4)), (3, 4))


@wrong_on_torch("prehooks on split nodes run in I and in W")
def test_node_prehook():
    def forward(m, x):
        h = x @ m.a
        h.grad_fn.register_prehook(m.log("split"))
        g = h.sin()
        g.grad_fn.register_prehook(m.log("plain"))
        return g * m.s

    check(Stage(forward, a=(4, 4), s=(4,)), (3, 4))


@wrong_on_torch("prehooks on split nodes run in I and in W")
def test_node_prehook_that_changes_the_gradient():
    def forward(m, x):
        h = x @ m.a
        h.grad_fn.register_prehook(lambda grads: (grads[0] * 2.0,))
        return h.sin()

    check(Stage(forward, a=(4, 4)), (3, 4))


@wrong_on_torch("post-hooks of split nodes run in I and in W")
@pytest.mark.parametrize("bias", [True, False])
def test_node_posthook_on_a_linear_layer(bias):
    def forward(m, x):
        h = m.net(x)
        h.grad_fn.register_hook(m.log("split"))
        g = h.sin()
        g.grad_fn.register_hook(m.log("plain"))
        return g

    check(Stage(forward, net=nn.Linear(4, 4, bias=bias, dtype=f64)), (3, 4))


def test_node_posthook_that_changes_every_gradient():
    def forward(m, x):
        h = m.net(x)
        h.grad_fn.register_hook(lambda grads, _: tuple(g if g is None else g * 2.0 for g in grads))
        return h.sin()

    check(Stage(forward, net=nn.Linear(4, 4, dtype=f64)), (3, 4))


@wrong_on_torch("post-hooks of split nodes run in I and in W")
def test_node_posthook_on_a_convolution():
    def forward(m, x):
        h = m.net(x)
        h.grad_fn.register_hook(m.log("conv"))
        return h.sin()

    check(Stage(forward, net=nn.Conv1d(2, 3, 2, dtype=f64)), (2, 2, 5))


def test_node_hooks_within_the_weights_own_computation():
    def forward(m, x):
        w = m.a @ m.b
        w.grad_fn.register_prehook(m.log("pre"))
        w.grad_fn.register_hook(m.log("post"))
        return x @ w

    check(Stage(forward, a=(4, 4), b=(4, 4)), (3, 4))


def accumulator(w):
    return w.view_as(w).grad_fn.next_functions[0][0]


@wrong_on_torch("accumulators do not run")
def test_hooks_on_the_accumulators_of_weights():
    """As DDP and FSDP do."""

    def setup(m):
        m.accumulators = [accumulator(w) for w in m.parameters()]
        for name, node in zip("ab", m.accumulators, strict=True):
            node.register_prehook(m.log(f"pre {name}"))
            node.register_hook(m.log(f"post {name}"))

    check(Stage(lambda m, x: (x @ m.a).sin() * m.b, a=(4, 4), b=(4,)), (3, 4), setup=setup)


@wrong_on_torch("accumulators do not run")
def test_post_accumulate_hook_on_weights_sees_the_sum_so_far():
    def setup(m):
        for name, w in m.named_parameters():
            w.register_post_accumulate_grad_hook(m.log(name, lambda p: p.grad))

    check(Stage(lambda m, x: (x @ m.a).sin() @ m.a * m.b, a=(4, 4), b=(4,)), (3, 4), setup=setup, existing=True)


@wrong_on_torch("accumulators do not run")
def test_optimizer_in_the_backward():
    """A post-accumulate hook that steps and drops the gradient."""

    def step(p):
        with torch.no_grad():
            p.records_of_steps = getattr(p, "records_of_steps", 0) + 1
        p.grad = None

    m = Stage(lambda m, x: (x @ m.a).sin() @ m.b, a=(4, 4), b=(4, 4))
    for w in m.parameters():
        w.register_post_accumulate_grad_hook(step)
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    returned = zb.stage_backward_weight(m.parameters(), groups)
    assert returned == (None, None)
    assert [w.records_of_steps for w in m.parameters()] == [1, 1]


@wrong_on_torch("the input's .grad is set from outside, so its accumulator does not run")
def test_post_accumulate_hook_on_an_input():
    def forward(m, x):
        x.register_post_accumulate_grad_hook(m.log("x", lambda p: p.grad))
        return x @ m.a

    check(Stage(forward, a=(4, 4)), (3, 4))


runs_twice = wrong_on_torch("the hook runs in I and in W")


@pytest.mark.parametrize(
    "what", [pytest.param("split", marks=runs_twice), "plain", pytest.param("output", marks=runs_twice)]
)
def test_retain_grad(what):
    def forward(m, x):
        h = x @ m.a
        g = h.sin()
        out = g @ m.b
        m.keep("h", {"split": h, "plain": g, "output": out}[what])
        return out

    check(Stage(forward, a=(4, 4), b=(4, 4)), (3, 4))


@wrong_on_torch("runs in I and in W")
def test_retain_grad_beside_a_hook_that_changes_the_gradient():
    def forward(m, x):
        h = x @ m.a
        h.register_hook(doubles)
        m.keep("h", h)
        return h.sin()

    check(Stage(forward, a=(4, 4)), (3, 4))


def test_retain_grad_on_the_weights_own_computation():
    def forward(m, x):
        w = m.a @ m.b
        m.keep("w", w)
        return x @ w

    check(Stage(forward, a=(4, 4), b=(4, 4)), (3, 4))


def layers():
    return nn.Sequential(nn.Linear(4, 4, dtype=f64), nn.Tanh(), nn.Linear(4, 4, dtype=f64))


def test_module_backward_hooks():
    def setup(m):
        for i, layer in enumerate(m.net):
            layer.register_full_backward_pre_hook(m.log(f"pre {i}", lambda module, grads: grads))
            layer.register_full_backward_hook(m.log(f"post {i}", lambda module, ins, outs: [ins, outs]))

    check(Stage(lambda m, x: m.net(x) * 2.0, net=layers()), (3, 4), setup=setup)


def test_module_backward_hooks_that_change_gradients():
    def setup(m):
        m.net[0].register_full_backward_hook(lambda module, ins, outs: (ins[0] * 2.0,))
        m.net[2].register_full_backward_pre_hook(lambda module, outs: (outs[0] * 3.0,))

    check(Stage(lambda m, x: m.net(x) * 2.0, net=layers()), (3, 4), setup=setup)


@wrong_on_torch("runs in I and in W")
def test_module_backward_hook_on_the_whole_stage():
    def setup(m):
        m.register_full_backward_hook(m.log("stage", lambda module, ins, outs: [ins, outs]))

    check(Stage(lambda m, x: m.net(x) * 2.0, net=layers()), (3, 4), setup=setup)


def test_multi_grad_hook():
    def forward(m, x):
        h = x @ m.a
        g = h.sin() @ m.b
        torch.autograd.graph.register_multi_grad_hook((h, g), m.log("all", lambda grads: list(grads)))
        return g * m.s

    check(Stage(forward, a=(4, 4), b=(4, 4), s=(4,)), (3, 4))


def test_hook_that_was_removed_does_not_fire():
    def forward(m, x):
        h = x @ m.a
        h.register_hook(m.log("removed")).remove()
        h.grad_fn.register_prehook(m.log("removed too")).remove()
        return h.sin()

    check(Stage(forward, a=(4, 4)), (3, 4))


def test_hook_removed_between_the_passes_stays_removed():
    m = Stage(lambda m, x: x @ m.a, a=(4, 4))
    handle = m.a.register_hook(m.log("a"))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    handle.remove()
    zb.stage_backward_weight(m.parameters(), groups)
    assert m.records == {}


def test_handles_of_hooks_on_split_nodes_can_still_be_removed_after_the_input_pass():
    m = Stage(lambda m, x: x @ m.a, a=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    handles = [out.register_hook(m.log("t")), out.grad_fn.register_prehook(m.log("n"))]
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    for handle in handles:
        handle.remove()
    zb.stage_backward_weight(m.parameters(), groups)
    assert [len(calls) for calls in m.records.values()] == [1, 1]


@wrong_on_torch("hooks on split nodes run in I and in W")
def test_hooks_run_in_the_order_of_an_ordinary_backward():
    def forward(m, x):
        h = x @ m.a
        g = h.sin() @ m.b
        for name, node in (("g", g), ("h", h), ("x", x)):
            node.register_hook(m.log("order", lambda grad, name=name: name))
        return g.sum()

    check(Stage(forward, a=(4, 4), b=(4, 4)), (3, 4), output_grads=no_grads)


def test_hook_that_runs_a_backward_of_its_own():
    """As a reentrant checkpoint does."""

    def forward(m, x):
        h = x.sin()

        def nested(grad):
            y = m.side.detach().requires_grad_()
            with torch.enable_grad():
                (y * 3.0).sum().backward()
            m.records.setdefault(("nested", m.microbatch), []).append(y.grad)

        h.register_hook(nested)
        return h @ m.a

    check(Stage(forward, a=(4, 4), side=(2,)), (3, 4))


def test_no_new_hook_is_left_on_weights_inputs_or_nodes():
    m = Stage(lambda m, x: (x @ m.a).sin(), a=(4, 4))
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
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

    compute = sharing(lambda m: m.a + 1.0 if dtype == f64 else m.a.double())
    check(Stage(compute, a=weight(4, 4, dtype=dtype)), (3, 4), orders=(nested,))


@wrong_on_torch("runs in I and in W")
def test_posthook_registered_on_a_split_node_by_a_hook_during_the_input_pass():
    def forward(m, x):
        h = x @ m.a
        node, log = h.grad_fn, m.log("post")
        out = h.sin()
        if node is not None:
            out.register_hook(lambda _: node.register_hook(lambda *_: log()) and None)
        return out

    check(Stage(forward, a=(4, 4)), (3, 4))


@needs_zbpipe
@pytest.mark.parametrize("how", ["tensor hook", "prehook", "posthook"])
def test_hook_registered_on_a_transposed_weight_between_the_passes(how):
    m = Stage(lambda m, x: None, a=(5, 4))
    seen = []
    for k in range(2):
        x = torch.randn(3, 4, dtype=f64, requires_grad=True)
        t = m.a.t()
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
