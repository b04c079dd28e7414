"""I and W on devices that run asynchronously: other streams and threads, captured graphs. tests/late_device/ has these and
more on a device that runs late, without a GPU."""

import contextlib
import copy
import re
import threading

import pytest
import torch
from torch import nn

import zbpipe

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
WIDTH, ROWS, SLOW = 1024, 4096, 20_000_000  # cycles that a stream sleeps, so that a missing wait shows


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(DEVICE)


def batch(seed):
    torch.manual_seed(seed)
    return torch.randn(ROWS, WIDTH, device=DEVICE)


def reference(stage, microbatches=2):
    """Weights' gradients and the inputs' of an ordinary backward on a copy, all on one stream."""
    stage = copy.deepcopy(stage)
    inputs = []
    for seed in range(microbatches):
        x = batch(seed).requires_grad_()
        stage(x).backward(torch.ones(ROWS, WIDTH, device=DEVICE))
        inputs.append(x.grad)
    torch.cuda.synchronize()
    return [p.grad for p in stage.parameters()], inputs


def assert_same(stage, dinputs, expected):
    grads, inputs = expected
    torch.cuda.synchronize()
    for weight, grad in zip(stage.parameters(), grads, strict=True):
        torch.testing.assert_close(weight.grad, grad)
    for got, grad in zip(dinputs, inputs, strict=True):
        torch.testing.assert_close(got, grad)


def input_pass(stage, seed):
    x = batch(seed).requires_grad_()
    output = stage(x)
    dinputs, groups = zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], stage.parameters())
    return dinputs[0], groups


def on(stream):
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def train(stage, forward=None, weight=None, on_thread=False):
    """Two microbatches, whose forward and W are on these streams, W perhaps on a thread; the forward's kernels are late, and so
    are W's. What is let go of is written over by who gets it. Returns the inputs' gradients."""
    main, dinputs = torch.cuda.current_stream(), []
    for seed in range(2):
        if forward is not None:
            forward.wait_stream(main)
        with on(forward):
            torch.cuda._sleep(SLOW)
            x = batch(seed).requires_grad_()
            output = stage(x)
        main.wait_stream(forward or main)
        (dinput,), groups = zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], stage.parameters())
        dinputs.append(dinput.clone())  # on the caller's stream, which has waited
        dinput.record_stream(main)
        del x, output, dinput

        def weight_pass(only=[groups]):  # noqa: B006
            with on(weight):
                torch.cuda._sleep(SLOW)
                zbpipe.stage_backward_weight(stage.parameters(), only.pop())

        del groups
        thread = threading.Thread(target=weight_pass)
        if on_thread:
            thread.start()
            thread.join()
        else:
            weight_pass()
        for _ in range(8):
            torch.full((ROWS, WIDTH), float("nan"), device=DEVICE)
        main.wait_stream(weight or main)
    return dinputs


@pytest.mark.parametrize("hooked", [False, True], ids=["directly", "through the engine"])
@pytest.mark.parametrize("where", ["forward", "weight", "weight, on a thread"])
def test_a_pass_on_another_stream_or_thread(where, hooked):
    stage, calls = model(), []
    expected = reference(stage)
    if hooked:
        stage[0].weight.register_hook(lambda grad: calls.append(grad.shape))
    streams = {where.partition(",")[0]: torch.cuda.Stream()}
    dinputs = train(stage, **streams, on_thread="thread" in where)
    assert_same(stage, dinputs, expected)
    assert len(calls) == (2 if hooked else 0)


@pytest.mark.parametrize("hooked", [False, True], ids=["directly", "through the engine"])
def test_w_comes_after_what_its_caller_did_to_the_gradients(hooked):
    stage = model()
    expected, _ = reference(stage, 1)
    for weight in stage.parameters():
        weight.grad = torch.ones_like(weight)
    if hooked:
        stage[0].weight.register_hook(lambda grad: None)
    _, groups = input_pass(stage, 0)
    caller = torch.cuda.Stream()
    caller.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(caller):
        torch.cuda._sleep(SLOW)
        for weight in stage.parameters():
            weight.grad.zero_()
        zbpipe.stage_backward_weight(stage.parameters(), groups)
        got = [weight.grad.clone() for weight in stage.parameters()]
    torch.cuda.synchronize()
    for grad, reference_grad in zip(got, expected, strict=True):
        torch.testing.assert_close(grad, reference_grad)


