"""zbpipe.stores: modules written for a store of delayed weight gradients, or with backward_dw(), take part."""

import collections
import copy
import gc
import io
import queue
import threading
import weakref

import pytest
import torch
from support.functions import Affine, Product
from support.oracle import MainGrad, Stage, check, late, needs_zbpipe, watch_weights, weight
from support.processes import in_own_process
from torch import nn
from torch.autograd import Function

import zbpipe
from zbpipe.stores import WeightGradStore, run_backward_dw

pytestmark = needs_zbpipe  # torch's module takes no work over

f64 = torch.float64


class InTransformerEnginesStyle(Affine):
    """x @ w + b. Asks its module's store whether to delay, puts tensors and a function of them."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors

        def gemm(x, grad):
            return x.mT @ grad, grad.sum(0), "an extra result"

        dw = db = None
        if ctx.given.delay_wgrad_compute():
            ctx.given.put([x, grad], gemm)
        else:
            dw, db, _ = gemm(x, grad)
        return grad @ w.mT, dw, db, None


class InGroupsStyle(Product):
    """x @ w; the product is written into a tensor that is among what was put."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors

        def gemm(xs, grads, outs):
            for x, grad, out in zip(xs, grads, outs, strict=True):
                torch.mm(x.mT, grad, out=out)

        dw = torch.empty_like(w)
        if ctx.given.delay_wgrad_compute():
            ctx.given.put([[x], [grad], [dw]], gemm)
            dw = None
        else:
            gemm([x], [grad], [dw])
        return grad @ w.mT, dw, None


class InMegatronsStyle(Product):
    """x @ w that adds to w.main_grad itself, after a preparation that may communicate."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors

        def prepare(async_op):
            assert async_op is False
            return x.detach(), grad

        def process(x, grad):
            w.main_grad.add_(x.mT @ grad)

        if ctx.given.split_bw():
            ctx.given.put(w, prepare, process)
        else:
            process(x, grad)
        return grad @ w.mT, None, None


class InDualPipesStyle(Product):
    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors

        def add():
            w.main_grad.add_(x.detach().mT @ grad)

        ctx.given.put(add) if ctx.given.enabled else add()
        return grad @ w.mT, None, None


@pytest.mark.parametrize("watched", [False, True])
def test_a_store_whose_functions_return_gradients(watched):
    def forward(m, x):
        store = WeightGradStore(weights=(1, 2), gradients=lambda result, arguments: result[:2])
        return InTransformerEnginesStyle.apply(x @ m.c, m.a, m.b, store).sin()

    stage = Stage(forward, a=(4, 5), b=(5,), c=(4, 4))
    check(stage, (3, 4), setup=watch_weights if watched else lambda m: None)


def test_a_store_whose_functions_write_into_their_arguments():
    def forward(m, x):
        store = WeightGradStore(weights=1, gradients=lambda result, arguments: arguments[2][0])
        return InGroupsStyle.apply(x @ m.c, m.a, store).sin()

    check(Stage(forward, a=(4, 5), c=(4, 4)), (3, 4))


@pytest.mark.parametrize("function", [InMegatronsStyle, InDualPipesStyle])
@pytest.mark.parametrize("watched", [False, True])
def test_a_store_whose_functions_add_themselves(function, watched):
    def setup(m):
        m.a.main_grad = torch.zeros_like(m.a)
        m.kept["a", "main"] = MainGrad(m.a)
        if watched:
            watch_weights(m)

    store = WeightGradStore()
    stage = Stage(lambda m, x: function.apply(x @ m.c, m.a, HeldByReference(store)).sin(), a=(4, 5), c=(4, 4))
    check(stage, (3, 4), setup=setup)
    store.flush(0)
    store.pop(chunk=0)
    store.clear()
    store.assert_empty()


class HeldByReference:
    """The oracle copies stages; the store is one for all."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_work_that_is_put_waits_for_the_weight_pass():
    order = []

    class Tells(InDualPipesStyle):
        @staticmethod
        def backward(ctx, grad):
            ctx.given.put(lambda: order.append("work"))
            return grad, None, None

    x, w = torch.randn(3, 3, requires_grad=True), nn.Parameter(torch.randn(3, 3))
    out = Tells.apply(x, w, WeightGradStore())
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    order.append("I is over")
    zbpipe.stage_backward_weight([w], groups)
    assert order == ["I is over", "work"]


