"""policy(split_functions=True): what a Function multiplies for a weight, and only returns, is multiplied in W."""

import contextlib
import copy
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from support.functions import Fused, Heeding, Ignoring, Product, TwoOutputs
from support.oracle import ORDERS, MainGrad, Stage, check, late, needs_zbpipe, one_weight_pass, watch_weights, weight
from torch import nn
from torch.autograd import Function, forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import zbpipe
from zbpipe._kernels.lazy import LazyProduct

pytestmark = needs_zbpipe  # torch's module has no policy

f64 = torch.float64


@pytest.fixture(autouse=True)
def split_functions():
    with zbpipe.policy(split_functions=True):
        yield
    # Nothing of a backward's is left on this thread.
    assert type(torch.ones(3, 4) @ torch.ones(4, 3)) is torch.Tensor


class Custom(Product):
    """x @ w; its backward is given: from (x, w, grad) to the gradients of both."""

    @staticmethod
    def backward(ctx, grad):
        return *ctx.given(*ctx.saved_tensors, grad), None


def stage(backward, shape=(4, 5)):
    return Stage(lambda m, x: Custom.apply(x.sin(), m.w, backward).tanh(), w=shape)


class Products(TorchDispatchMode):
    """Counts those with as many elements as the weight."""

    def __init__(self, elements):
        super().__init__()
        self.elements = elements
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default) and not isinstance(result, LazyProduct):
            self.count += result.numel() == self.elements
        return result


def products(stage, x):
    """How many of the weight's size are multiplied in I, and in W."""
    (w,) = stage.parameters()
    output = stage(x)
    with Products(w.numel()) as in_i:
        _, groups = zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], [w])
    with Products(w.numel()) as in_w:
        zbpipe.stage_backward_weight([w], groups)
    return in_i.count, in_w.count


