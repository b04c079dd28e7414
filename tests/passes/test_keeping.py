"""What Functions, hooks and handed-over work return, and keep: a buffer that the next microbatch overwrites.

An ordinary backward has used a gradient before the next backward begins. Each program here runs three microbatches in
flight, F F F I I I W W W, and is compared with ordinary backwards one by one.
"""

import functools

import pytest
import torch
from support.functions import Planned, function_of, handing_through, raising
from support.oracle import Stage, close, needs_zbpipe
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import zbpipe

pytestmark = needs_zbpipe

f64 = torch.float64
ROWS, WIDTH = 3, 4
MICROBATCHES = 3


# x @ w, whose gradients are what `given(x, w, grad)` returns.
gives = function_of(lambda x, w, given: x @ w, lambda x, w, given, grad: given(x, w, grad))


def program(function):
    """A stage of three weights. It keeps a buffer of each of a weight's and an activation's shape."""
    buffers = {"square": (WIDTH, WIDTH), "rows": (ROWS, WIDTH), "pair": (2, WIDTH, WIDTH)}
    made = {name: torch.zeros(shape, dtype=f64) for name, shape in buffers.items()}
    return Stage(function, w=(WIDTH, WIDTH), u=(WIDTH, WIDTH), t=(WIDTH, WIDTH), **made)


def written(buffer, value):
    return buffer.copy_(value)


def past_the_counter(buffer, value):
    """As a kernel of Triton, or a graph that is replayed, writes."""
    buffer.data.copy_(value)
    return buffer


def for_weight(give):
    """x @ w @ u, where `give(stage, product)` makes the gradient of w of what is right."""
    return lambda m, x: gives(x, m.w, lambda x, w, g: (g @ w.t(), give(m, x.t() @ g))).sin() @ m.u


def for_input(give):
    return lambda m, x: gives(x, m.w, lambda x, w, g: (give(m, g @ w.t()), x.t() @ g)).sin() @ m.u


def dummy(m, x):
    """The gradient goes where the Function says; what it returns is for the hooks' sake."""

    def give(x, w, grad):
        m.pair[0] += x.t() @ grad
        return grad @ w.t(), m.square.zero_().detach()

    h = gives(x, m.w, give).sin()
    return gives(h, m.u, give) @ m.t


def adds_to_an_earlier_use(m, x):
    """The first use to run returns its product and keeps it; the others add theirs to it."""
    left, sums = [3], []

    def give(x, w, grad):
        left[0] -= 1
        product = x.t() @ grad
        if sums:
            sums[0] += product
        else:
            sums.append(product)
        result = product if left[0] == 2 else None
        if not left[0]:
            sums.clear()
        return grad @ w.t(), result

    for _ in range(3):
        x = gives(x, m.w, give).sin()
    return x @ m.u


def one_workspace_for_two_weights(m, x):
    def give(x, w, grad):
        return grad @ w.t(), m.square.copy_(x.t() @ grad)

    return gives(gives(x, m.w, give).sin(), m.u, give) @ m.t


@functools.partial(function_of, lambda x, w, u, give: x @ w + (x @ u).sin())
def pair(x, w, u, give, grad):
    """The weights' gradients are the two of what `give` makes of both."""
    other = grad * (x @ u).cos()
    return grad @ w.t() + other @ u.t(), *give(x.t() @ grad, x.t() @ other)


def slots(give):
    return lambda m, x: pair(x, m.w, m.u, lambda *grads: give(m, *grads)).sin() @ m.t


def into_the_pair(m, dw, du):
    m.pair[0], m.pair[1] = dw, du
    return m.pair.unbind(0)


def into_one(m, dw, _):
    """The one gradient is for both weights: wrong, and the same in an ordinary backward."""
    m.square.copy_(dw)
    return m.square, m.square


def hook_on(where, write=written):
    """A hook that doubles the gradient, and returns it in a buffer of its own."""

    def forward(m, x):
        def doubles(grad):
            return write(m.rows, grad * 2)

        if where == "input":
            x.register_hook(doubles)
        h = x @ m.w
        if where == "product":
            h.register_hook(doubles)
        elif where == "node":
            h.grad_fn.register_prehook(lambda grads: (doubles(grads[0]),))
        h = h + x
        if where == "sum":
            h.register_hook(doubles)
        return h.sin() @ m.u

    return forward