class PutsAlways(Product):
    """Never asks its store."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        ctx.given.put([x, grad], lambda x, grad: x.mT @ grad)
        return grad @ w.mT, None, None


def test_what_loops_call_to_switch_and_to_flush_does_nothing():
    """In the order of DualPipe's and zero-bubble Megatron's loops, around I and W."""
    store = WeightGradStore()
    x, w = torch.randn(5, 3, dtype=f64, requires_grad=True), weight(3, 4)
    for function in (InDualPipesStyle, InMegatronsStyle):
        w.main_grad = torch.zeros_like(w)
        store.clear()
        store.disable_split_bw()
        store.enable_split_bw()
        out = function.apply(x.tanh(), w, store)
        with store.set_split_bw(False):
            store.enabled = True
            _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], iter([w]))
            store.enabled = False
        store.flush(chunk=0, seq_split_idx=0)
        assert store.queue_size(0, 0) == store.queue_size(chunk=1) == 0
        assert store.funcs_queue.empty()
        store.pop(chunk=0)
        store.assert_empty()
        assert not w.main_grad.any()
        zbpipe.stage_backward_weight(iter([w]), groups)
        torch.testing.assert_close(w.main_grad, x.detach().tanh().mT @ torch.ones_like(out))
        out = function.apply(x.tanh(), w, store)
        store.enabled = True
        out.sum().backward()  # nobody would pop
        torch.testing.assert_close(w.main_grad, 2 * x.detach().tanh().mT @ torch.ones_like(out))


def test_what_is_put_without_asking_is_added_in_an_ordinary_backward_too():
    x, w = torch.randn(3, 3, requires_grad=True), nn.Parameter(torch.randn(3, 3))
    hooks = []
    w.register_hook(hooks.append)
    PutsAlways.apply(x, w, WeightGradStore(w)).sum().backward()
    expected = x.detach().mT @ torch.ones(3, 3)
    torch.testing.assert_close(w.grad, expected)
    assert len(hooks) == 2 and hooks[1] is None  # for the put, and for the None that the Function returns
    w.grad = None
    doubled = w * torch.full_like(w, 2.0)  # saves its factors
    PutsAlways.apply(x, doubled, WeightGradStore(doubled)).sum().backward()
    torch.testing.assert_close(w.grad, 2 * expected)
    with pytest.raises(ValueError, match=r"weights\[0\] is a position"):
        PutsAlways.apply(x, w, WeightGradStore(1)).sum().backward()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="gradients is given and weights is None"):
        WeightGradStore(gradients=lambda result, arguments: result)
    store = WeightGradStore()
    for arguments in ((), (3,), (1, 2, 3, print), (torch.ones(1), print)):
        with pytest.raises(TypeError, match=r"put\(\) was called with"):
            store.put(*arguments)
    with pytest.raises(TypeError, match="Linear has no method backward_dw"):
        run_backward_dw(nn.Linear(2, 2))
    layer = Delayed(2, 2)
    handle = run_backward_dw(layer)
    with pytest.raises(ValueError, match="called for this Delayed before"):
        run_backward_dw(layer)
    handle.remove()
    run_backward_dw(layer).remove()
    assert not layer._forward_hooks and not layer._forward_pre_hooks


class Delayed(nn.Module):
    """A linear layer in the style of TransformerEngine's: its backward queues, backward_dw() computes and sets .grad."""

    def __init__(self, rows, columns, adds=False):
        super().__init__()
        self.w = weight(rows, columns)
        self.b = weight(columns)
        self.queue = queue.Queue()
        self.adds = adds

    def __deepcopy__(self, memo):
        copied = Delayed(*self.w.shape, self.adds)
        copied.load_state_dict(self.state_dict())
        run_backward_dw(copied)
        return copied

    def forward(self, x):
        return DelayedFunction.apply(x, self.w, self.b, self.queue)

    def backward_dw(self):
        x, grad = self.queue.get_nowait()
        dw, db = x.mT @ grad, grad.sum(0)
        if self.adds and self.w.grad is not None:
            dw = self.w.grad.add_(dw)
        self.w.grad, self.b.grad = dw, db


class DelayedFunction(Affine):
    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        ctx.given.put((x.detach(), grad))
        return grad @ w.mT, None, None, None


class Plain(nn.Module):
    """What `Delayed` computes, by autograd alone."""

    def __init__(self, rows, columns):
        super().__init__()
        self.w = weight(rows, columns)
        self.b = weight(columns)

    def forward(self, x):
        return x @ self.w + self.b


def delayed_and_plain(adds=False):
    delayed = nn.Sequential(Delayed(4, 6, adds), nn.Tanh(), Delayed(6, 3, adds))
    plain = nn.Sequential(Plain(4, 6), nn.Tanh(), Plain(6, 3))
    plain.load_state_dict(delayed.state_dict())
    for layer in (delayed[0], delayed[2]):
        run_backward_dw(layer)
    return delayed, plain


def batches(count=2, needs_grad=True):
    torch.manual_seed(3)
    return [torch.randn(5, 4, dtype=f64, requires_grad=needs_grad) for _ in range(count)]


def assert_same_gradients(delayed, plain):
    for (name, w), expected in zip(delayed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(w.grad, expected.grad, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_backward_dw_is_called_in_the_weight_pass(adds, needs_grad, reverse):
    delayed, plain = delayed_and_plain(adds)
    seen, expected_seen = [], []
    for net, log in ((delayed, seen), (plain, expected_seen)):
        for w in net.parameters():
            w.register_hook(lambda grad, log=log: log.append(grad.clone()))
    inputs, groups = batches(needs_grad=needs_grad), []
    for x in inputs:
        out = delayed(x)
        dinputs, group = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], delayed.parameters())
        groups.append(group)
        if needs_grad:
            (expected,) = torch.autograd.grad(plain(x).sum(), [x])
            torch.testing.assert_close(dinputs[0], expected)
            assert all(w.grad is None for w in delayed.parameters())
            assert delayed[0].queue.qsize() == len(groups)
    expected_seen.clear()
    for group in reversed(groups) if reverse else groups:
        zbpipe.stage_backward_weight(delayed.parameters(), group)
    for x in inputs:
        plain(x).sum().backward()
    assert delayed[0].queue.empty() and delayed[2].queue.empty()
    assert_same_gradients(delayed, plain)
    assert len(seen) == len(expected_seen) == 8