def random(*shape, dtype=f64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def right(x, w, grad):
    return grad @ w.mT


PUT_OFF = {
    "plain": lambda x, w, grad: x.t() @ grad,
    "transposed": lambda x, w, grad: (grad.t() @ x).t(),
    "mT": lambda x, w, grad: (grad.mT @ x).mT,
    "matmul": lambda x, w, grad: torch.matmul(x.transpose(0, 1), grad),
    "viewed": lambda x, w, grad: (x.t() @ grad).view(-1).view(4, 5),
    "reshaped": lambda x, w, grad: (x.t() @ grad).reshape(2, 10).reshape(4, 5).contiguous(),
    "einsum": lambda x, w, grad: torch.einsum("bi,bj->ij", x, grad),
    "tensordot": lambda x, w, grad: torch.tensordot(x, grad, dims=([0], [0])),
    "linear": lambda x, w, grad: nn.functional.linear(x.t(), grad.t()),
    "batched": lambda x, w, grad: torch.bmm(x.t()[None], grad[None]).squeeze(0),
    "cast": lambda x, w, grad: (x.float().t() @ grad.float()).to(w.dtype),
    "cast and back": lambda x, w, grad: (x.t() @ grad).float().t().double().t(),
    "wrong dtype": lambda x, w, grad: x.float().t() @ grad.float(),  # the engine casts it
    "looked at": lambda x, w, grad: looked_at(x.t() @ grad),
    "dropped and computed again": lambda x, w, grad: [x.t() @ grad, x.t() @ grad][1],
    "no memory of its own": lambda x, w, grad: x.detach().t() @ (grad + 0),
}


def looked_at(gw):
    assert (gw.shape, gw.dtype, gw.dim(), gw.numel(), gw.device.type) == ((4, 5), f64, 2, 20, "cpu")
    assert gw.is_contiguous()
    assert not gw.requires_grad
    assert gw.size(0) == len(gw) == 4
    assert isinstance(gw, torch.Tensor)
    return gw


@pytest.mark.parametrize("name", PUT_OFF)
def test_what_is_only_returned_is_multiplied_in_w(name):
    one = stage(lambda x, w, grad: (right(x, w, grad), PUT_OFF[name](x, w, grad)))
    check(one, (3, 4), exact=True, orders=(*ORDERS, one_weight_pass))
    assert products(one, random(3, 4)) == (0, 1)


kept = []


def touch(look):
    def gradient(x, w, grad):
        gw = x.t() @ grad
        assert type(gw) is LazyProduct or not zbpipe.get_policy().split_functions or not in_i()
        look(gw)
        return gw

    return gradient


def in_i():
    """A lazy product is met in I alone."""
    return type(torch.ones(4, 1, dtype=f64) @ torch.ones(1, 5, dtype=f64)) is LazyProduct


def in_place_through_a_view(gw):
    gw.t().mul_(2)


def in_place_behind_a_cast(gw):
    half = gw.to(torch.float32)
    gw.zero_()
    gw.add_(half)


def in_place_behind_a_cast_of_a_view(gw):
    half = gw.t().float()
    gw.zero_()
    gw.add_(half.t())


def returned_steps_of_what_is_laid_out_anew(gw):
    view, gw.data = gw.t(), gw.t()
    gw.t_()
    gw.add_(view.t())


def in_inference_mode(gw):
    with torch.inference_mode():
        gw.norm()
    gw.mul_(2)


def set_data(gw):
    gw.data = gw.data * 3


def laid_out_in_place(gw):
    gw.t_()
    assert gw.shape == (5, 4)
    gw.t_()


def by_list(gw):
    torch._foreach_mul_([gw], 2)


TOUCHED = {
    "multiplied": lambda gw: gw * 2,
    "in place": lambda gw: gw.mul_(2),
    "through a view": in_place_through_a_view,
    "behind a cast": in_place_behind_a_cast,
    "behind a cast of a view": in_place_behind_a_cast_of_a_view,
    "behind a view that it is no more": returned_steps_of_what_is_laid_out_anew,
    "in inference mode": in_inference_mode,
    "data": set_data,
    "t_": laid_out_in_place,
    "foreach": by_list,
    "numpy": lambda gw: gw.numpy().__imul__(2),
    "tolist": lambda gw: kept.append(gw.tolist()),
    "item": lambda gw: gw.norm().item(),
    "address": lambda gw: kept.append(gw.data_ptr()),
    "storage": lambda gw: gw.untyped_storage().nbytes(),
    "out": lambda gw: torch.add(gw, 1, out=gw),
    "cat": lambda gw: torch.cat([gw, gw]),
    "repr": repr,
    "pickle": lambda gw: pickle.loads(pickle.dumps(gw)),
    "deepcopy": copy.deepcopy,
    "dlpack": lambda gw: torch.from_dlpack(gw).mul_(2),
    "index": lambda gw: gw.__setitem__(0, 7.0),
    "hash": lambda gw: ({gw}, gw.sum()),
}


@pytest.mark.parametrize("name", TOUCHED)
def test_what_is_touched_is_computed_at_once(name):
    one = stage(lambda x, w, grad: (right(x, w, grad), touch(TOUCHED[name])(x, w, grad)))
    check(one, (3, 4), exact=True)
    assert products(one, random(3, 4)) == (1, 0)
    kept.clear()


def scribbled(x, w, grad):
    x, grad = x.clone(), grad.clone()
    gw = x.t() @ grad
    x.zero_()
    return right(x, w, grad), gw


def scribbled_by_a_view(x, w, grad):
    grad = grad.clone()
    gw = x.t() @ grad
    grad.view(-1)[3:].fill_(1.0)
    return grad @ w.mT, gw


def scribbled_by_out(x, w, grad):
    x = x.clone()
    gw = x.t() @ grad
    torch.mul(x, 2, out=x)
    return right(x, w, grad), gw


@torch.library.custom_op("zbpipe_tests::scribble", mutates_args={"x"})
def scribble(x: torch.Tensor) -> None:
    x.zero_()


def scribbled_by_an_operator(x, w, grad):
    x = x.clone()
    gw = x.t() @ grad
    scribble(x)
    return right(x, w, grad), gw


def of_what_an_operator_wrote(x, w, grad):
    x = x.clone()
    scribble(x)
    return right(x, w, grad), (x + 1).t() @ grad + x.t() @ grad


@pytest.mark.parametrize(
    "backward",
    [scribbled, scribbled_by_a_view, scribbled_by_out, scribbled_by_an_operator, of_what_an_operator_wrote],
    ids=lambda backward: backward.__name__,
)
def test_factors_that_are_written_to_within_the_backward(backward):
    check(stage(backward), (3, 4), exact=True)
    in_i, in_w = products(stage(backward), random(3, 4))
    assert in_i >= 1
    assert in_w == 0


def test_a_factor_in_a_buffer_that_collectives_write_to_is_read_at_once(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    buffer = torch.empty(3, 4, dtype=f64)

    def backward(x, w, grad):
        buffer.copy_(x)
        dist.broadcast(buffer, 0, async_op=True).wait()
        return right(x, w, grad), buffer.t() @ grad

    try:
        check(stage(backward), (3, 4), exact=True)
        assert products(stage(backward), random(3, 4)) == (1, 0)
    finally:
        dist.destroy_process_group()


def test_a_factor_that_changes_before_w_is_refused():
    one = stage(lambda x, w, grad: (right(x, w, grad), x.t() @ grad))
    x = random(3, 4)
    given = x.sin()
    output = Custom.apply(given, one.w, lambda x, w, grad: (right(x, w, grad), x.t() @ grad))
    _, groups = zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], [one.w])
    with torch.no_grad():
        given.zero_()
    with pytest.raises(RuntimeError, match="modified"):
        zbpipe.stage_backward_weight([one.w], groups)
    assert one.w.grad is None