def post_hook(product):
    """Of a node with a weight: it replaces all gradients, the weight's among them."""

    def forward(m, x):
        h = product(x, m.w)
        h.grad_fn.register_hook(lambda grads, _: (m.rows.copy_(grads[0]), m.square.copy_(grads[1] * 2)))
        return h.sin() @ m.u

    return forward


def behind_a_product(kind):
    """The product keeps what a hook behind it returns, of a node with a weight that hands its gradient on."""

    def forward(m, x):
        def doubles(grads, *_):
            return (m.rows.copy_(grads[0] * 2), *grads[1:])

        h = x @ m.w
        h = h @ m.u if kind == "post" else h + m.t[0]
        if kind == "tensor":
            h.register_hook(lambda grad: doubles((grad,))[0])
        else:
            (h.grad_fn.register_hook if kind == "post" else h.grad_fn.register_prehook)(doubles)
        return h.sin() @ m.t

    return forward


def module_hook(register, is_first=False):
    """A module's hook, which gives a buffer for the gradient of its output, or of its input."""

    def forward(m, x):
        if not hasattr(m, "layer"):
            m.layer = nn.Identity()
            getattr(m.layer, register)(lambda _, grads, *__: (m.rows.copy_(grads[0] * 2),))
        return m.layer(x).sin() @ m.w if is_first else m.layer(x @ m.w).sin() @ m.u

    return forward


def handing(m, x):
    """Its work returns the weight's gradient in a workspace; two weights share it."""

    def give(x, w, grad):
        return grad @ w.t(), zbpipe.defer(lambda x, g: m.square.copy_(x.t() @ g), 1, (x, grad))

    return gives(gives(x, m.w, give).sin(), m.u, give) @ m.t


def hook_on_a_weight(m, x):
    """It returns a buffer in W."""
    if not hasattr(m, "handle"):
        m.handle = m.w.register_hook(lambda grad: m.square.copy_(grad * 2))
    return (x @ m.w).sin() @ m.u


def computed_weight(m, x):
    """A hook on a tensor outside the closure, and a Function that computes a weight, keep what they return."""
    c = m.w @ m.u
    c.register_hook(lambda grad: m.square.copy_(grad * 2))
    return x @ c + x @ gives(m.w, m.t, lambda w, t, g: (m.pair[0].copy_(g @ t.t()), m.pair[1].copy_(w.t() @ g)))


def handed_on(computed, write=written):
    """A Function keeps what it returns for a weight that another node computes and hands the gradient on to."""
    return lambda m, x: gives(x, computed(m), lambda x, w, g: (g @ w.t(), write(m.square, x.t() @ g)))


handed_through = handing_through(lambda w: w.clone(), lambda grad: grad)


def constant(m, x):
    """Of the input: the Function's slope, made once."""
    slope = handing_through(lambda x: (x * 2).sum(), lambda grad: m.rows.fill_(2.0).mul_(grad))
    return slope(x).sin() * m.w[0]