def test_backward_dw_is_called_at_once_in_an_ordinary_backward():
    delayed, plain = delayed_and_plain()
    for x in batches():
        delayed(x).sum().backward()
        plain(x).sum().backward()
    assert_same_gradients(delayed, plain)
    with torch.no_grad():
        assert torch.equal(delayed(batches()[0]), plain(batches()[0]))


def test_a_backward_for_the_inputs_alone_keeps_the_modules_queue_in_step():
    delayed, plain = delayed_and_plain()
    first, second = batches()
    torch.autograd.grad(delayed(first).sum(), [first])
    assert delayed[0].queue.empty() and all(w.grad is None for w in delayed.parameters())
    delayed(second).sum().backward()
    plain(second).sum().backward()
    assert_same_gradients(delayed, plain)


def test_backward_dw_that_raises_can_be_repeated():
    delayed, plain = delayed_and_plain()
    (x,) = batches(1)
    out = delayed(x)
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], delayed.parameters())
    entry = delayed[0].queue.get()
    with pytest.raises(queue.Empty):
        zbpipe.stage_backward_weight(delayed.parameters(), groups)
    delayed[0].queue.put(entry)
    zbpipe.stage_backward_weight(delayed.parameters(), groups)
    plain(x).sum().backward()
    assert_same_gradients(delayed, plain)


def test_the_handle_takes_the_hook_away():
    layer = Delayed(4, 3)
    run_backward_dw(layer).remove()
    (x,) = batches(1)
    layer(x).sum().backward()
    assert layer.queue.qsize() == 1 and layer.w.grad is None


def test_frozen_weights_and_a_call_without_tensors():
    layer = Delayed(4, 3)
    run_backward_dw(layer)
    with pytest.raises(TypeError, match="Delayed was called without a floating-point tensor"):
        layer(torch.ones(2, 4, dtype=torch.int64))
    layer.requires_grad_(False)
    (x,) = batches(1)
    layer(x).sum().backward()
    assert layer.queue.qsize() == 1


def test_backward_dw_into_main_grad():
    """The policy's main_grad holds for what backward_dw leaves in .grad."""
    delayed, plain = delayed_and_plain()
    for w in delayed.parameters():
        w.main_grad = torch.zeros_like(w)
    for x in batches():
        out = delayed(x)
        with zbpipe.policy(main_grad=True):
            _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], delayed.parameters())
            thread = threading.Thread(target=weight_pass_in_main_grad, args=(delayed, groups))
            thread.start()
            thread.join()
        plain(x).sum().backward()
    for w, expected in zip(delayed.parameters(), plain.parameters(), strict=True):
        assert w.grad is None
        torch.testing.assert_close(w.main_grad, expected.grad)


def weight_pass_in_main_grad(net, groups):
    with zbpipe.policy(main_grad=True):
        zbpipe.stage_backward_weight(net.parameters(), groups)


def test_the_oracle_agrees_about_backward_dw():
    """Copied, so that each copy has a hook of its own; hooks of the weights counted."""

    def forward(m, x):
        return m.layer(x @ m.c).sin()

    check(Stage(forward, layer=Delayed(4, 5), c=(4, 4)), (3, 4), setup=watch_weights, orders=(late,))


# ---- whose entry


def input_pass(net, x):
    out = net(x)
    return zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], net.parameters())[1]


def plain_gradients(plain, x):
    """Of one microbatch, in the module's order."""
    return torch.autograd.grad(plain(x).sum(), list(plain.parameters()))


def weight_pass(net, groups):
    """What it adds, in the module's order."""
    for w in net.parameters():
        w.grad = None
    zbpipe.stage_backward_weight(net.parameters(), groups)
    return [w.grad for w in net.parameters()]


def assert_gradients_of(got, plain, x):
    for grad, expected in zip(got, plain_gradients(plain, x), strict=True):
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_each_weight_pass_gets_the_gradients_of_its_own_microbatch(adds, order):
    delayed, plain = delayed_and_plain(adds)
    inputs = batches(3)
    groups = [input_pass(delayed, x) for x in inputs]
    for k in order:
        assert_gradients_of(weight_pass(delayed, groups[k]), plain, inputs[k])
    assert delayed[0].queue.empty() and delayed[2].queue.empty()


@pytest.mark.parametrize("dropped", [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}, {0, 1, 2}])
def test_groups_that_are_dropped_leave_no_trace(dropped):
    delayed, plain = delayed_and_plain()
    for w in delayed.parameters():
        w.main_grad = torch.randn_like(w)
    kept = [w.main_grad.clone() for w in delayed.parameters()]
    inputs = batches(4)
    groups = [input_pass(delayed, x) for x in inputs[:3]]
    for k in dropped:
        groups[k] = None
    for k in {0, 1, 2} - dropped:
        assert_gradients_of(weight_pass(delayed, groups[k]), plain, inputs[k])
    assert_gradients_of(weight_pass(delayed, input_pass(delayed, inputs[3])), plain, inputs[3])
    assert delayed[0].queue.empty() and delayed[2].queue.empty()
    for w, main_grad in zip(delayed.parameters(), kept, strict=True):
        assert torch.equal(w.main_grad, main_grad)


