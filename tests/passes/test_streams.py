"""I and W on devices that run asynchronously: other streams and threads, captured graphs. tests/late_device/ has these and
more on a device that runs late, without a GPU."""

import contextlib
import copy
import threading

import pytest
import torch
from torch import nn

import zbpipe

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH, ROWS, SLOW = 1024, 4096, 20_000_000  # cycles that a stream sleeps, so that a missing wait shows


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).cuda()


def batch(seed):
    torch.manual_seed(seed)
    return torch.randn(ROWS, WIDTH, device="cuda")


def reference(stage, microbatches=2):
    """Weights' gradients and the inputs' of an ordinary backward on a copy, all on one stream."""
    stage = copy.deepcopy(stage)
    inputs = []
    for seed in range(microbatches):
        x = batch(seed).requires_grad_()
        stage(x).backward(torch.ones(ROWS, WIDTH, device="cuda"))
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
            torch.full((ROWS, WIDTH), float("nan"), device="cuda")
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


def test_both_passes_in_one_captured_graph():
    stage = model()
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
