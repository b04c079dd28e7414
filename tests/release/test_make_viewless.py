"""make_viewless: the same values and gradients, and no base that stays alive."""

import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import zbpipe


def memory(tensor):
    return StorageWeakRef(tensor.untyped_storage())


def base():
    return torch.randn(4, 6, requires_grad=True) * 2


# How each view of 4 x 6 float32 is made, whether it fills the memory (and is not copied), and the bytes of the result.
VIEWS = {
    "reshaped": (lambda b: b.view(2, 12), True, 96),
    "transposed": (lambda b: b.t(), True, 96),
    "permuted": (lambda b: b.view(2, 2, 6).permute(2, 0, 1), True, 96),
    "of size one": (lambda b: b[None, :, None], True, 96),
    "expanded": (lambda b: b.unsqueeze(0).expand(5, 4, 6), True, 96),
    "another dtype": (lambda b: b.detach().view(torch.int32), True, 96),
    "row": (lambda b: b[1], False, 24),
    "column": (lambda b: b[:, 1], False, 16),
    "chunk": (lambda b: b.chunk(2)[1], False, 48),
    "chunk of columns": (lambda b: b.chunk(2, 1)[0], False, 48),
    "split": (lambda b: b.split([1, 3])[1], False, 72),
    "unbind": (lambda b: b.unbind()[2], False, 24),
    "the one chunk": (lambda b: b.chunk(1)[0], True, 96),
    "expanded part": (lambda b: b[1:2].expand(5, 6), False, 24),
    "overlapping": (lambda b: b.view(-1).unfold(0, 4, 2), False, 176),
    "diagonal": (lambda b: b.diagonal(), False, 16),
    "empty": (lambda b: b[:0], False, 0),
    "view of a view": (lambda b: b[1:].t()[2:], False, 48),
}


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("name", VIEWS)
def test_values_memory_and_gradients(name, grad_mode):
    make, shares, size = VIEWS[name]
    parent = base()
    view = make(parent)
    values, pointer, old, node = view.detach().clone(), view.data_ptr(), memory(view), view.grad_fn
    parent_alive = weakref.ref(parent)
    with torch.set_grad_enabled(grad_mode):
        viewless = zbpipe.make_viewless(view)
    assert torch.equal(viewless, values) and viewless.shape == values.shape
    assert not viewless._is_view() and viewless._base is None
    assert viewless.grad_fn is node and viewless.requires_grad == view.requires_grad
    assert (viewless.data_ptr() == pointer) == (shares or size == 0)
    assert viewless.untyped_storage().nbytes() == size
    del parent, view
    assert parent_alive() is None
    assert old.expired() != shares


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "another dtype"])
def test_gradients_are_those_of_the_view(name):
    make = VIEWS[name][0]
    x = torch.randn(4, 6, requires_grad=True)
    grad = torch.randn(make(x.detach()).shape)
    (want,) = torch.autograd.grad(make(x * 2), x, grad)
    out = zbpipe.make_viewless(make(x * 2))
    zbpipe.deallocate_output(out)
    (got,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(got, want)
    out = zbpipe.make_viewless(make(x * 2))
    out.detach_()
    assert out.grad_fn is None


def test_a_view_and_its_viewless_twin_add_their_gradients_and_share_hooks():
    x = torch.randn(4, 6, requires_grad=True)
    view, seen = (x * 2)[1:], []
    view.register_hook(lambda grad: seen.append(grad.clone()))
    view.retain_grad()
    twin = zbpipe.make_viewless(view)
    (view.sum() + 3 * twin.sum()).backward()
    assert torch.equal(view.grad, torch.full((3, 6), 4.0))
    assert torch.equal(x.grad[1:], torch.full((3, 6), 8.0)) and not x.grad[0].any()
    assert len(seen) == 1


def test_what_is_no_view_and_has_its_memory_to_itself_is_given_back():
    for tensor in (base(), torch.ones(3), nn.Parameter(torch.ones(3)), torch.ones(2, 3).detach(), torch.empty(0)):
        assert zbpipe.make_viewless(tensor) is tensor


def test_a_detached_part_is_copied_though_it_is_no_view():
    part = base().detach()[0].detach()
    assert not part._is_view() and part.untyped_storage().nbytes() == 96
    viewless = zbpipe.make_viewless(part)
    assert torch.equal(viewless, part) and viewless.untyped_storage().nbytes() == 24
    assert not viewless.requires_grad


def test_views_without_grad_mode_have_no_history_and_get_none():
    parent = base()
    with torch.no_grad():
        view = parent[1]
    alive = weakref.ref(parent)
    viewless = zbpipe.make_viewless(view)
    assert not viewless.requires_grad and viewless.grad_fn is None and not viewless._is_view()
    del parent, view
    assert alive() is None


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("part", [lambda t: t[1], lambda t: t.view(-1), lambda t: t[1].detach()])
def test_a_leaf_that_requires_a_gradient_stays_the_leaf(part, grad_mode):
    leaf = part(torch.randn(4, 6)).requires_grad_()
    with torch.set_grad_enabled(grad_mode):
        viewless = zbpipe.make_viewless(leaf)
    assert torch.equal(viewless, leaf) and not viewless._is_view() and not viewless.is_leaf
    (viewless * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 3))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("part", [lambda t: t.view(2, 12), lambda t: t[1:]])
