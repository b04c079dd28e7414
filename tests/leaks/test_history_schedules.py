"""The leaks of test_history.py where they happened: in torch's own stages and schedules, with what is to blame named first."""

import gc

import pytest
import torch
from leaks.pipelined import Training
from support.blocks import BATCH, MICROBATCHES, WIDTH, f64
from support.leaks import no_collector
from torch import nn
from torch.distributed.pipelining import _backward
from torch.distributed.pipelining import stage as of_stages

from zbpipe.leaks import Growth, check_tensor_leak

HIDDEN = 3 * WIDTH
ROWS = BATCH // MICROBATCHES
BYTES = ROWS * HIDDEN * 8  # of one microbatch between a block's two layers


WARMUP = 3  # steps in which buffers, gradients and the optimizer's state come to be


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, dtype=f64), nn.Linear(HIDDEN, WIDTH, dtype=f64)

    def hidden(self, x):
        return self.up(x).tanh()

    def forward(self, x):
        return self.down(self.hidden(x))


pytestmark = pytest.mark.usefixtures("alone")


def report_of(training):
    """On one step, after some."""
    for _ in range(WARMUP):
        training.step()
        training.let_go()
    gc.collect()
    allowed = [*training.modules, training.optimizer]
    with check_tensor_leak(action="record", allow=allowed) as check:
        training.step()
        training.let_go()
    return check.report


def check_first(report, text, size=BYTES):
    """The holder that is to blame, of the first leak and in the first chain of the report; all are found."""
    assert report.leaks and text in report.leaks[0].blame.text, report
    first = next(line for line in str(report).splitlines() if ">>" in line)
    assert text in first, report
    found = [leak for leak in report.leaks if leak.bytes == size and text in leak.blame.text]
    assert len(found) == MICROBATCHES, report


def grown(training):
    for _ in range(WARMUP):
        training.step()
    with Growth() as growth:
        for _ in range(8):
            training.step()
            growth.step()
        return growth.grown()


# ---- torch's own backwards, as they were


def stage_backward_with_a_recursive_walk(stage_output, output_grads, input_values, outputs_with_grads_idxs=None):
    stage_output_tensors = []

    def extract_tensors_with_grads(value):
        if isinstance(value, torch.Tensor):
            stage_output_tensors.append(value)
        else:
            for part in value:
                extract_tensors_with_grads(part)

    extract_tensors_with_grads(stage_output)
    torch.autograd.backward(stage_output_tensors, output_grads)
    return [value.grad for value in input_values]


def test_a_closure_that_calls_itself(monkeypatch):
    monkeypatch.setattr(of_stages, "stage_backward", stage_backward_with_a_recursive_walk)
    report = report_of(Training("Schedule1F1B", Block))
    assert all(leak.fate == "freed by the collector" for leak in report.leaks), report
    walk = "stage_backward_with_a_recursive_walk"
    first = report.leaks[0].blame
    assert (
        first.text == f"closure variable stage_output_tensors of {__name__}.{walk}.<locals>.extract_tensors_with_grads"
    )
    assert len(report.leaks) >= MICROBATCHES
    (cycle,) = report.cycles
    assert cycle.count == MICROBATCHES
    assert f"closure variable extract_tensors_with_grads of {__name__}.{walk}" in cycle.text


def stage_backward_input_that_leaves_its_hooks(outputs, output_grads, input_values, weights):
    """As torch's before 136584, which kept the intermediates until the weights' turn, and the hooks for ever."""
    nodes = list(filter(None, map(_backward._get_grad_fn_or_grad_acc, outputs)))
    inputs = list(filter(None, map(_backward._get_grad_fn_or_grad_acc, input_values)))
    accumulators = list(filter(None, map(_backward._get_grad_fn_or_grad_acc, weights)))
    groups = _backward.get_param_groups(inputs, accumulators, _backward.construct_reverse_graph(nodes))
    for param_group in groups:
        param_group["intermediates"] = list(param_group["intermediates"])
        for i, intermediate in enumerate(param_group["intermediates"]):

            def get_hook(param_group, i):
                def hook(grad_inputs):
                    if param_group.get("grads") is None:
                        param_group["grads"] = [None] * len(param_group["intermediates"])
                    param_group["grads"][i] = grad_inputs

                return hook

            intermediate.register_prehook(get_hook(param_group, i))
    wanted = [value for value in input_values if value.requires_grad]
    grads = torch.autograd.grad(outputs, wanted, output_grads, retain_graph=True) if wanted else ()
    for value, grad in zip(wanted, grads, strict=True):
        value.grad = grad
    return (*grads, *[None] * (len(input_values) - len(wanted))), groups