# ---- what a Function gives back


class Two(Function):
    """x @ a + x @ b; its backward is given: from (x, grad) to the gradients of a and b."""

    @staticmethod
    def forward(ctx, x, a, b, given):
        ctx.save_for_backward(x, a, b)
        ctx.given = given
        return x @ a + x @ b

    @staticmethod
    def backward(ctx, grad):
        x, a, b = ctx.saved_tensors
        return grad @ (a + b).t(), *ctx.given(x, grad), None


def one_for_both(x, grad):
    gw = x.t() @ grad
    return gw, gw


def views_of_one(x, grad):
    gw = x.t() @ grad
    return gw, gw.t().t()


@pytest.mark.parametrize("given", [one_for_both, views_of_one])
def test_one_product_for_two_weights_is_computed_at_once(given):
    two = Stage(lambda m, x: Two.apply(x.sin(), m.a, m.b, given), a=(4, 5), b=(4, 5))
    check(two, (3, 4), exact=True)


@pytest.mark.parametrize("given", [lambda x, grad: (x.t() @ grad, x.t() @ (2 * grad))])
def test_products_for_two_weights(given):
    check(Stage(lambda m, x: Two.apply(x.sin(), m.a, m.b, given), a=(4, 5), b=(4, 5)), (3, 4), exact=True)


def test_a_product_for_an_input_is_computed_at_once():
    """Of a square weight the input's gradient has as many elements."""
    one = stage(lambda x, w, grad: (grad @ w.mT, x.t() @ grad), shape=(4, 4))
    check(one, (4, 4), exact=True)
    assert products(one, random(4, 4)) == (1, 1)


def test_a_tied_weight_and_one_used_again():
    def forward(m, x):
        for _ in range(3):
            x = Custom.apply(x.sin(), m.w, lambda x, w, grad: (grad @ w.mT, x.t() @ grad))
        return x @ m.w

    check(Stage(forward, w=(4, 4)), (3, 4), orders=(*ORDERS, one_weight_pass))


def test_a_gradient_of_the_wrong_shape_is_refused_as_ever():
    for backward in (
        lambda x, w, grad: (right(x, w, grad), (x.t() @ grad).view(20)),
        lambda x, w, grad: (right(x, w, grad), (x.t() @ grad).reshape(5, 4)),
    ):
        x, one = random(3, 4), stage(backward)
        output = one(x)
        with pytest.raises(RuntimeError) as raised:
            zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], [one.w])
        assert "invalid gradient at index 1" in str(raised.value.__cause__)