class AddsElsewhere(Delayed):
    """Adds to main_grad itself, as fused kernels do."""

    def backward_dw(self):
        x, grad = self.queue.get_nowait()
        for w, dw in ((self.w, x.mT @ grad), (self.b, grad.sum(0))):
            w.main_grad.add_(dw)
            w.grad_added_to_main_grad = True


def adding_elsewhere():
    delayed, plain = AddsElsewhere(4, 3), Plain(4, 3)
    plain.load_state_dict(delayed.state_dict())
    for w in delayed.parameters():
        w.main_grad = torch.zeros_like(w)
        w.grad_added_to_main_grad = False
    run_backward_dw(delayed)
    return delayed, plain


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_groups_that_are_dropped_leave_no_trace_in_main_grad(order):
    delayed, plain = adding_elsewhere()
    inputs = batches(3)
    groups = [input_pass(delayed, x) for x in inputs]
    assert not delayed.w.grad_added_to_main_grad
    groups[1] = None
    for k in order:
        zbpipe.stage_backward_weight(delayed.parameters(), groups[k])
        plain(inputs[k]).sum().backward()
    assert delayed.queue.empty() and delayed.w.grad is None and delayed.w.grad_added_to_main_grad
    for w, expected in zip(delayed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(w.main_grad, expected.grad)


def test_main_grad_is_the_same_object_with_the_same_bits_after_a_dropped_group():
    delayed, _ = adding_elsewhere()
    first, second = batches(2)
    input_pass(delayed, first)
    buffer = delayed.w.main_grad
    buffer.fill_(0.1)
    delayed.queue.queue[0][0].fill_(1e30)  # 0.1 + 1e30 - 1e30 is 0
    groups = input_pass(delayed, second)
    zbpipe.stage_backward_weight(delayed.parameters(), groups)
    torch.testing.assert_close(buffer, 0.1 + second.detach().mT @ torch.ones(5, 3, dtype=f64))
    assert delayed.w.main_grad is buffer


def test_explain_leaves_the_queue_in_step():
    delayed, plain = delayed_and_plain()
    (x,) = batches(1)
    for _ in range(2):
        zbpipe.explain(delayed, torch.full((5, 4), 100.0, dtype=f64))
    delayed(x).sum().backward()
    plain(x).sum().backward()
    assert_same_gradients(delayed, plain)
    assert delayed[0].queue.empty()


def test_explain_tells_of_weights_that_were_given():
    layer = Delayed(4, 3)
    run_backward_dw(layer, [layer.w, layer.b])
    explanation = zbpipe.explain(layer, torch.randn(5, 4, dtype=f64))
    assert all("W" in plan.runs_in for plan in explanation.parameters)
    assert layer.w.grad is None


def test_an_ordinary_backward_between_input_and_weight_pass():
    delayed, plain = delayed_and_plain()
    first, second, third = batches(3)
    waiting = input_pass(delayed, first), input_pass(delayed, third)
    delayed(second).sum().backward()
    plain(second).sum().backward()
    assert_same_gradients(delayed, plain)
    assert_gradients_of(weight_pass(delayed, waiting[1]), plain, third)
    assert_gradients_of(weight_pass(delayed, waiting[0]), plain, first)


def test_gradients_that_were_computed_for_another_go_with_their_group():
    delayed, _ = delayed_and_plain()
    first, second = batches(2)
    waiting, groups = input_pass(delayed, first), input_pass(delayed, second)
    kept = []
    compute = delayed[0].backward_dw
    delayed[0].backward_dw = lambda: (compute(), kept.append(weakref.ref(delayed[0].w.grad)))
    zbpipe.stage_backward_weight(delayed.parameters(), groups)
    assert len(kept) == 2 and kept[0]() is not None
    gc.disable()
    try:
        del waiting
        assert kept[0]() is None
    finally:
        gc.enable()


def test_a_module_that_is_called_several_times():
    layer, plain = Delayed(4, 4), Plain(4, 4)
    plain.load_state_dict(layer.state_dict())
    run_backward_dw(layer)

    def twice(layer):
        return lambda x: (layer(layer(x).sin()) * layer(x.cos())).sum()

    inputs = batches(3)
    groups = []
    for x in inputs:
        groups.append(zbpipe.stage_backward_input([twice(layer)(x)], None, [x], layer.parameters())[1])
    groups[0] = None
    for k in (2, 1):
        got = weight_pass(layer, groups[k])
        expected = torch.autograd.grad(twice(plain)(inputs[k]), list(plain.parameters()))
        for grad, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(grad, wanted)
    assert layer.queue.empty()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("checkpoint", ["keep", "recompute", "input_pass"])
def test_checkpointed(reentrant, checkpoint):
    delayed, plain = delayed_and_plain()

    def forward(net, x):
        return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=reentrant).sin()

    inputs, groups = batches(3), []
    with zbpipe.policy(checkpoint=checkpoint):
        for x in inputs:
            out = forward(delayed, x)
            groups.append(zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], delayed.parameters())[1])
        for group in reversed(groups):
            zbpipe.stage_backward_weight(delayed.parameters(), group)
    for x in inputs:
        forward(plain, x).sum().backward()
    assert delayed[0].queue.empty() and delayed[2].queue.empty()
    assert_same_gradients(delayed, plain)


