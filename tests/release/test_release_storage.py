"""release_storage: frees what nobody else needs; otherwise says who does, and changes nothing."""

import weakref

import numpy as np
import pytest
import torch
from support.functions import function_of
from support.oracle import without_collector
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import zbpipe

pytestmark = pytest.mark.usefixtures("quick_collections")


def product():
    """3 x 4 float32, 48 bytes; its node needs the factors alone."""
    return torch.randn(3, 4, requires_grad=True) @ torch.randn(4, 4)


def holders(tensor):
    """What the refusal names; the tensor is as before."""
    values = tensor.detach().clone()
    with pytest.raises(RuntimeError) as refusal:
        zbpipe.release_storage(tensor)
    assert torch.equal(tensor.detach(), values)
    text = str(refusal.value)
    listed = text.split(": ", 1)[1].removesuffix("; drop it first").removesuffix("; drop them first").split("; ")
    count = int(text.split("because it has ")[1].split()[0])
    assert (count == 1) == text.endswith("drop it first")
    return count, listed


def test_the_last_use_frees_the_bytes():
    tensor = product()
    ref = StorageWeakRef(tensor.untyped_storage())
    assert zbpipe.release_storage(tensor) == 48
    assert ref.expired()
    assert zbpipe.release_storage(tensor) == 0
    with pytest.raises(RuntimeError, match=r"given up by zbpipe.release_storage"):
        tensor + 1
    tensor.backward(torch.ones(3, 4))


def test_a_leaf_a_parameter_and_a_detached_view_can_be_released():
    for tensor in (torch.ones(3), torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(3))):
        assert zbpipe.release_storage(tensor) == 12
    alias = torch.ones(3)
    alias = alias.detach()
    assert zbpipe.release_storage(alias) == 12
    assert zbpipe.release_storage(zbpipe.make_viewless(product()[1:])) == 32


def test_asking_for_the_storage_once_is_no_use():
    tensor = product()
    tensor.untyped_storage().nbytes()
    assert zbpipe.release_storage(tensor) == 48


saving = function_of(lambda x: x * 2, lambda x, grad: grad * 2)


def with_gradient():
    leaf = torch.ones(3, requires_grad=True)
    (leaf * 2).sum().backward()
    return leaf.grad, leaf


def beside_an_unusable_view():
    base = torch.ones(2, 3, requires_grad=True) * 2
    unusable = base.unbind()[0]
    base.mul_(2)
    return product_and(lambda t: (t.view(-1), unusable))()


def product_and(hold):
    def make():
        tensor = product()
        return tensor, hold(tensor)

    return make


def detached(leaf):
    return leaf.detach(), leaf


def of_a_product():
    weight = nn.Parameter(torch.ones(4, 4))
    return weight, torch.ones(3, 4, requires_grad=True) @ weight


BASE = "its base, a result of MmBackward0 of float32 [3, 4] on cpu"
SAME_MEMORY = "which keeps a tensor on the same memory as"
# What makes the tensor, and what else is kept; who holds it, sorted.
HELD = {
    "a storage in Python": (product_and(lambda t: t.untyped_storage()), ["an UntypedStorage in Python"]),
    "a view and an alias": (
        product_and(lambda t: (t.view(-1), t.detach())),
        ["a tensor without history of float32 [3, 4] on cpu", "a view of float32 [12] on cpu"],
    ),
    "a view, beside another whose history is unusable": (beside_an_unusable_view, ["a view of float32 [12] on cpu"]),
    "a base": (lambda: product_and(lambda t: t.view(-1))()[::-1], [BASE]),
    "a base that Python has forgotten": (lambda: (product()[1:], None), [BASE]),
    "a parameter": (lambda: detached(nn.Parameter(torch.ones(3))), ["a parameter of float32 [3] on cpu"]),
    "a leaf": (
        lambda: detached(torch.ones(3, requires_grad=True)),
        ["a leaf that requires a gradient of float32 [3] on cpu"],
    ),
    "whose gradient it is": (with_gradient, ["the .grad of a leaf that requires a gradient of float32 [3] on cpu"]),
    "its own node": (lambda: (product().exp(), None), [f"ExpBackward0, {SAME_MEMORY} result"]),
    "the next node, twice": (
        product_and(lambda t: t * t),
        ["MulBackward0, which keeps it as other", "MulBackward0, which keeps it as self"],
    ),
    "nodes, of a parameter": (
        of_a_product,
        ["MmBackward0, which keeps it as mat2", "torch::autograd::AccumulateGrad, which keeps it as its leaf"],
    ),
    "a node that saved a view, one holder": (
        product_and(lambda t: ((row := t[0]), row.sin())),
        [f"SinBackward0, {SAME_MEMORY} self", "a view of float32 [4] on cpu"],
    ),
    "a Function": (product_and(saving), ["MadeBackward, which keeps it as tensors"]),
    "what Python cannot see": pytest.param(
        product_and(lambda t: torch._C._autograd._make_saved_tensor(t, False)),
        ["1 that cannot be seen from Python, such as a send under way"],
        marks=pytest.mark.skipif(
            not hasattr(torch._C._autograd, "_make_saved_tensor"),
            reason="here Python cannot have C++ hold a tensor (2.11)",
        ),
    ),
}


