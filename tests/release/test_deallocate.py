"""deallocate_output: the memory goes, the backward stays what it was, and reading what is gone raises."""

import _thread
import copy
import inspect
import io
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import zbpipe

GONE = "given up by zbpipe.deallocate_output"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def output(device="cpu"):
    """An output of 3 x 4 float32, 48 bytes, that its own node does not need."""
    return torch.randn(3, 4, device=device, requires_grad=True) * 2


def memory(tensor):
    return StorageWeakRef(tensor.untyped_storage())


# What is freed.


@pytest.mark.parametrize("device", DEVICES)
def test_the_memory_goes_and_the_identity_stays(device):
    out = output(device)
    node, ref = out.grad_fn, memory(out)
    assert not ref.expired()
    assert zbpipe.deallocate_output(out) == 48
    assert ref.expired()
    assert (out.shape, out.stride(), out.dtype, out.device.type) == ((3, 4), (4, 1), torch.float32, device)
    assert out.grad_fn is node and out.requires_grad and out.output_nr == 0


def test_the_allocator_gets_exactly_its_bytes_back_during_the_call():
    x = torch.randn(1000, requires_grad=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as trace:
        out = x * 2
        with torch.profiler.record_function("the call"):
            zbpipe.deallocate_output(out)
    used = {e.name: e.cpu_memory_usage for e in trace.events()}
    assert (used["aten::mul"], used["the call"]) == (4000, -4000)


@pytest.mark.parametrize(
    "hold",
    [
        pytest.param(lambda out: out.detach(), id="detached alias"),
        pytest.param(lambda out: out.view(-1), id="view"),
        pytest.param(lambda out: out[1], id="row"),
        pytest.param(lambda out: out.untyped_storage(), id="storage"),
        pytest.param(lambda out: out.detach().numpy(), id="numpy"),
        pytest.param(lambda out: torch.utils.dlpack.to_dlpack(out.detach()), id="dlpack"),
        pytest.param(lambda out: out * out, id="saved by the next node"),
        pytest.param(
            lambda out: torch._C._autograd._make_saved_tensor(out, False),
            id="held in C++",
            marks=pytest.mark.skipif(
                not hasattr(torch._C._autograd, "_make_saved_tensor"),
                reason="here Python cannot have C++ hold a tensor (2.11)",
            ),
        ),
    ],
)
def test_other_holders_keep_the_memory_until_the_last_is_gone(hold):
    out = output()
    ref, other = memory(out), hold(out)
    assert zbpipe.deallocate_output(out) == 0
    with pytest.raises(RuntimeError, match=GONE):
        out.sum()
    assert not ref.expired()
    del other
    assert ref.expired()


@pytest.mark.parametrize(
    "view", [lambda t: t.detach().numpy(), lambda t: np.from_dlpack(t.detach()), lambda t: t[1:].data]
)
def test_other_holders_read_the_right_values(view):
    out = output()
    other = view(out)
    expected = np.array(other.tolist())
    zbpipe.deallocate_output(out)
    junk = [torch.full((3, 4), -1.0) for _ in range(20)]
    assert np.array_equal(other.tolist(), expected) and junk


def lent_to_numpy_once():
    out = torch.ones(4) * 2
    out.numpy()
    return out


class Named(torch.Tensor):
    pass


kept = torch.ones(4)
# What is given, the bytes that it frees, and whether its memory goes. The second call frees nothing.
FREED = {
    "an output": (output, 48, True),
    "without history": (lambda: torch.ones(3) * 2, 12, True),
    "detached: torch forbids changes of its metadata": (lambda: torch.ones(3).detach(), 12, True),
    "empty": (lambda: torch.randn(0, 3, requires_grad=True) * 2, 0, True),
    "a scalar": (lambda: torch.randn(3, requires_grad=True).sum(), 4, True),
    "of a subclass": (lambda: torch.Tensor._make_subclass(Named, torch.ones(3, 4) * 2), 48, True),
    "once lent to numpy": (lent_to_numpy_once, 16, True),
    "numpy's": (lambda: torch.from_numpy(np.ones(4)), 0, True),
    "shared with processes": (lambda: torch.ones(4).share_memory_(), 0, True),
    "a lazy clone's": (lambda: torch._lazy_clone(kept), 0, True),
    "made for inference": (torch.inference_mode()(lambda: torch.ones(3) * 2), 12, True),
    "pinned": pytest.param(lambda: torch.ones(3).pin_memory(), 12, True, marks=pytest.mark.cuda),
}


@pytest.mark.parametrize(("make", "size", "goes"), FREED.values(), ids=FREED)
def test_what_is_counted_and_what_goes(make, size, goes):
    out = make()
    kind, ref = type(out), memory(out)
    assert [zbpipe.deallocate_output(out) for _ in range(2)] == [size, 0]
    assert ref.expired() == goes and type(out) is kind
    assert kept.tolist() == [1, 1, 1, 1]
    if out.requires_grad:
        out.backward(torch.ones(out.shape))
    with torch.inference_mode(out.is_inference()), pytest.raises(RuntimeError, match=GONE):
        out.data_ptr()


# The backward.


def plain(x, w):
    return x @ w


def saved_by_the_next(x, w):
    out = x @ w
    return out, (out * out).sum()


def view_saved_by_the_next(x, w):
    out = x @ w
    return out, out[0].sin().sum()


def changed_through_a_view(x, w):
    out = x @ w
    out.view(-1).mul_(3)
    return out


def a_view_is_changed_later(x, w):
    out = x @ w
    return out, (out.view(-1) * 2).square_().sum()


class Saving(torch.autograd.Function):
    """Saves its input and its output."""

    @staticmethod
    def forward(ctx, x):
        out = x.exp()
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, out = ctx.saved_tensors
        return grad * out + 0 * x


STAGES = {
    "plain": (plain, 48),
    "own node saves it: exp": (lambda x, w: (x @ w).exp(), 0),
    "own node saves it: softmax": (lambda x, w: (x @ w).softmax(-1), 0),
    "own node saves it: sigmoid": (lambda x, w: (x @ w).sigmoid(), 0),
    "own node saves it: relu in place": (lambda x, w: (x @ w).relu_(), 0),
    "own node saves it: Function": (lambda x, w: Saving.apply(x @ w), 0),
    "saved by the next": (saved_by_the_next, 0),
    "a view saved by the next": (view_saved_by_the_next, 0),
    "changed in place through a view": (changed_through_a_view, 48),
    "a view's result is changed in place": (a_view_is_changed_later, 48),
    "viewless": (lambda x, w: zbpipe.make_viewless((x @ w).view(2, 6)), 48),
    "checkpoint": (lambda x, w: checkpoint(lambda y: (y @ w).exp(), x, use_reentrant=False), 48),
    "reentrant checkpoint": (lambda x, w: checkpoint(lambda y: (y @ w).exp(), x, use_reentrant=True), 48),
    "compiled": (torch.compile(lambda x, w: (x @ w) * 2, backend="aot_eager"), 48),
}


def backward(out, grad, more, x, w):
    torch.autograd.backward([out, *more], [grad, *[None] * len(more)])
    return x.grad


def backward_through_the_edge(out, grad, more, x, w):
    edge = torch.autograd.graph.get_gradient_edge(out)
    torch.autograd.backward([edge, *more], [grad, *[None] * len(more)])
    return x.grad


def split(out, grad, more, x, w):
    dinputs, groups = zbpipe.stage_backward_input([out, *more], [grad, *map(torch.ones_like, more)], [x], [w])
    zbpipe.stage_backward_weight([w], groups)
    return dinputs[0]


def unsplit(out, grad, more, x, w):
    return zbpipe.stage_backward([out, *more], [grad, *map(torch.ones_like, more)], [x])[0]


def two_microbatches(stage, run, deallocate):
    """Gradients of both inputs and of the weight; and the bytes that each deallocation freed."""
    torch.manual_seed(1)
    w = torch.randn(4, 4, requires_grad=True)
    made, freed, grads = [], [], []
    for _ in range(2):
        x = torch.randn(3, 4, requires_grad=True)
        result = stage(x, w)
        out, *more = result if isinstance(result, tuple) else (result,)
        del result
        grad = torch.randn(out.shape)
        if deallocate:
            freed.append(zbpipe.deallocate_output(out))
        made.append((out, grad, more, x))
        del out, more
    for out, grad, more, x in made:
        grads.append(run(out, grad, more, x, w))
    return [*grads, w.grad], freed


@pytest.mark.parametrize("run", [backward, backward_through_the_edge, split, unsplit])
@pytest.mark.parametrize("name", STAGES)
def test_gradients_are_those_of_an_ordinary_backward(name, run):
    stage, bytes_freed = STAGES[name]
    expected, _ = two_microbatches(stage, backward, deallocate=False)
    grads, freed = two_microbatches(stage, run, deallocate=True)
    assert freed == [bytes_freed] * 2
    for grad, want in zip(grads, expected, strict=True):
        assert torch.equal(grad, want)


def test_hooks_and_the_retained_gradient_stay_with_the_tensor():
    out, seen = output(), []
    out.retain_grad()
    out.register_hook(lambda grad: seen.append(grad.clone()))
    assert zbpipe.deallocate_output(out) == 48
    out.backward(torch.ones(3, 4))
    assert torch.equal(out.grad, torch.ones(3, 4)) and len(seen) == 1


def test_hooks_stay_when_a_node_keeps_the_tensor():
    x = torch.randn(3, 4, requires_grad=True)
    out, seen = x * 2, []
    out.register_hook(lambda grad: seen.append(grad.clone()))
    out.tag, out.grad = "mine", torch.zeros(3, 4)
    square = out * out
    values = out.detach().clone()
    zbpipe.deallocate_output(out)
    out.register_hook(lambda grad: seen.append(grad.clone()))
    torch.autograd.backward([out, square], [torch.ones(3, 4), torch.ones(3, 4)])
    assert out.tag == "mine" and len(seen) == 2
    assert torch.equal(out.grad, torch.zeros(3, 4))
    torch.testing.assert_close(seen[0], 1 + 2 * values)
    assert torch.equal(seen[1], seen[0]) and torch.equal(x.grad, 2 * seen[0])


def test_a_change_in_place_of_what_was_saved_is_still_noticed():
    out = output()
    alias, square = out.detach(), out * out
    zbpipe.deallocate_output(out)
    alias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_packing_hooks_that_copy_or_keep_an_alias_are_not_disturbed():
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        out = x * 2
        square = out * out
    assert zbpipe.deallocate_output(out) == 0
    square.sum().backward()
    assert torch.equal(x.grad, 8 * x.detach())


def test_a_hook_that_keeps_the_object_itself_raises_and_gives_no_wrong_gradient():
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        out = output()
        square = out * out
    zbpipe.deallocate_output(out)
    with pytest.raises(RuntimeError, match=GONE):
        square.sum().backward()


def test_a_tensor_that_is_being_sent_arrives_whole():
    store, received = dist.HashStore(), torch.zeros(1 << 16)
    with ThreadPoolExecutor(2) as pool:
        groups = [*pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2), range(2))]
    out = torch.randn(1 << 16, requires_grad=True) * 2
    expected, ref = out.detach().clone(), memory(out)
    work = groups[0].send([out], 1, 0)
    assert not zbpipe.deallocate_output(out) or ref.expired()  # the work may have been done and let go at once
    junk = [torch.full((1 << 16,), -1.0) for _ in range(5)]
    groups[1].recv([received], 0, 0).wait()
    work.wait()
    assert torch.equal(received, expected) and junk
    del work
    assert ref.expired()