def test_forwards_without_a_backward():
    delayed, plain = delayed_and_plain()
    x, y = batches(2)
    delayed(y)
    with torch.no_grad():
        delayed(y)
    delayed.eval()
    with torch.inference_mode():
        delayed(y.detach().clone())
    assert_gradients_of(weight_pass(delayed, input_pass(delayed, x)), plain, x)


class Fails(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no backward")


class FailsBehind(Delayed):
    """Its backward fails after the entry was queued, where `fails` is set."""

    fails = False

    def forward(self, x):
        return super().forward(Fails.apply(x) if self.fails else x)


@pytest.mark.parametrize("in_input_pass", [False, True])
def test_a_backward_that_fails_within_the_module_is_told(in_input_pass):
    layer, plain = FailsBehind(4, 3), Plain(4, 3)
    plain.load_state_dict(layer.state_dict())
    handle = run_backward_dw(layer)
    first, second, third = batches(3)
    waiting = input_pass(layer, first)
    layer.fails = True
    with pytest.raises(RuntimeError if in_input_pass else ValueError):
        input_pass(layer, second) if in_input_pass else layer(second).sum().backward()
    layer.fails = False
    assert_gradients_of(weight_pass(layer, waiting), plain, first)  # in front of what is not known
    groups = input_pass(layer, third)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"which microbatch backward_dw\(\) of FailsBehind would compute is not known"
        ):
            zbpipe.stage_backward_weight(layer.parameters(), groups)
        with pytest.raises(RuntimeError, match="began with its outputs"):
            layer(third).sum().backward()
    layer.queue.queue.clear()
    handle.remove()
    run_backward_dw(layer)
    with pytest.raises(RuntimeError, match="its queue began anew"):
        zbpipe.stage_backward_weight(layer.parameters(), groups)
    assert_gradients_of(weight_pass(layer, input_pass(layer, third)), plain, third)


def test_a_backward_that_fails_elsewhere_disturbs_nothing():
    delayed, plain = delayed_and_plain()
    first, second = batches(2)
    with pytest.raises(ValueError, match="no backward"):
        Fails.apply(delayed(first)).sum().backward()
    x = Fails.apply(first)
    with pytest.raises(ValueError, match="no backward"):
        delayed(x).sum().backward()
    for w in delayed.parameters():
        w.grad = None
    delayed(second).sum().backward()
    plain(second).sum().backward()
    assert_same_gradients(delayed, plain)


def test_backward_dw_that_raises_while_others_wait_is_told():
    delayed, plain = delayed_and_plain()
    first, second = batches(2)
    groups = input_pass(delayed, first), input_pass(delayed, second)
    queued = delayed[0].queue.queue
    queued[0], kept = (None, None), queued[0]  # taken from the queue, then it raises
    with pytest.raises(AttributeError):
        zbpipe.stage_backward_weight(delayed.parameters(), groups[0])
    for group in groups:
        with pytest.raises(RuntimeError, match="not known: it raised AttributeError"):
            zbpipe.stage_backward_weight(delayed.parameters(), group)
    del kept
    for w, expected in zip(delayed[0].parameters(), plain[0].parameters(), strict=True):
        assert w.grad is None and expected.grad is None


def test_weight_passes_at_the_same_time_are_refused_and_can_be_repeated():
    delayed, plain = delayed_and_plain()
    first, second = batches(2)
    groups = input_pass(delayed, first), input_pass(delayed, second)
    inside, leave = threading.Event(), threading.Event()
    compute = delayed[0].backward_dw

    def waits():
        inside.set()
        assert leave.wait(60)
        compute()

    delayed[0].backward_dw = waits
    thread = threading.Thread(target=zbpipe.stage_backward_weight, args=(list(delayed.parameters()), groups[0]))
    thread.start()
    assert inside.wait(60)
    try:
        with pytest.raises(RuntimeError, match="running already; weight passes of one module must not run at the same"):
            zbpipe.stage_backward_weight(delayed.parameters(), groups[1])
    finally:
        leave.set()
        thread.join()
    zbpipe.stage_backward_weight(delayed.parameters(), groups[1])
    for x in (first, second):
        plain(x).sum().backward()
    assert_same_gradients(delayed, plain)


def test_a_weight_pass_with_retain_graph():
    delayed, plain = delayed_and_plain()
    first, second = batches(2)
    groups = input_pass(delayed, first), input_pass(delayed, second)
    for retain in (True, False):
        zbpipe.stage_backward_weight(delayed.parameters(), groups[0], retain_graph=retain)
        plain(first).sum().backward()
    assert_same_gradients(delayed, plain)
    assert_gradients_of(weight_pass(delayed, groups[1]), plain, second)
    delayed, _ = adding_elsewhere()
    group = input_pass(delayed, first)
    zbpipe.stage_backward_weight(delayed.parameters(), group, retain_graph=True)
    with pytest.raises(RuntimeError, match="added the gradients elsewhere itself"):
        zbpipe.stage_backward_weight(delayed.parameters(), group)