@pytest.mark.parametrize(("make", "expected"), HELD.values(), ids=HELD)
def test_holders_are_named(make, expected):
    tensor, kept = make()
    count, listed = holders(tensor)
    assert (count, sorted(listed)) == (len(expected), expected)
    del kept


def test_hooks_are_not_run_and_what_they_packed_is_seen():
    ran = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.detach().numpy(),), lambda n: ran.append(n)):
        tensor = product()
        wave = tensor.sin()
    count, listed = holders(tensor)
    assert count == 1 and listed == ["a tensor without history of float32 [3, 4] on cpu"]
    assert not ran and wave is not None


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_make_saved_tensor"), reason="Python cannot have C++ hold a tensor"
)
def test_what_hooks_packed_into_cpp_is_said_to_be_unknown():
    ran = []

    def pack(tensor):  # into a tensor that only C++ has
        torch._C._autograd._pop_saved_tensors_default_hooks()
        packed = torch._C._autograd._make_saved_tensor(tensor, True)
        torch._C._autograd._push_saved_tensors_default_hooks(pack, ran.append)
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, ran.append):
        tensor = product()
        wave = tensor.sin()
    count, listed = holders(tensor)
    assert count == 1
    assert listed[0].startswith("1 that cannot be seen from Python, such as a send under way or one of ")
    assert listed[0].endswith("saved tensors that hooks have packed")
    assert not ran and wave is not None


def test_only_eight_are_described_and_all_are_counted():
    tensor = torch.ones(12)
    views = [tensor[i:] for i in range(12)]
    count, listed = holders(tensor)
    assert count == 12 and len(listed) == 9 and listed[-1] == "4 more that Python can see"
    views.clear()
    assert zbpipe.release_storage(tensor) == 48


@pytest.mark.parametrize(
    "make",
    [lambda: torch.from_numpy(np.ones(3)), lambda: torch.ones(6).share_memory_(), lambda: torch._lazy_clone(ones)],
)
def test_memory_that_is_not_torchs_to_free_is_refused(make):
    with pytest.raises(ValueError, match=r"on cpu and lies in 24 bytes that are not torch's alone to free"):
        zbpipe.release_storage(make())


ones = torch.ones(6)


def test_memory_lent_to_numpy_is_kept_until_it_comes_back():
    tensor = torch.ones(3)
    array = tensor.numpy()
    assert holders(tensor) == (1, ["a tensor without history of float32 [3] on cpu"])
    del array
    assert zbpipe.release_storage(tensor) == 12


def test_the_refusal_keeps_nothing_alive():
    tensor = product()
    view = tensor[1:]
    square = view * view
    dead = [weakref.ref(view), weakref.ref(square)]
    with without_collector():
        for _ in range(100):
            with pytest.raises(RuntimeError, match="3 other holders"):
                zbpipe.release_storage(tensor)
        del view, square
        assert [ref() for ref in dead] == [None, None]
        assert zbpipe.release_storage(tensor) == 48


def test_a_released_parameter_stays_one_and_can_have_new_memory():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    zbpipe.release_storage(weight)
    assert isinstance(weight, torch.nn.Parameter) and weight.requires_grad
    for read in (repr, lambda t: t[0] + 1):
        with pytest.raises(RuntimeError, match=r"given up by zbpipe.release_storage at .*test_release_storage.py:\d+"):
            read(weight)
    module = torch.nn.Module()
    module.weight = weight
    assert list(module.parameters()) == [weight]
    weight.data = torch.ones(2, 3)
    assert type(weight) is torch.nn.Parameter
    assert repr(weight).startswith("Parameter containing:")