# Reading what is gone.


READS = {
    "add": lambda t: t + 1,
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.detach().numpy(),
    "data_ptr": lambda t: t.data_ptr(),
    "copy_ into": lambda t: t.data.copy_(torch.zeros(3, 4)),
    "copy_ out of": lambda t: torch.zeros(3, 4).copy_(t.detach()),
    "in place": lambda t: t.data.add_(1),
    "zero_": lambda t: t.data.zero_(),
    "out=": lambda t: torch.add(torch.ones(3, 4), 1, out=t.data),
    "clone": lambda t: t.clone(),
    "cat": lambda t: torch.cat([t, t]),
    "view": lambda t: t.view(-1) + 1,
    "reinterpreted": lambda t: t.view(torch.int32) + 1,
    "equal": lambda t: torch.equal(t, t.clone()),
    "nonzero": lambda t: t.nonzero(),
    "lazy clone": lambda t: torch._lazy_clone(t),
    "foreach": lambda t: torch._foreach_add([t.detach()], 1.0),
    "deepcopy": lambda t: copy.deepcopy(t.detach()),
    "pickle": lambda t: pickle.dumps(t.detach()),
    "save": lambda t: torch.save(t.detach(), io.BytesIO()),
    "share_memory_": lambda t: t.detach().share_memory_(),
    "another process": lambda t: ForkingPickler.dumps(t.detach()),
    "dlpack": lambda t: torch.utils.dlpack.to_dlpack(t.detach()),
    "storage pointer": lambda t: t.untyped_storage().data_ptr(),
    "storage clone": lambda t: t.untyped_storage().clone(),
    "storage resize_": lambda t: t.untyped_storage().resize_(48),
    "viewless": zbpipe.make_viewless,
    "repr": repr,
    "element": lambda t: float(t[0, 0]),
    "write": lambda t: t.data.__setitem__(0, 1.0),
}