def test_a_handle_that_is_removed_while_groups_wait():
    layer, plain = Delayed(4, 3), Plain(4, 3)
    plain.load_state_dict(layer.state_dict())
    handle = run_backward_dw(layer)
    (x,) = batches(1)
    groups = input_pass(layer, x)
    handle.remove()
    assert_gradients_of(weight_pass(layer, groups), plain, x)


class Listed(Delayed):
    """Its queue is a list, which can be copied and pickled with the module."""

    def __init__(self, rows, columns):
        super().__init__(rows, columns)
        self.queue = ListQueue()


class ListQueue(list):
    put = list.append

    def get_nowait(self):
        return self.pop(0)


def pickled(module):
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def deep_copied(module):
    """As a module is copied that says nothing about it."""
    copied = module.__class__.__new__(module.__class__)
    copied.__setstate__(copy.deepcopy(module.__dict__))
    return copied


@pytest.mark.parametrize("copies", [deep_copied, pickled])
@pytest.mark.parametrize("given", [False, True])
def test_a_copy_has_a_queue_of_its_own(given, copies):
    layer, plain = Listed(4, 3), Plain(4, 3)
    plain.load_state_dict(layer.state_dict())
    run_backward_dw(layer, [layer.w, layer.b] if given else None)
    copied = copies(layer)
    first, second = batches(2)
    waiting = input_pass(layer, first)
    assert_gradients_of(weight_pass(copied, input_pass(copied, second)), plain, second)
    late = copies(layer)
    with pytest.raises(RuntimeError, match="was copied while weight gradients were pending"):
        late(second).sum().backward()
    assert_gradients_of(weight_pass(layer, waiting), plain, first)


# ---- inputs


class InPlace(nn.Module):
    """Computes in place on its input, then as its layer."""

    def __init__(self, layer, compute=lambda self, x: x.mul_(2).relu_()):
        super().__init__()
        self.layer = layer
        self.compute = compute
        self.w = layer.w
        self.b = layer.b

    def forward(self, x):
        return self.layer(self.compute(self, x))

    def backward_dw(self):
        self.layer.backward_dw()


def row(h):
    return h[1:4]


def whole(h):
    return h


def flat(h):
    return h.view(-1, 2, 4).view(-1, 4)


def part(h):
    return h.chunk(2)[0]


def computing_in_place(compute=None):
    delayed = InPlace(Delayed(4, 3), *[compute] * (compute is not None))
    plain = InPlace(Plain(4, 3), *[compute] * (compute is not None))
    plain.load_state_dict(delayed.state_dict())
    run_backward_dw(delayed)
    return delayed, plain


def by_weight(self, x):
    return x.mul_(self.b.sum())


def by_alias(self, x):
    x.view(-1)[::2].mul_(3)
    return x


def twice(self, x):
    other = x * 3
    x.mul_(2)
    return x.add_(other).tanh_()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("select", [whole, row, flat])