@pytest.mark.parametrize("kept", [False, True], ids=["", "accumulators of the warm-up"])
def test_both_passes_in_one_captured_graph(kept):
    stage, accumulators = model(), []
    expected, inputs = reference(stage, 1)
    x = batch(0).requires_grad_()
    for weight in stage.parameters():
        weight.grad = torch.zeros_like(weight)

    def step():
        output = stage(x)
        dinputs, groups = zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], stage.parameters())
        zbpipe.stage_backward_weight(stage.parameters(), groups)
        return dinputs[0]

    warmup = torch.cuda.Stream()
    warmup.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup):
        if kept:
            accumulators += [weight.view_as(weight).grad_fn.next_functions[0][0] for weight in stage.parameters()]
        step()
    torch.cuda.current_stream().wait_stream(warmup)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dinput = step()
    for _ in range(2):
        for weight in stage.parameters():
            weight.grad.zero_()
        graph.replay()
        assert_same(stage, [dinput], (expected, inputs))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch cannot tell of a stream that it is captured")
def test_passes_on_both_sides_of_a_capture_are_refused():
    stage = model()
    _, outside = input_pass(stage, 0)
    x = batch(1).requires_grad_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = stage(x)
        _, groups = zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], stage.parameters())
        with pytest.raises(RuntimeError, match=r"made by an input pass outside the capture .* called within one"):
            zbpipe.stage_backward_weight(stage.parameters(), outside)
    with pytest.raises(RuntimeError, match=r"made by an input pass within the capture .* called outside of it"):
        zbpipe.stage_backward_weight(stage.parameters(), groups)
    zbpipe.stage_backward_weight(stage.parameters(), outside)
    assert all(weight.grad is not None for weight in stage.parameters())


# ---- what I keeps, and what it hands to its caller, has a stream


def random(*shape):
    return torch.randn(shape, device=DEVICE)


def new_stream():
    """It comes after what the current one has."""
    made = torch.cuda.Stream()
    made.wait_stream(torch.cuda.current_stream())
    return made


def use_memory(streams, *shape):
    """What these streams have let go of is written over."""
    for stream in streams:
        with torch.cuda.stream(stream):
            for _ in range(8):
                torch.full(shape, 1e9, device=DEVICE)


@pytest.mark.parametrize("on_threads", [False, True], ids=["", "each on a thread"])
def test_microbatches_on_streams_of_their_own_add_one_after_the_other(on_threads):
    """The first addition makes the gradient, late; the second is called meanwhile."""
    torch.manual_seed(0)
    w, streams, ready = random(WIDTH, WIDTH).div_(32).requires_grad_(), [], []
    inputs, grads = ([random(ROWS, WIDTH) for _ in range(2)] for _ in range(2))
    expected = sum(x.double().mT @ grad.double() for x, grad in zip(inputs, grads, strict=True))
    for k in range(2):
        streams.append(new_stream())
        with torch.cuda.stream(streams[k]):
            x = inputs[k].clone().requires_grad_()
            ready.append((x, x @ w))

    def passes(k):
        x, output = ready[k]
        with torch.cuda.stream(streams[k]):
            if k == 0:
                torch.cuda._sleep(SLOW)
            _, groups = zbpipe.stage_backward_input([output], [grads[k]], [x], [w])
            zbpipe.stage_backward_weight([w], groups)

    for k in range(2):
        thread = threading.Thread(target=passes, args=(k,))
        if on_threads:
            thread.start()
            thread.join()
        else:
            passes(k)
    for stream in reversed(streams):
        torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(w.grad.double(), expected, rtol=1e-3, atol=1e-1)


class unpacked_late(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self):
        def unpack(packed):
            torch.cuda._sleep(SLOW)
            return packed.to(DEVICE, non_blocking=True)

        super().__init__(lambda tensor: tensor.detach().to("cpu"), unpack)


@pytest.mark.parametrize("checkpoint", ["keep", "recompute"])
def test_a_computed_weight_of_two_branches_is_unpacked_in_time(checkpoint):
    """It is computed on the caller's stream; the branches, which read it in I, have streams of their own."""
    torch.manual_seed(0)
    w, x, y, grad = random(256, 256) / 16, random(64, 256), random(64, 256), random(64, 256)
    of_w = w.double().requires_grad_()
    computed = torch.sin(of_w * of_w)
    torch.autograd.backward([torch.tanh(x.double() @ computed), torch.tanh(y.double() @ computed)], [grad.double()] * 2)
    inputs = [x.requires_grad_(), y.requires_grad_()]
    w.requires_grad_()
    w.grad = torch.zeros_like(w)
    with unpacked_late():
        computed = torch.sin(w * w)
    branches, outputs, main = [new_stream(), new_stream()], [], torch.cuda.current_stream()
    for stream, one in zip(branches, inputs, strict=True):
        for read in (computed, one):
            read.record_stream(stream)
        with torch.cuda.stream(stream):
            outputs.append(torch.tanh(one @ computed))
        main.wait_stream(stream)
        outputs[-1].record_stream(main)
    del computed
    with zbpipe.policy(checkpoint=checkpoint):
        _, groups = zbpipe.stage_backward_input(outputs, [grad, grad], inputs, [w])
        zbpipe.stage_backward_weight([w], groups)
    del groups
    use_memory(branches, 256, 256)
    torch.testing.assert_close(w.grad.double(), of_w.grad, rtol=1e-3, atol=1e-3)


