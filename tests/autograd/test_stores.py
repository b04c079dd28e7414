"""zbpipe.stores: modules written for a store of delayed weight gradients, or with backward_dw(), take part."""

import queue
import threading

import pytest
import torch
from oracle import Stage, check, late, weight
from torch import nn
from torch.autograd import Function

import zbpipe
from zbpipe.stores import WeightGradStore, run_backward_dw

f64 = torch.float64


def watch_weights(m):
    for name, w in m.named_parameters():
        w.register_hook(m.log(f"hook {name}"))
        w.register_post_accumulate_grad_hook(m.log(f"post {name}", lambda w: w.grad))


class InTransformerEnginesStyle(Function):
    """x @ w + b. Asks its module's store whether to delay, puts tensors and a function of them."""

    @staticmethod
    def forward(ctx, x, w, b, store):
        ctx.save_for_backward(x, w)
        ctx.store = store
        return x @ w + b

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors

        def gemm(x, grad):
            return x.mT @ grad, grad.sum(0), "an extra result"

        dw = db = None
        if ctx.store.delay_wgrad_compute():
            ctx.store.put([x, grad], gemm)
        else:
            dw, db, _ = gemm(x, grad)
        return grad @ w.mT, dw, db, None


class InGroupsStyle(Function):
    """x @ w; the product is written into a tensor that is among what was put."""

    @staticmethod
    def forward(ctx, x, w, store):
        ctx.save_for_backward(x, w)
        ctx.store = store
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors

        def gemm(xs, grads, outs):
            for x, grad, out in zip(xs, grads, outs, strict=True):
                torch.mm(x.mT, grad, out=out)

        dw = torch.empty_like(w)
        if ctx.store.delay_wgrad_compute():
            ctx.store.put([[x], [grad], [dw]], gemm)
            dw = None
        else:
            gemm([x], [grad], [dw])
        return grad @ w.mT, dw, None


class InMegatronsStyle(Function):
    """x @ w that adds to w.main_grad itself, after a preparation that may communicate."""

    @staticmethod
    def forward(ctx, x, w, store):
        ctx.save_for_backward(x, w)
        ctx.store = store
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors

        def prepare(async_op):
            assert async_op is False
            return x.detach(), grad

        def process(x, grad):
            w.main_grad.add_(x.mT @ grad)

        if ctx.store.split_bw():
            ctx.store.put(w, prepare, process)
        else:
            process(x, grad)
        return grad @ w.mT, None, None


class InDualPipesStyle(Function):
    @staticmethod
    def forward(ctx, x, w, store):
        ctx.save_for_backward(x, w)
        ctx.store = store
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors

        def add():
            w.main_grad.add_(x.detach().mT @ grad)

        ctx.store.put(add) if ctx.store.enabled else add()
        return grad @ w.mT, None, None


class MainGrad:
    """Lets the oracle compare `main_grad` as it compares a retained gradient."""

    def __init__(self, w):
        self.w = w

    @property
    def grad(self):
        return self.w.main_grad


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
            ctx.store.put(lambda: order.append("work"))
            return grad, None, None

    x, w = torch.randn(3, 3, requires_grad=True), nn.Parameter(torch.randn(3, 3))
    out = Tells.apply(x, w, WeightGradStore())
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    order.append("I is over")
    zbpipe.stage_backward_weight([w], groups)
    assert order == ["I is over", "work"]


class PutsAlways(Function):
    """Never asks its store."""

    @staticmethod
    def forward(ctx, x, w, store):
        ctx.save_for_backward(x, w)
        ctx.store = store
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        ctx.store.put([x, grad], lambda x, grad: x.mT @ grad)
        return grad @ w.mT, None, None


def test_what_is_put_without_asking_is_added_in_an_ordinary_backward_too():
    x, w = torch.randn(3, 3, requires_grad=True), nn.Parameter(torch.randn(3, 3))
    hooks = []
    w.register_hook(hooks.append)
    PutsAlways.apply(x, w, WeightGradStore(w)).sum().backward()
    expected = x.detach().mT @ torch.ones(3, 3)
    torch.testing.assert_close(w.grad, expected)
    assert len(hooks) == 2 and hooks[1] is None  # for the put, and for the None that the Function returns
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


class DelayedFunction(Function):
    @staticmethod
    def forward(ctx, x, w, b, store):
        ctx.save_for_backward(x, w)
        ctx.store = store
        return x @ w + b

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        ctx.store.put((x.detach(), grad))
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
    with pytest.raises(TypeError, match="without a floating-point tensor by position"):
        layer(x=torch.randn(2, 4, dtype=f64))
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