def test_what_is_kept_by_the_program_is_right_whenever_it_is_read():
    seen = []

    def backward(x, w, grad):
        gw = x.t() @ grad
        seen.append(gw)
        return right(x, w, grad), gw

    one, x = stage(backward), random(3, 4)
    given = x.sin()
    output = Custom.apply(given, one.w, backward)
    _, groups = zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], [one.w])
    zbpipe.stage_backward_weight([one.w], groups)
    with torch.no_grad():
        given.zero_()
    torch.testing.assert_close(seen[0].clone(), one.w.grad, rtol=0, atol=0)
    seen[0].zero_()
    assert one.w.grad.abs().sum() > 0


def test_many_steps():
    def backward(x, w, grad):
        gw = x.t() @ grad
        for _ in range(400):
            gw = gw.t()
        return right(x, w, grad), gw

    one = stage(backward)
    check(one, (3, 4), orders=(late,))
    assert products(one, random(3, 4)) == (0, 1)


@pytest.mark.parametrize("write", [torch.Tensor.zero_, torch.Tensor.t_], ids=["zero_", "t_"])
def test_a_view_that_is_returned_where_its_product_is_written_to(write):
    def backward(x, w, grad):
        gw = x.t() @ grad
        view = gw.t()
        flat = view.reshape(-1)
        write(gw)
        return right(x, w, grad), view.t() + flat.view(5, 5).t()

    check(stage(backward, (5, 5)), (3, 5), exact=True)


def test_a_touched_product_lets_go_of_its_factors():
    left = []

    def backward(x, w, grad):
        factor = x.clone()
        gw = factor.t() @ grad
        left.append(weakref.ref(factor))
        del factor
        gw.mul_(2)
        left.append(left.pop()())
        return right(x, w, grad), gw

    one = stage(backward)
    products(one, random(3, 4))
    assert left == [None]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_a_product_in_forward_mode_has_its_tangent():
    def backward(x, w, grad):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
            return right(x, w, grad), forward_ad.unpack_dual(dual.t() @ grad).tangent

    check(stage(backward), (3, 4), exact=True)


class Plain(torch.Tensor):
    """A subclass that does nothing else."""


@pytest.mark.parametrize("name", ["a subclass", "nested", "what is kept is written to past Python"])
def test_odd_factors(name):
    def backward(x, w, grad):
        if name == "a subclass":
            return right(x, w, grad), (x.as_subclass(Plain).t() @ grad).as_subclass(torch.Tensor)
        if name == "nested":
            nested = torch.nested.nested_tensor([x.t(), x.t()], dtype=f64)
            both = torch.bmm(nested, torch.nested.nested_tensor([grad, grad], dtype=f64))
            return right(x, w, grad), both.unbind()[0].clone()
        touched = x.t() @ grad
        touched.add_(0)
        gw = touched[:] @ torch.eye(5, dtype=f64)
        with torch._C.DisableTorchFunctionSubclass():
            touched.mul_(2)
        return right(x, w, grad), gw

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nested tensors
        check(stage(backward), (3, 4), exact=True)


def test_what_has_no_kernel_here_says_so_where_it_is_called():
    def backward(x, w, grad):
        with pytest.raises((RuntimeError, NotImplementedError)):
            torch.mm(x.t().bfloat16(), grad.bfloat16(), out_dtype=torch.float32)
        with pytest.raises(RuntimeError):
            torch.bmm(torch.ones(2, 4, 3), torch.ones(1, 3, 5))
        with pytest.raises(RuntimeError):
            torch.mm(torch.ones(1, 4, 3), torch.ones(1, 3, 5))
        return plain(x, w, grad)

    check(stage(backward), (3, 4), orders=(late,))