def stage_backward_weight_that_keeps_intermediates(weights, param_groups, retain_graph=False):
    kept = [param_group["intermediates"] for param_group in param_groups]
    try:
        return _backward.stage_backward_weight(weights, param_groups, retain_graph)
    finally:
        for param_group, intermediates in zip(param_groups, kept, strict=True):
            param_group["intermediates"] = intermediates


def test_intermediates_with_hooks_that_hold_their_group(monkeypatch):
    monkeypatch.setattr(of_stages, "stage_backward_input", stage_backward_input_that_leaves_its_hooks)
    monkeypatch.setattr(of_stages, "stage_backward_weight", stage_backward_weight_that_keeps_intermediates)
    report = report_of(Training("ScheduleInterleavedZeroBubble", Block))
    assert report
    for leak in report.leaks:
        assert leak.blame.text.startswith("closure variable param_group of ") and ".get_hook." in leak.blame.text, (
            report
        )
    assert report.cycles and "dict item 'intermediates'" in report.cycles[0].text


def test_intermediates_alone_are_no_leak(monkeypatch):
    """The hooks are removed today: nothing is held by its own."""
    monkeypatch.setattr(of_stages, "stage_backward_weight", stage_backward_weight_that_keeps_intermediates)
    training = Training("ScheduleInterleavedZeroBubble", Block)
    assert not report_of(training)
    with no_collector():  # nothing is in its garbage
        assert grown(training) == []


# ---- the user's modules


class NodeHook(Block):
    """A hook on a node that holds what the node has made."""

    def hidden(self, x):
        hidden = super().hidden(x)
        if hidden.requires_grad:
            hidden.grad_fn.register_prehook(lambda grads: tuple(grad.expand_as(hidden) for grad in grads))
        return hidden


def test_a_hook_of_a_node_with_the_nodes_output():
    report = report_of(Training("Schedule1F1B", NodeHook))
    check_first(report, f"closure variable hidden of {__name__}.NodeHook.hidden.<locals>.<lambda>")
    assert {leak.fate for leak in report.leaks} == {"uncollectable"}


# ---- the user's loop


class KeepsNothingPopped(dict):
    """As a stage's cache of forwards that no backward takes anything from."""

    count = 0

    def __setitem__(self, chunk, value):
        self.count += 1
        super().__setitem__((chunk, self.count), value)

    def __getitem__(self, chunk):
        return super().__getitem__(max(key for key in self if key[0] == chunk))

    def pop(self, chunk):
        return self[chunk]

    def clear(self):
        pass


def test_a_cache_of_forwards_that_is_never_popped():
    training = Training("Schedule1F1B", Block)
    if not hasattr(training.line.stages[0], "fwd_cache"):
        pytest.skip("torch 2.15's stages keep forwards elsewhere")
    training.line.stages[0].fwd_cache = KeepsNothingPopped()
    report = report_of(training)
    check_first(
        report, "attribute stages of support.pipelines.Pipeline", size=ROWS * WIDTH * 8
    )  # the program's; torch's follows
    of_torch = (
        "attribute fwd_cache of torch.distributed.pipelining.stage.PipelineStage (torch/distributed/pipelining/stage"
    )
    assert [holder.is_library for holder in report.leaks[0].chain if str(holder).startswith(of_torch)] == [True]
    assert str(report).count(of_torch) == 1


def test_outputs_that_are_not_detached_are_no_leak(monkeypatch):
    """138119: they keep their graph until the stage lets go of them, and not to the next step."""
    monkeypatch.setattr(torch.Tensor, "detach_", lambda tensor: tensor)
    training = Training("ScheduleInterleavedZeroBubble", Block)
    assert not report_of(training)
    assert grown(training) == []
