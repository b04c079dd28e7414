"""Hooks of every kind: called as often, and with the same gradients, as on the CPU; what changes gradients counts."""

import contextvars
import threading

import pytest
import torch
from support import late_runs
from support.functions import handing_through
from support.late_runs import ROWS, Run, check_in_every_order, late_weights, on_another_thread, on_three_streams
from support.late_stages import SQUARE, STAGES, WIDTH, of
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import zbpipe


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


class OneInput(Run):
    """All microbatches have one input, to whose gradient each adds. The forwards run on a stream aside."""

    x = None

    def forward(self, k):
        if self.x is None:
            torch.manual_seed(1)
            self.x = torch.randn(ROWS, WIDTH).to(self.device).requires_grad_()
            self.total = torch.zeros(ROWS, WIDTH).to(self.device)
            self.side = self.stream()
            if self.takes_away:
                self.x.register_post_accumulate_grad_hook(self.take)
        with self.side:
            self.outputs[k] = [self.stage(self.x)]
        self.wait(self.side)
        self.inputs[k] = self.x

    def take(self, x):
        self.total.add_(x.grad)
        x.grad = None


@pytest.mark.parametrize("takes_away", [False, True], ids=["", "a hook takes each gradient away"])
def test_gradients_add_up_in_an_inputs_own(takes_away):
    def scenario(run):
        for k in range(3):
            run.forward(k)
            run.input(k)
            if not run.split:
                run.weight(k)
            run.dinputs.clear()
            with run.side:  # their memory is somebody else's
                for _ in range(4 if run.is_late else 0):
                    torch.full((ROWS, WIDTH), 1e9, device=run.device)
        for k in range(3 if run.split else 0):
            run.weight(k)
        run.wait(run.side)
        run.dinputs[0] = run.total if takes_away else run.x.grad

    def setup(run):
        run.takes_away = takes_away

    check_in_every_order(scenario, of(lambda m, x: torch.tanh(x @ m.w), w=SQUARE), OneInput, setup=setup)


CALLERS = contextvars.ContextVar("CALLERS")


def test_what_a_backward_compiles_on_the_devices_thread_is_configured_by_the_caller():
    """As torch.autograd has it since torch 2.12: AOTAutograd runs a backward's compilation in that context."""
    seen = []

    def look(grad):
        context = torch._C._get_obj_in_tls("context") if torch._C._is_key_in_tls("context") else None
        is_elsewhere = threading.current_thread() is not threading.main_thread()
        seen.append((is_elsewhere, None if context is None else context.run(CALLERS.get, None)))
        return grad

    CALLERS.set("the caller's")
    w, x = (torch.randn(4, 4).to("late").requires_grad_() for _ in range(2))
    w.register_hook(look)
    out = handing_through(torch.sin, look)(x) @ w
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    assert seen == [(True, "the caller's")]
    zbpipe.stage_backward_weight([w], groups)
    assert seen == [(True, "the caller's")] * 2
    assert not torch._C._is_key_in_tls("context") or torch._C._get_obj_in_tls("context") is None