def test_two_threads_touch_one_product():
    both = threading.Barrier(2)

    def backward(x, w, grad):
        gw = x.t() @ grad

        def touch():
            both.wait()
            for _ in range(20):
                gw.add_(1)

        threads = [threading.Thread(target=touch) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return right(x, w, grad), gw

    check(stage(backward), (3, 4), orders=(late,))


def test_what_writes_to_a_tensor_that_does_not_say_what_it_wraps():
    class Opaque(Quantized):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            assert func is torch.ops.aten.zero_.default
            args[0].data_.zero_()
            return args[0]

    def backward(x, w, grad):
        x = x.clone()
        gw = x.t() @ grad
        Opaque(x, 1.0).zero_()
        return right(x, w, grad), gw

    check(stage(backward), (3, 4), exact=True)


class Experts(Function):
    """A batch of products."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.mT, x.mT @ grad


def test_batched_weights():
    one = Stage(lambda m, x: Experts.apply(x.sin(), m.w), w=(2, 4, 5))
    check(one, (2, 3, 4), exact=True)
    assert products(one, random(2, 3, 4)) == (0, 1)


class Affine(Function):
    """x @ w.T + b of any leading dimensions, under autocast, as libraries write it."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x @ w.t() + b

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        return grad @ w.to(grad.dtype), flat.t() @ x.reshape(-1, x.shape[-1]), flat.sum(0)


@pytest.mark.parametrize("casts", [contextlib.nullcontext, lambda: torch.autocast("cpu", dtype=torch.bfloat16)])
def test_linear_layers_of_a_library(casts):
    def forward(m, x):
        with casts():
            return Affine.apply(Affine.apply(x, m.a, m.b).relu(), m.c, m.d).float()

    parts = {"a": weight(6, 4, dtype=torch.float32), "b": weight(6, dtype=torch.float32)}
    parts |= {"c": weight(3, 6, dtype=torch.float32), "d": weight(3, dtype=torch.float32)}
    x = lambda: random(2, 3, 4, dtype=torch.float32)  # noqa: E731
    check(Stage(forward, **parts), x, exact=True)
    check(Stage(forward, **parts), x, setup=watch_weights, exact=True)


class ColumnParallel(Function):
    """As Megatron's linear with and without its fused accumulation into main_grad."""

    @staticmethod
    def forward(ctx, x, w, fuses):
        ctx.save_for_backward(x)
        ctx.w, ctx.fuses = w, fuses
        return torch.matmul(x, w.t())

    @staticmethod
    def backward(ctx, grad):
        (x,), w = ctx.saved_tensors, ctx.w
        dx = grad.matmul(w)
        grad, x = grad.view(-1, grad.shape[-1]), x.view(-1, x.shape[-1])
        if not ctx.fuses:
            return dx, grad.t().matmul(x), None
        w.main_grad.addmm_(grad.t(), x)
        return dx, None, None


@pytest.mark.parametrize("fuses", [False, True])
def test_megatrons_linear(fuses):
    def setup(m):
        m.w.main_grad = torch.zeros_like(m.w)
        m.kept["main_grad"] = MainGrad(m.w)

    one = Stage(lambda m, x: ColumnParallel.apply(x.sin(), m.w, fuses), w=(5, 4))
    check(one, (2, 3, 4), setup=setup, exact=True)


@pytest.mark.parametrize("function", [Heeding, Ignoring, TwoOutputs])
def test_functions_of_other_tests(function):
    def forward(m, x):
        return function.apply(x, m.w, m.s, m) if function is TwoOutputs else function.apply(x, m.w, m)

    check(Stage(forward, w=(4, 4), s=(4,)), (3, 4), exact=True)


def test_what_a_function_adds_itself():
    def setup(m):
        m.w.main_grad = torch.zeros_like(m.w)
        m.kept["main_grad"] = MainGrad(m.w)

    check(Stage(lambda m, x: Fused.apply(x, m.w, m), w=(4, 5)), (3, 4), setup=setup, exact=True, orders=(late,))


# ---- hooks, policies, errors


def plain(x, w, grad):
    return right(x, w, grad), x.t() @ grad


def test_hooks_of_weights_fire_in_w():
    check(stage(plain), (3, 4), setup=watch_weights, exact=True)


def test_a_post_hook_is_given_the_gradient():
    def forward(m, x):
        h = Custom.apply(x.sin(), m.w, plain)
        h.grad_fn.register_hook(m.log("post"))
        return h

    one = Stage(forward, w=(4, 5))
    check(one, (3, 4), exact=True)
    assert products(one, random(3, 4)) == (1, 0)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"split_functions": False}, (1, 0)),
        ({"defer": "nothing"}, (1, 0)),
        ({"defer": "all"}, (0, 1)),
    ],
)
def test_policies(choice, expected):
    one = stage(plain)
    with zbpipe.policy(**choice):
        check(one, (30, 4), exact=True, orders=(late,))
        assert products(one, random(30, 4)) == expected