class ToHost(torch.autograd.Function):
    """A scaled sum of the rows, on the CPU."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x * w).sum(0).cpu()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = grad.to(x.device, non_blocking=True)
        torch.cuda._sleep(SLOW)
        return (grad * w).expand_as(x).contiguous(), (grad * x).sum(0)


def test_a_weight_pass_on_another_stream_follows_a_loss_on_the_host():
    torch.manual_seed(0)
    w, x, grad = random(4096).requires_grad_(), random(512, 4096).requires_grad_(), torch.randn(4096)
    expected = (x.detach() * grad.to(DEVICE)).sum(0)
    first, second = new_stream(), new_stream()
    with torch.cuda.stream(first):
        _, groups = zbpipe.stage_backward_input([ToHost.apply(x, w)], [grad], [x], [w])
    with torch.cuda.stream(second):
        zbpipe.stage_backward_weight([w], groups)
    torch.cuda.current_stream().wait_stream(second)
    torch.testing.assert_close(w.grad, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch cannot tell of a stream that it is captured")
def test_a_loss_on_the_host_before_a_capture_refuses_the_weight_pass_within_it():
    w, x = random(8).requires_grad_(), random(4, 8).requires_grad_()
    _, groups = zbpipe.stage_backward_input([ToHost.apply(x, w)], [torch.ones(8)], [x], [w])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(graph),
        pytest.raises(RuntimeError, match=r"made by an input pass outside the capture .* called within one"),
    ):
        zbpipe.stage_backward_weight([w], groups)
    assert w.grad is None
    zbpipe.stage_backward_weight([w], groups)
    torch.testing.assert_close(w.grad, x.detach().sum(0))


def test_an_input_gradient_that_overlaps_itself_is_copied_in_time():
    """It is an expanded number, of which the caller gets a copy; the forward's stream soon uses the number's memory anew."""
    w, x, grad = random(8).requires_grad_(), random(64, 8).requires_grad_(), torch.ones((), device=DEVICE)
    side, main = new_stream(), torch.cuda.current_stream()
    for read in (w, x):
        read.record_stream(side)
    with torch.cuda.stream(side):
        output = x.sum() * 2 + (w * 3).sum()
    main.wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLOW)
    (dinput,), groups = zbpipe.stage_backward_input([output], [grad], [x], [w])
    use_memory([side])
    zbpipe.stage_backward_weight([w], groups)
    torch.testing.assert_close(dinput, torch.full_like(dinput, 2))
    torch.testing.assert_close(w.grad, torch.full_like(w, 3))


# ---- gradients in the memory of a graph, which the next microbatch's replay writes again


def graphed(stage):
    return torch.cuda.make_graphed_callables(stage, (batch(0).requires_grad_(),))


def reduced_overhead(stage):
    return torch.compile(stage, mode="reduce-overhead")


@pytest.mark.parametrize("make", [graphed, reduced_overhead], ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_three_microbatches_of_a_graph_in_flight(make):
    """Right, or refused in words before anything is added. Often enough for a graph to be recorded, and replayed."""
    plain = model()
    stage = make(copy.deepcopy(plain))
    for _ in range(4):
        expected, of_inputs = reference(plain, 3)
        stage.zero_grad()
        dinputs, kept = [], []
        for seed in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            dinput, groups = input_pass(stage, seed)
            dinputs.append(dinput.clone())
            kept.append(groups)
        for groups in kept:
            try:
                zbpipe.stage_backward_weight(stage.parameters(), groups)
            except RuntimeError as error:
                assert re.search("(inplace|overwritten).*[Cc]lone", str(error), re.DOTALL), error
                assert groups is kept[0] and all(weight.grad is None for weight in stage.parameters())
                return
        assert_same(stage, dinputs, (expected, of_inputs))