@pytest.mark.parametrize("compute", [None, by_weight, by_alias, twice])
def test_a_module_that_computes_in_place_on_its_input(compute, select, split):
    """As without the adapter: also for the caller's tensor, its base and other views, used before and afterwards."""
    delayed, plain = computing_in_place(compute)
    results = []
    for net in (delayed, plain):
        torch.manual_seed(2)
        x = torch.randn(8, 4, dtype=f64, requires_grad=True)
        h = x * 1
        before = (h * 7).sum()
        other = h.view(-1)
        given = select(h)
        address, version = given.data_ptr(), given._version
        out = net(given)
        assert given.data_ptr() == address and given._version > version
        loss = out.sum() + before + (given * 3).sum() + (h * h.detach().clone()).sum() + (other * 5).sum()
        values = h.detach().clone()
        if split and net is delayed:
            _, groups = zbpipe.stage_backward_input([loss], None, [x], net.parameters())
            zbpipe.stage_backward_weight(net.parameters(), groups)
        else:
            loss.backward()
        results.append([x.grad, values, *(w.grad for w in net.parameters())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    assert delayed.layer.queue.empty()


@pytest.mark.parametrize("select", [whole, row, flat, part])
@pytest.mark.parametrize("compute", [None, by_alias])
def test_in_place_on_an_input_that_needs_no_gradient(compute, select):
    delayed, plain = computing_in_place(compute)
    results = []
    for net in (delayed, plain):
        torch.manual_seed(2)
        data = torch.randn(8, 4, dtype=f64)
        given = select(data)
        version = given._version
        out = net(given)
        assert given._version > version and not given.requires_grad and not data.requires_grad
        _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [given], net.parameters())
        zbpipe.stage_backward_weight(net.parameters(), groups)
        results.append([data, *(w.grad for w in net.parameters())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_in_place_with_gradient_on_an_input_that_needs_none():
    delayed, plain = computing_in_place(by_weight)
    results = []
    for net in (delayed, plain):
        torch.manual_seed(2)
        data = torch.randn(8, 4, dtype=f64)
        out = net(data)
        assert data.requires_grad
        (out.sum() + data.sum()).backward()
        results.append([data.detach(), *(w.grad for w in net.parameters())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    with pytest.raises(RuntimeError, match="call it with a clone"):
        delayed(torch.randn(8, 4, dtype=f64)[:3])


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x[:4], lambda x: (x * 1).chunk(2)[0]])
def test_in_place_is_refused_where_it_is_without_the_adapter(make):
    for net in computing_in_place():
        x = torch.randn(8, 4, dtype=f64, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"leaf Variable|is a view and is being modified inplace"):
            net(make(x))
        assert x.is_leaf and x._version == 0


@pytest.mark.parametrize("select", [whole, row])
def test_what_an_operation_has_saved_is_watched_as_without_the_adapter(select):
    for net in computing_in_place():
        x = torch.randn(8, 4, dtype=f64, requires_grad=True)
        h = x.exp()  # saves its result
        out = net(select(h))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_the_module_gets_the_callers_tensors_and_the_caller_has_them_back():
    seen = []

    class Looks(Delayed):
        def forward(self, x, more):
            seen.extend([x, more["y"][0]])
            return super().forward(x + more["y"][0])

    layer = Looks(4, 3)
    run_backward_dw(layer)
    x, y = ((batch * 1).view(5, 4) for batch in batches(2))
    before = [(t.grad_fn, t.output_nr, t._base.grad_fn) for t in (x, y)]
    out = layer(x, more={"y": (y,)})
    assert seen[0] is x and seen[1] is y
    assert [(t.grad_fn, t.output_nr, t._base.grad_fn) for t in (x, y)] == before
    with pytest.raises(ValueError, match="no forward"):
        raising(layer, "no forward")(x, more={"y": (y,)})
    assert [(t.grad_fn, t.output_nr, t._base.grad_fn) for t in (x, y)] == before
    out.sum().backward()
    assert layer.queue.empty() and layer.w.grad is not None


@pytest.mark.parametrize("select", [whole, row, flat])
@pytest.mark.parametrize("compute", [None, twice])
def test_the_adapter_takes_no_memory(select, compute):
    figures = []
    for registered in (True, False):
        net = InPlace(Delayed(4, 3), *[compute] * (compute is not None))
        if registered:
            run_backward_dw(net)
        x = torch.randn(8, 4, dtype=f64, requires_grad=True)
        h = select(x * 1)
        with zbpipe.memory.record() as rec:
            with rec.phase("forward"):
                out = net(h)
            with rec.phase("I"):
                _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], net.parameters())
        figures.append([(phase.kind, phase.peak, phase.live_end) for phase in rec.phases])
        assert len(figures[-1]) == 2 and sum(group.bytes_held for group in groups) == 0
    assert figures[0] == figures[1]


def raising(layer, message):
    def forward(*args, **kwargs):
        raise ValueError(message)

    layer.forward = forward
    return layer


def test_a_leaf_stays_itself_for_the_module():
    results = []
    for kind in (Delayed, Plain):
        calls, leaves = [], []

        def looks(self, x, calls=calls, leaves=leaves):
            assert x is leaves[-1] and x.is_leaf and x.requires_grad
            with torch.no_grad():
                x.add_(1)
            (penalty,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
            x.register_hook(lambda grad: calls.append(grad.clone()))
            return x.view(-1).view(5, 4) + penalty

        torch.manual_seed(4)
        net = InPlace(kind(4, 3), looks)
        if kind is Delayed:
            run_backward_dw(net)
        for x in batches(2):
            leaves.append(x)
            out = net(x)
            loss = out.sum() + (x * 3).sum()
            if kind is Delayed:
                _, groups = zbpipe.stage_backward_input([loss], None, [x], net.parameters())
                zbpipe.stage_backward_weight(net.parameters(), groups)
            else:
                loss.backward()
        results.append([*(x.grad for x in leaves), *calls, *(w.grad for w in net.parameters())])
        assert len(calls) == 2
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's, of itself
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_compiled_model_around_it():
    delayed, plain = delayed_and_plain()
    compiled = torch.compile(delayed, backend="aot_eager")
    inputs = batches(3)
    groups = []
    for x in inputs:
        out = compiled(x)
        groups.append(zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], delayed.parameters())[1])
    for k in (2, 0, 1):
        assert_gradients_of(weight_pass(delayed, groups[k]), plain, inputs[k])


class Interrupts(Delayed):
    def forward(self, x):
        raise KeyboardInterrupt


def test_a_forward_that_is_interrupted():
    layer = Interrupts(4, 3)
    run_backward_dw(layer)
    (x,) = batches(1)
    h = x * 1
    before, alive = h.grad_fn, weakref.ref(h)
    with pytest.raises(KeyboardInterrupt):
        layer(h)
    layer.forward = lambda x: x @ layer.w
    layer(x * 1)
    assert h.grad_fn is before
    del h, before
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("compute", [lambda self, x: x, lambda self, x: x.mul_(2)])
@pytest.mark.parametrize("retain", ["before", "within", "after"])
def test_hooks_of_an_input_see_its_whole_gradient(compute, retain):
    """Those that the caller or the module registers, before, during and after the module's forward."""
    results = []
    for kind in (Delayed, Plain):
        calls = collections.defaultdict(list)

        def hooked(self, x, calls=calls):
            x.register_hook(lambda grad: calls["within"].append(grad.clone()))
            if retain == "within":
                x.retain_grad()
            return compute(self, x)

        torch.manual_seed(4)
        net = InPlace(kind(4, 3), hooked)
        if kind is Delayed:
            run_backward_dw(net)
        (x,) = batches(1)
        h = torch.stack([x * 2, x * 3]).sum(0)
        if retain == "before":
            h.retain_grad()
            h.register_hook(lambda grad, calls=calls: calls["before"].append(grad.clone()))
        early = h.sum() * 7
        out = net(h)
        h.register_hook(lambda grad, calls=calls: calls["after"].append(grad.clone()))
        if retain == "after":
            h.retain_grad()
        assert h.retains_grad
        (out.sum() + early + (h * 5).sum()).backward()
        results.append([x.grad, h.grad, dict(calls)])
    (got_x, got_h, got), (x, h, expected) = results
    torch.testing.assert_close(got_x, x)
    torch.testing.assert_close(got_h, h)
    assert got.keys() == expected.keys()
    for name, grads in expected.items():
        torch.testing.assert_close(got[name], grads)