def test_what_is_held_is_the_factors_to_the_byte_until_w():
    one, x = stage(plain), random(3, 4)
    output = one(x)
    _, groups = zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], [one.w])
    assert groups[0].bytes_held == (3 * 4 + 3 * 5) * 8
    zbpipe.stage_backward_weight([one.w], groups)
    assert groups[0].spent


@pytest.mark.parametrize("splits", [True, False])
def test_such_groups_may_fill_waits(splits):
    """They run no code of the program's."""

    def deferring(x, w, grad):
        return right(x, w, grad), zbpipe.defer(lambda x, grad: x.t() @ grad, 1, (x, grad))

    one, x = stage(plain if splits else deferring), random(3, 4)
    output = one(x)
    _, (group,) = zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], [one.w])
    assert group._only_adds == splits


def test_nothing_is_left_when_groups_are_dropped():
    gone = []

    def backward(x, w, grad):
        gone.append(weakref.ref(x))
        return plain(x, w, grad)

    one, x = stage(backward), random(3, 4)
    output = one(x)
    gc.disable()
    try:
        _, groups = zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], [one.w])
        del groups, output
        assert gone[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", ["before", "after"])
def test_a_backward_that_raises(fails):
    def backward(x, w, grad):
        if fails == "before":
            raise ValueError("planted")
        gw = x.t() @ grad
        if fails == "after":
            raise ValueError("planted")
        return right(x, w, grad), gw

    one, x = stage(backward), random(3, 4)
    output = one(x)
    with pytest.raises(RuntimeError) as raised:
        zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], [one.w])
    assert isinstance(raised.value.__cause__, ValueError)
    assert type(torch.ones(4, 1, dtype=f64) @ torch.ones(1, 5, dtype=f64)) is torch.Tensor


def test_retained_groups_compute_again():
    one, x = stage(plain), random(3, 4)
    output = one(x)
    _, groups = zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], [one.w])
    zbpipe.stage_backward_weight([one.w], groups, retain_graph=True)
    once = one.w.grad.clone()
    zbpipe.stage_backward_weight([one.w], groups)
    assert torch.equal(one.w.grad, 2 * once)


def test_a_product_that_cannot_be_is_refused_at_once():
    def backward(x, w, grad):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.ones(4, 2, dtype=f64) @ torch.ones(3, 5, dtype=f64)
        with pytest.raises(RuntimeError, match="dtype"):
            torch.ones(4, 2, dtype=f64) @ torch.ones(2, 5)
        return plain(x, w, grad)

    check(stage(backward), (3, 4), orders=(late,))


def test_by_hand_and_without_a_word():
    def backward(x, w, grad):
        gw = zbpipe.defer(lambda product: product * 2, weights=1, saved=(x.t() @ grad,))
        return right(x, w, grad), gw

    check(stage(backward), (3, 4), exact=True)


# ---- surroundings


def test_a_backward_within_the_backward():
    inner = weight(4, 5)

    def backward(x, w, grad):
        with torch.enable_grad():
            y = x.detach().requires_grad_() @ inner
        (di,) = torch.autograd.grad(y, inner, grad)
        y = None
        with torch.enable_grad():
            (x.detach() @ inner).backward(grad)
        assert type(inner.grad) is torch.Tensor
        inner.grad = None
        return right(x, w, grad), di

    one = stage(backward)
    check(one, (3, 4), exact=True)
    assert products(one, random(3, 4))[1] == 0