KEPT = {
    "dummy": dummy,
    "workspace": for_weight(lambda m, dw: m.square.copy_(dw)),
    "workspace, past the counter": for_weight(lambda m, dw: past_the_counter(m.square, dw)),
    "workspace, detached": for_weight(lambda m, dw: m.square.copy_(dw).detach()),
    "workspace, transposed": for_weight(lambda m, dw: m.square.copy_(dw.t()).t()),
    "workspace, a view": for_weight(lambda m, dw: m.pair[1].copy_(dw)),
    "workspace, a view of a view, past the counter": for_weight(
        lambda m, dw: past_the_counter(m.pair[:1], dw[None]).view(WIDTH, WIDTH)
    ),
    "workspace for two weights": one_workspace_for_two_weights,
    "adds to an earlier use": adds_to_an_earlier_use,
    "two slots, one buffer": slots(into_the_pair),
    "two slots, one tensor": slots(into_one),
    "two slots, fresh memory": slots(lambda m, dw, du: torch.stack([dw, du]).unbind(0)),
    "input, constant": constant,
    "input, workspace": for_input(lambda m, dx: m.rows.copy_(dx)),
    "input, workspace past the counter": for_input(lambda m, dx: past_the_counter(m.rows, dx)),
    "input, a view": for_input(lambda m, dx: m.pair[0, :ROWS].copy_(dx)),
    **{f"hook on {where}": hook_on(where) for where in ("product", "input", "sum", "node")},
    **{f"hook on {where}, past the counter": hook_on(where, past_the_counter) for where in ("product", "input", "sum")},
    "post hook": post_hook(torch.matmul),
    "post hook of a Function": post_hook(lambda x, w: gives(x, w, lambda x, w, g: (g @ w.t(), x.t() @ g))),
    **{f"behind a product, {kind}": behind_a_product(kind) for kind in ("post", "pre", "tensor")},
    "module pre hook": module_hook("register_full_backward_pre_hook"),
    "module hook": module_hook("register_full_backward_hook"),
    "module hook on the input": module_hook("register_full_backward_hook", is_first=True),
    "hook on a weight": hook_on_a_weight,
    "computed weights": computed_weight,
    "handed on by a sum": handed_on(lambda m: m.w + m.w),
    "handed on by a sum, past the counter": handed_on(lambda m: m.w + m.u, past_the_counter),
    "handed on by a sum of views": handed_on(lambda m: (m.w.t() + m.u).view(WIDTH, WIDTH), past_the_counter),
    "handed on by a stack": handed_on(lambda m: torch.stack([m.w, m.u])[1], past_the_counter),
    "handed on by a Function": handed_on(lambda m: handed_through(m.w), past_the_counter),
    "handed on by a Function to a sum": handed_on(lambda m: handed_through(m.w + m.u), past_the_counter),
    "handed over": handing,
}


class Ways:
    """One program, and its two ways: whole backwards one by one, and I and W of all microbatches in flight."""

    def __init__(self, function):
        torch.manual_seed(0)
        self.module = program(function)
        self.xs = [torch.randn(ROWS, WIDTH, dtype=f64, requires_grad=True) for _ in range(MICROBATCHES)]
        self.weights = list(self.module.parameters())

    def whole(self):
        """Adds to zeros: an accumulator without a gradient takes a new tensor over the buffer, and then it is the buffer."""
        for tensor in (*self.xs, *self.weights):
            tensor.grad = torch.zeros_like(tensor)
        for x in self.xs:
            y = self.module(x)
            y.backward(torch.ones_like(y))
        return [x.grad for x in self.xs]

    def input_passes(self):
        """The groups of each microbatch."""
        outs = [self.module(x) for x in self.xs]
        self.dinputs, groups = [], []
        for x, y in zip(self.xs, outs, strict=True):
            (dx,), each = zbpipe.stage_backward_input([y], [torch.ones_like(y)], [x], iter(self.weights))
            self.dinputs.append(dx)
            groups.append(each)
        return groups

    def split(self):
        for groups in self.input_passes():
            zbpipe.stage_backward_weight(iter(self.weights), groups)
        close([x.grad for x in self.xs], self.dinputs, "what I returns")
        return self.dinputs

    def result(self, dinputs):
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights]
        return [*dinputs, *grads, self.module.pair]


def check(function):
    whole, split = Ways(function), Ways(function)
    expected = whole.result(whole.whole())
    close(split.result(split.split()), expected, "gradients of inputs and weights")


@pytest.mark.parametrize("name", KEPT)
def test_what_others_keep_is_right_in_flight(name):
    check(KEPT[name])


@pytest.mark.parametrize("policy", [{"defer": "all"}, {"defer": "nothing"}, {"checkpoint": "recompute"}], ids=str)
def test_under_each_policy(policy):
    for name, function in KEPT.items():
        with zbpipe.policy(**policy):
            try:
                check(function)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("name", ["handed over", "workspace", "workspace for two weights"])
def test_kept_over_a_retained_weight_pass(name):
    """Two W's of one I, other microbatches between them: twice the gradients."""
    whole, split = Ways(KEPT[name]), Ways(KEPT[name])
    whole.whole()
    groups = split.input_passes()
    for last in (False, True):
        for each in groups:
            zbpipe.stage_backward_weight(iter(split.weights), each, retain_graph=not last)
    close(split.result([]), [2 * grad for grad in whole.result([])[:-1]] + [split.module.pair], "twice the gradients")


