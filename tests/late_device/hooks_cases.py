"""Hooks of every kind: called as often, and with the same gradients, as on the CPU; what changes gradients counts."""

import pytest
import torch
from support import late_runs
from support.late_runs import Run, check_in_every_order, late_weights, on_another_thread, on_three_streams
from support.late_stages import SQUARE, STAGES, WIDTH, of
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


def on_weights(run):
    for name, weight in run.stage.named_parameters():
        weight.register_hook(lambda grad, name=name: run.call(f"hook of {name}", grad))


def that_change(run):
    for weight in run.weights():
        weight.register_hook(lambda grad: grad * 2)


def after_accumulation(run):
    for name, weight in run.stage.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda w, name=name: run.call(f"after {name}", w.grad))


def on_accumulators(run):
    run.accumulators = []
    for name, weight in run.stage.named_parameters():
        accumulator = weight.view_as(weight).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda _, __, name=name, w=weight: run.call(f"accumulator of {name}", w.grad))
        run.accumulators.append(accumulator)


def that_step(run):
    """The optimizer within the backward: every gradient is used and gone when its hook returns."""

    def hook(weight):
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.01)
        weight.grad = None

    for weight in run.weights():
        weight.register_post_accumulate_grad_hook(hook)


# Other kinds of hooks, and on activations and modules: passes/test_hooks.py, which runs on the device too.
HOOKS = (on_weights, that_change, after_accumulation, on_accumulators)


@pytest.mark.parametrize("scenario", [late_weights, on_another_thread, on_three_streams], ids=lambda s: s.__name__)
@pytest.mark.parametrize("hooks", HOOKS, ids=lambda hooks: hooks.__name__)
@pytest.mark.parametrize("name", ["mlp", "normed", "tied", "batched", "handed over", "branches"])
def test_hooks(name, hooks, scenario):
    check_in_every_order(scenario, STAGES[name], setup=hooks)


@pytest.mark.parametrize("name", ["mlp", "normed", "tied"])
def test_hooks_of_a_caller_that_trains(name):
    check_in_every_order(late_runs.caller_trains_on_its_own_stream, STAGES[name], setup=on_weights)


def one_by_one(run):
    for k in range(3):
        run.forward(k)
        run.input(k)
        run.weight(k)
        run.drop(k)


@pytest.mark.parametrize("name", ["mlp", "normed", "handed over"])
def test_an_optimizer_in_the_hooks(name):
    check_in_every_order(one_by_one, STAGES[name], setup=that_step)


def test_what_a_weight_pass_that_raised_has_added_comes_before_what_the_caller_does():
    """The last layer's weight is added; the first one's has a gradient that cannot be written to. No engine runs, which
    would wait for both."""

    def scenario(run):
        first, last = run.weights()
        run.forward(0)
        run.input(0)
        own = run.stream()
        with own:
            if run.split:
                first.grad = torch.zeros((), device=first.device).expand_as(first)
                with pytest.raises(RuntimeError, match="single memory location"):
                    run.weight(0)
                last.grad.mul_(2)
                first.grad = None
            run.weight(0)
            if not run.split:
                last.grad.mul_(2)
        run.wait(own)

    def make():
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))

    check_in_every_order(scenario, make)


def test_a_weight_pass_that_raised_goes_on():
    """A hook raises in the first try; the second adds each gradient once."""

    def that_raise(run):
        run.raised = not run.split

        def hook(grad):
            if not run.raised:
                run.raised = True
                raise ValueError("for a moment")

        run.stage[2].weight.register_hook(hook)

    def tries_twice(run):
        for k in range(2):
            run.forward(k)
            run.input(k)
        for k in range(2):
            other = run.stream()
            with other:
                if not run.raised:
                    with pytest.raises(ValueError, match="for a moment"):
                        run.weight(k)
            run.weight(k)

    check_in_every_order(tries_twice, STAGES["mlp"], setup=that_raise)


class WithBuffers(Run):
    """Its matrix is computed on a stream aside; what that has saved is unpacked from buffers that the caller has."""

    def outputs_of(self, x):
        self.buffers, side = [], self.stream()
        with side, saved_tensors_hooks(self.pack, lambda buffer: buffer * 1):
            matrix = torch.sin(self.stage.w * self.stage.w)
        self.wait(side)
        if self.is_late:
            matrix.record_stream(self.main)
        return x @ matrix

    def pack(self, tensor):
        self.buffers.append(tensor.detach().clone())
        return self.buffers[-1]


def test_what_an_unpack_hook_reads_is_the_callers_again_after_an_input_pass():
    def scenario(run):
        for k in range(2):
            run.forward(k)
            run.input(k)
            if not run.split:
                run.weight(k)
            for buffer in run.buffers:
                buffer.fill_(1e9)
            if run.split:
                run.weight(k)

    check_in_every_order(scenario, of(None, w=SQUARE), WithBuffers)
