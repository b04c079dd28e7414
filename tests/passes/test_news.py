"""What torch 2.15 has new in autograd, in a graph that is split: as in an ordinary backward."""

import copy

import pytest
import torch
from support.functions import Product
from support.oracle import needs_zbpipe
from torch import nn

import zbpipe

pytestmark = [needs_zbpipe, pytest.mark.skipif(torch.__version__ < (2, 15), reason="new in torch 2.15")]
POLICIES = [{}, {"defer": "all"}, {"defer": "nothing"}, {"fused": True}]


def split_backward(net, x, grad, **policy):
    with zbpipe.policy(**policy):
        out = net(x)
        (dinput,), groups = zbpipe.stage_backward_input([out], [grad], [x], net.parameters())
        zbpipe.stage_backward_weight(net.parameters(), groups)
    return dinput


def compare(net, policy, shape=(4, 8), dtype=torch.float32, microbatches=2):
    """Over microbatches, beside a copy: the input's gradient, and the weights' with their dtypes."""
    plain = copy.deepcopy(net)
    for theirs, ours in zip(plain.parameters(), net.parameters(), strict=True):
        if ours._has_grad_dtype_override:
            theirs.grad_dtype = ours.grad_dtype
    for _ in range(microbatches):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        out = plain(y)
        grad = torch.randn_like(out)
        out.backward(grad)
        torch.testing.assert_close(split_backward(net, x, grad, **policy), y.grad, rtol=0, atol=0)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None
            continue
        assert ours.grad.dtype == theirs.grad.dtype
        # Fused, a product and what it is added to are rounded once, in bfloat16.
        tolerances = {"rtol": 2**-6, "atol": 2**-5} if torch.bfloat16 in (dtype, ours.grad.dtype) else {}
        torch.testing.assert_close(ours.grad, theirs.grad, **tolerances)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("of_weights", "of_gradients"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, None), (torch.bfloat16, None)],
)
def test_weights_that_say_in_which_dtype_they_sum(of_weights, of_gradients, policy):
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).to(of_weights)
    for weight in net.parameters():
        weight.grad_dtype = of_gradients
    compare(net, policy, dtype=of_weights)


class IntoBuffers(Product):
    """Adds its input's gradient to what is there already, where it may."""

    calls = 0
    added = 0

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        IntoBuffers.calls += 1
        buffer, _ = ctx.input_grad_buffers
        if buffer is None:
            return grad @ weight.t(), x.t() @ grad
        IntoBuffers.added += 1
        buffer.add_(grad @ weight.t())
        return None, x.t() @ grad


class WithFunction(nn.Module):
    """Two uses of the same activation: one of them may add to the other's gradient."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.inner = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.other = nn.Linear(8, 8)

    def forward(self, x):
        h = self.inner(x).tanh()
        return self.function.apply(h, self.weight) + self.other(h)


class AtTheInput(WithFunction):
    def forward(self, x):
        return self.function.apply(x, self.weight) + self.other(x)


class BetweenWeights(WithFunction):
    """Its inputs are weights: W runs it."""

    def forward(self, x):
        w = self.inner.weight.tanh()
        return x @ self.function.apply(w, self.weight) + x @ (w * self.other.weight)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("net", [WithFunction, AtTheInput, BetweenWeights])
def test_a_function_that_adds_into_its_consumers_buffer(net, policy):
    IntoBuffers.calls = IntoBuffers.added = 0
    compare(net(IntoBuffers), policy)
    assert IntoBuffers.calls == IntoBuffers.added == 4  # once per microbatch, here and there


def test_such_a_function_with_a_post_hook_is_refused_as_by_torch():
    net = WithFunction(IntoBuffers)

    def watched():
        x = torch.randn(4, 8, requires_grad=True)
        h = net.inner(x).tanh()
        product = IntoBuffers.apply(h, net.weight)
        product.grad_fn.register_hook(lambda grad_inputs, grads: None)
        return x, product + net.other(h)

    with pytest.raises(RuntimeError, match="input_grad_buffers"):
        watched()[1].sum().backward()
    x, out = watched()
    with pytest.raises(RuntimeError, match="Failed to run stage backward input") as raised:
        zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], net.parameters())
    assert "input_grad_buffers" in str(raised.value.__cause__)


class InFloat32(torch.autograd.Function):
    """Wants its output's gradient in float32, whatever the output is in."""

    seen = None

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.set_output_grad_dtype(torch.float32)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        InFloat32.seen.append(grad.dtype)
        x, weight = ctx.saved_tensors
        return (grad @ weight.t().float()).to(x.dtype), (x.t().float() @ grad).to(weight.dtype)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_function_that_names_its_output_gradients_dtype(policy):
    InFloat32.seen = []
    compare(WithFunction(InFloat32).bfloat16(), policy, dtype=torch.bfloat16)
    assert len(InFloat32.seen) == 4
    assert len(set(InFloat32.seen)) == 1


class AsksForNeeds(Product):
    """torch 2.15 works out what needs a gradient when it is asked."""

    seen = None

    @staticmethod
    def backward(ctx, grad):
        AsksForNeeds.seen.append(ctx.needs_input_grad)
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad if ctx.needs_input_grad[1] else None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_function_is_told_of_what_needs_a_gradient(policy, frozen):
    AsksForNeeds.seen = []
    net = WithFunction(AsksForNeeds)
    net.weight.requires_grad_(not frozen)
    x = torch.randn(4, 8, requires_grad=True)
    out = net(x)
    out.backward(torch.ones_like(out))
    expected = {name: w.grad for name, w in net.named_parameters()}
    net.zero_grad()
    split_backward(net, x.detach().requires_grad_(), torch.ones_like(out), **policy)
    assert AsksForNeeds.seen == [(True, not frozen)] * 2
    torch.testing.assert_close({name: w.grad for name, w in net.named_parameters()}, expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hook_on_the_making_of_nodes_sees_none_of_ours(policy):
    """Neither I nor W makes a node that a program's graph has."""
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    seen = []
    with torch.autograd.graph.node_creation_hook(lambda node, *rest: seen.append(node.name())):
        x = torch.randn(4, 8, requires_grad=True)
        out = net(x)
        made = list(seen)
        (_,), groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], net.parameters())
        zbpipe.stage_backward_weight(net.parameters(), groups)
    assert made
    assert [name for name in seen[len(made) :] if "zbp" in name.lower()] == []
    assert seen == made