@pytest.mark.parametrize("name", ["handed over", "workspace", "workspace for two weights"])
@pytest.mark.parametrize("which", [0, 1])
def test_kept_over_a_retry(name, which):
    """A hook on a weight raises once; the other microbatches run before W is tried again."""
    whole, split = Ways(KEPT[name]), Ways(KEPT[name])
    whole.whole()
    first, *others = split.input_passes()
    handle = split.weights[which].register_hook(raising())
    with pytest.raises(Planned):
        zbpipe.stage_backward_weight(iter(split.weights), first)
    for each in others:
        zbpipe.stage_backward_weight(iter(split.weights), each)
    zbpipe.stage_backward_weight(iter(split.weights), first)
    handle.remove()
    close(split.result([]), whole.result([]), "gradients")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("write", [written, lambda space, value: space._local_tensor.data.copy_(value._local_tensor)])
def test_kept_by_the_local_tensor_of_a_subclass(write):
    """A Function's workspace is a DTensor; or a new DTensor each time, over local memory that it keeps."""
    mesh = init_device_mesh("cpu", (1,))

    def spread(tensor):
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

    spaces = {}

    def forward(m, x):
        def give(x, w, g):
            space = spaces.setdefault(m, spread(torch.zeros(WIDTH, WIDTH, dtype=f64)))
            write(space, x.t() @ g)
            return g @ w.t(), space if write is written else spread(space.to_local())

        return gives(spread(x), spread(m.w), give).to_local().sin() @ m.u

    check(forward)


CPP = """
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
struct Kept : torch::autograd::Function<Kept> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, at::Tensor x, at::Tensor w, at::Tensor rows,
                            at::Tensor square) {
    ctx->save_for_backward({x, w});
    ctx->saved_data["rows"] = rows;
    ctx->saved_data["square"] = square;
    return x.mm(w);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    auto saved = ctx->get_saved_variables();
    at::Tensor rows = ctx->saved_data["rows"].toTensor(), square = ctx->saved_data["square"].toTensor();
    rows.copy_(grads[0].mm(saved[1].t()));
    square.copy_(saved[0].t().mm(grads[0]));
    return {rows, square, at::Tensor(), at::Tensor()};
  }
};
TORCH_LIBRARY(zbpipe_keeping, library) {
  library.def("kept", [](at::Tensor x, at::Tensor w, at::Tensor rows, at::Tensor square) {
    return Kept::apply(x, w, rows, square);
  });
}
"""


@pytest.mark.slow
def test_what_cpp_functions_keep(tmp_path):
    """It returns workspaces for the input's gradient and for the weight's."""
    from torch.utils.cpp_extension import load_inline

    load_inline(
        "zbpipe_keeping", CPP, is_python_module=False, no_implicit_headers=True, extra_cflags=["-O0"],
        build_directory=str(tmp_path),
    )  # fmt: skip
    check(lambda m, x: torch.ops.zbpipe_keeping.kept(x, m.w, m.rows, m.square).sin() @ m.u)


# What use counts cannot see: these are limits, and the pages name them.


def foreign(m, x):
    """Each backward makes a tensor over memory that somebody else has: nobody holds the tensor."""
    array = m.square.numpy()

    def give(x, w, grad):
        array[...] = (x.t() @ grad).numpy()
        return grad @ w.t(), torch.from_numpy(array)

    return gives(x, m.w, give).sin() @ m.u


# sin(x), whose gradient lies in a buffer.
through = function_of(lambda x, m, write: x.sin(), lambda x, m, write, grad: write(m.rows, grad * x.cos()))


def activation(write):
    """The product x @ w saves what the Function behind it keeps."""
    return lambda m, x: through(x @ m.w, m, write) @ m.u


@pytest.mark.parametrize("function", [foreign, activation(past_the_counter)], ids=["numpy", "activation"])
def test_limit_memory_that_is_written_unseen(function):
    """Each microbatch's gradient of w is made of what the last one wrote."""
    whole, split = Ways(function), Ways(function)
    whole.whole()
    split.split()
    assert not torch.allclose(split.module.w.grad, whole.module.w.grad)
    close(split.module.u.grad, whole.module.u.grad, "gradient of u")


def test_limit_an_activations_gradient_that_is_written_is_refused():
    split = Ways(activation(written))
    groups = split.input_passes()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        zbpipe.stage_backward_weight(iter(split.weights), groups[0])
    assert all(w.grad is None for w in split.weights), "something was added"
    zbpipe.stage_backward_weight(iter(split.weights), groups[-1])