def test_under_checkpoint(part, reentrant):
    x = torch.randn(4, 6, requires_grad=True)

    def block(y):
        return zbpipe.make_viewless(part(y.exp())).sin()

    (want,) = torch.autograd.grad(block(x).sum(), x)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_as_the_output_of_a_checkpoint(reentrant):
    x = torch.randn(4, 6, requires_grad=True)
    out = checkpoint(lambda y: zbpipe.make_viewless(y.exp()[1:]), x, use_reentrant=reentrant)
    assert zbpipe.deallocate_output(out) == 72
    out.backward(torch.ones(3, 6))
    assert torch.equal(x.grad[1:], x.detach().exp()[1:]) and not x.grad[0].any()


def test_a_change_in_place_of_shared_memory_is_noticed():
    parent = base()
    view = parent.view(-1)
    square = parent * parent
    viewless = zbpipe.make_viewless(view)
    with torch.no_grad():
        viewless.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_in_and_out_of_inference_mode():
    view = base()[1]
    with torch.inference_mode():
        inside = torch.ones(4)[1:]
        viewless, inner = zbpipe.make_viewless(view), zbpipe.make_viewless(inside)
    assert not viewless.is_inference() and viewless.grad_fn is view.grad_fn
    assert inner.is_inference() and inner.untyped_storage().nbytes() == 12
    assert torch.equal(zbpipe.make_viewless(inside), torch.ones(3))


def test_a_conjugated_view_keeps_its_values():
    view = torch.randn(3, 4, dtype=torch.complex64).conj()[1:]
    assert torch.equal(zbpipe.make_viewless(view), view)


class Named(torch.Tensor):
    """A subclass without a dispatch of its own."""


def test_a_view_of_another_class_is_refused():
    tensor = torch.ones(3, 4).as_subclass(Named)
    with pytest.raises(TypeError, match="Named, whose class the result could not have"):
        zbpipe.make_viewless(tensor[1])
    viewless = zbpipe.make_viewless(tensor[1].as_subclass(torch.Tensor))
    assert type(viewless) is torch.Tensor and viewless.untyped_storage().nbytes() == 16


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # the first dual tensor imports it
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_a_forward_mode_gradient_is_refused():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(3, 4), torch.ones(3, 4))
        with pytest.raises(ValueError, match=r"float32 \[4\] on cpu and carries a forward-mode gradient"):
            zbpipe.make_viewless(dual[1])