@pytest.mark.parametrize("held", [False, True], ids=["alone", "kept by a node"])
@pytest.mark.parametrize("read", READS)
def test_reading_raises_and_says_why(read, held):
    out = output()
    square = out * out if held else None
    zbpipe.deallocate_output(out)
    with pytest.raises(RuntimeError, match=GONE):
        READS[read](out)
    del square


def test_it_says_on_which_line_the_first_gave_it_up():
    out = output()
    line = inspect.currentframe().f_lineno + 1
    zbpipe.deallocate_output(out)
    zbpipe.deallocate_output(out)
    with pytest.raises(RuntimeError, match=rf"{GONE} at .*test_deallocate.py:{line}: its values are gone"):
        out.sum()


def test_a_thread_may_begin_with_it():
    out, end = output(), time.monotonic() + 30
    ref = memory(out)
    _thread.start_new_thread(zbpipe.deallocate_output, (out,))
    while not ref.expired() and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match=GONE):
        out.sum()


def test_asking_whether_it_is_shared_does_not_end_the_process():
    out = output()
    zbpipe.deallocate_output(out)
    assert not out.is_shared() and not out.untyped_storage().is_shared()


def test_with_new_memory_it_is_an_ordinary_tensor_again():
    out = output()
    zbpipe.deallocate_output(out)
    out.data = torch.ones(3, 4)
    assert out[0].tolist() == [1, 1, 1, 1] and "1., 1., 1." in repr(out)