def test_a_function_within_the_backward():
    """What its forward multiplies gets a history when it has returned."""

    def backward(x, w, grad):
        x, inner = x.detach().requires_grad_(), torch.ones(4, 4, dtype=f64, requires_grad=True)
        with torch.enable_grad():
            out = Heeding.apply(x, inner, Stage(None)).sin()
        assert out.numel() == w.numel()
        (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
        return dx, x.detach().t() @ grad

    check(stage(backward), (5, 4), exact=True)
    assert products(stage(backward), random(5, 4))[1] == 1


def test_products_with_a_history():
    def backward(x, w, grad):
        with torch.enable_grad():
            gw = x.detach().requires_grad_().t() @ grad
        assert gw.requires_grad
        return right(x, w, grad), gw.detach()

    check(stage(backward), (3, 4), exact=True)


class Quantized(torch.Tensor):
    """A tensor at a scale, whose products are plain, as torchao's float8 tensors' are."""

    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            a, b = args
            return torch.mm(a.data_, b.data_).mul(1 / (a.scale * b.scale)) if cls.scales else torch.mm(a.data_, b.data_)
        if func is torch.ops.aten.t.default:
            return cls(args[0].data_.t(), args[0].scale)
        raise NotImplementedError(func)


class Exact(Quantized):
    scales = False


class Scaled(Quantized):
    scales = True


class Wrapping(Quantized):
    """Its products are of its class."""

    scales = False

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return cls(result, 1.0) if type(result) is not cls else result


@pytest.mark.parametrize(("cls", "expected"), [(Exact, (0, 1)), (Scaled, (1, 0)), (Wrapping, (1, 0))])
def test_products_of_subclasses(cls, expected):
    def backward(x, w, grad):
        gw = cls(x, 2.0).t() @ cls(grad, 4.0)
        return right(x, w, grad), gw.data_ if cls is Wrapping else gw

    one = stage(backward)
    check(one, (3, 4), exact=True)
    products(one, random(3, 4))  # classes that wrap are learned
    assert products(one, random(3, 4)) == expected


def test_functions_that_the_backward_compiles():
    torch.compiler.reset()
    compiled = torch.compile(lambda x, grad: torch.mm(x.t(), grad).sin(), backend="eager")

    def backward(x, w, grad):
        return right(x, w, grad), compiled(x.detach(), grad)

    check(stage(backward), (3, 4), orders=(late,))


def test_a_compiled_function_that_writes_to_a_product_behind_another_one():
    torch.compiler.reset()
    double = torch.compile(lambda grad: grad * 2, backend="eager")
    double_in_place = torch.compile(lambda grad: grad.mul_(2), backend="eager")

    def behind(x, w, grad):
        return right(x, w, grad), double(x.t() @ grad)

    def before(x, w, grad):
        gw = x.t() @ grad
        double_in_place(gw)
        return right(x, w, grad), gw

    def forward(m, x):
        return Custom.apply(Custom.apply(x, m.w, before), m.w2, behind)

    check(Stage(forward, w=(4, 4), w2=(4, 4)), (3, 4), orders=(late,), microbatches=3)


def test_what_aot_autograd_has_made_is_left_alone():
    torch.compiler.reset()
    compiled = torch.compile(lambda x, w: (x @ w).tanh(), backend="aot_eager")
    one = Stage(lambda m, x: compiled(x, m.w), w=(4, 5))
    check(one, (3, 4), orders=(late,))
    assert products(one, random(3, 4)) == (1, 0)


def test_explain_says_that_it_is_handed_over():
    (w,) = zbpipe.explain(stage(plain), random(3, 4)).parameters
    assert [(use.runs_in, use.why) for use in w.uses] == [("W", "handed over by zbpipe.defer or split_functions")]