def test_several_inputs_of_one_base_one_of_which_retains_its_gradient():
    results = []
    for kind in (Delayed, Plain):
        torch.manual_seed(4)
        layer = kind(4, 3)

        class Both(InPlace):
            def forward(self, a, b):
                b.mul_(2)
                return self.layer(a + b)

        net = Both(layer)
        if kind is Delayed:
            run_backward_dw(net)
        (x,) = batches(1)
        base = x.repeat(2, 1)
        a, b = base[:5], base[5:]
        b.retain_grad()
        (net(a, b) * net(a, a.clone())).sum().backward()
        results.append([x.grad, b.grad, *(w.grad for w in net.parameters())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_the_oracle_agrees_about_computing_in_place():
    def forward(m, x):
        h = x @ m.c
        return m.layer(h.view(-1, 2, 4).view(-1, 4)).sin().sum(-1) + h.sum(-1)

    check(Stage(forward, layer=Copyable(Delayed(4, 5)), c=(4, 4)), (4, 4), setup=watch_weights, orders=(late,))


class Copyable(InPlace):
    def __deepcopy__(self, memo):
        layer = copy.deepcopy(self.layer, memo)
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
            hooks.clear()
        copied = Copyable(layer)
        run_backward_dw(copied)
        return copied


# ---- sums among what is put


class InFusedStyle(Function):
    """x @ w, put with the main_grad that it is added to, in the forms that there are."""

    @staticmethod
    def forward(ctx, x, w, store, form):
        ctx.save_for_backward(x, w)
        ctx.store, ctx.form, ctx.main_grad = store, form, getattr(w, "main_grad", None)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        main_grad = ctx.main_grad if ctx.main_grad is not None else ctx.form[1].main_grad
        kind = ctx.form[0]

        def gemm(x, grad, total):
            if kind == "grouped":
                ((total,),) = (total["sums"],)
            total.view(w.shape).add_(x.mT @ grad)

        total = {"plain": main_grad, "grouped": {"sums": [main_grad]}, "view": main_grad.view(-1)}[kind]
        if ctx.store.split_bw():
            ctx.store.put((x, grad, total), gemm)
        else:
            gemm(x, grad, total)
        return grad @ w.mT, None, None, None


@pytest.mark.parametrize("kind", ["plain", "grouped", "view"])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_main_grad_that_is_put_serves_several_microbatches(kind, cast, order):
    w, c = weight(4, 3), weight(4, 4)
    both = torch.zeros(2, 4, 3, dtype=f64)  # as Megatron has them, one after another in one buffer
    w.main_grad = both[1]
    store = WeightGradStore()
    inputs, groups = batches(3), []
    for x in inputs:
        given = w * 2 if cast else w
        out = InFusedStyle.apply(x @ c, given, store, (kind, w))
        _, group = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w, c])
        groups.append(group)
        # x @ c and the output gradient of the Function; x and the output gradient of the product
        assert sum(g.bytes_held for g in group) == 8 * (5 * 4 + 5 * 3 + 5 * 4 + 5 * 4)
    for k in order:
        zbpipe.stage_backward_weight([w, c], groups[k])
    expected = sum((x @ c).detach().mT @ torch.ones(5, 3, dtype=f64) for x in inputs)
    torch.testing.assert_close(w.main_grad, expected)
    assert torch.count_nonzero(both[0]) == 0 and w.grad is None


def test_what_is_put_is_watched_as_before():
    w = weight(4, 3)
    w.main_grad = torch.zeros_like(w)
    (x,) = batches(1)
    h = x * 1
    out = InFusedStyle.apply(h, w, WeightGradStore(), ("plain", w))
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        zbpipe.stage_backward_weight([w], groups)
    assert torch.count_nonzero(w.main_grad) == 0


def test_a_detour_that_is_refused_changes_nothing():
    in_own_process("""
        from zbpipe import _C

        leaf, computed = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2
        node = computed.grad_fn
        for tensor, like, error in (
            (1, 2, TypeError),
            (leaf, None, TypeError),
            (None, computed, TypeError),
            (computed, leaf, ValueError),
        ):
            try:
                _C.detour(tensor, like)
            except error:
                pass
            else:
                raise AssertionError("not refused")
        assert computed.grad_fn is node and leaf.grad_fn is None
    """)