# Refusals.


def parameter():
    return nn.Parameter(torch.ones(3), requires_grad=False)


def held_and_referred_to_weakly():
    out = output()
    out.retain_grad()
    out.square = out * out
    return out


REFUSED = {
    "a view": (
        output,
        lambda out: out[1],
        ValueError,
        r"view of float32 \[4\] on cpu, and its base, a .* the 48 bytes",
    ),
    "a view without a history": (output, torch.no_grad()(lambda out: out[1]), ValueError, "is a view"),
    "a leaf": (
        lambda: torch.ones(3, requires_grad=True),
        lambda leaf: leaf,
        ValueError,
        r"leaf that requires a gradient of float32 \[3\] on cpu",
    ),
    "a parameter": (
        lambda: nn.Parameter(torch.ones(3)),
        lambda w: w,
        ValueError,
        r"parameter of float32 \[3\] on cpu, not an output",
    ),
    "a frozen one": (parameter, lambda w: w, ValueError, r"parameter of float32 \[3\] on cpu, not an output"),
    "held, and referred to weakly": (
        held_and_referred_to_weakly,
        lambda out: out,
        RuntimeError,
        r"\[3, 4\] on cpu and has 2 other holders and a weak reference .* in C\+\+",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_changes_nothing(what):
    make, given, error, match = REFUSED[what]
    tensor = make()
    values, ref = tensor.detach().clone(), memory(tensor)
    with pytest.raises(error, match=match):
        zbpipe.deallocate_output(given(tensor))
    assert not ref.expired() and torch.equal(tensor.detach(), values)
    if tensor.requires_grad:
        tensor.sum().backward()


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


class Wrapping(torch.Tensor):
    """A subclass with a dispatch of its own."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


@pytest.mark.parametrize(
    "make",
    [
        fake,
        Wrapping,
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
)
@pytest.mark.parametrize("function", [zbpipe.deallocate_output, zbpipe.make_viewless, zbpipe.release_storage])
def test_what_is_no_plain_tensor_is_refused(function, make):
    with pytest.raises(TypeError, match="whose memory is not one plain strided storage"):
        function(make())


@pytest.mark.parametrize("function", [zbpipe.deallocate_output, zbpipe.make_viewless, zbpipe.release_storage])
def test_wrappers_meta_tensors_and_other_objects_are_refused(function):
    with pytest.raises(TypeError, match="not one plain strided storage"):
        torch.func.vmap(lambda t: function(t) and t)(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"float32 \[3\] on meta, which has no memory"):
        function(torch.ones(3, device="meta"))
    for other, said in ((None, "None"), (3, "3"), ([torch.ones(3)], "a list")):
        with pytest.raises(TypeError, match=f"tensor is {said}; expected a torch.Tensor"):
            function(other)


# Leaks.
