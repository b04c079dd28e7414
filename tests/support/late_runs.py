"""A stage on the device that runs late, and on the CPU by an ordinary backward: one program for both.

A scenario is a function of a `Run`: it calls the passes of its microbatches, on streams and threads of its choice, and
orders by streams alone what it does itself. On the CPU the same scenario makes the reference: `input` does nothing and
`weight` is the ordinary backward.
"""

import contextlib
import threading

import torch
from torch import nn

import zbpipe
from support import late
from support.late_stages import ROWS, WIDTH


def no_stream():
    return contextlib.nullcontext()


class Run:
    def __init__(self, device, make, *, split=True, setup=lambda run: None):
        self.device = torch.device(device)
        self.is_late = self.device.type == "late"
        self.split = split and self.is_late
        torch.manual_seed(0)
        self.stage = self.placed(make())
        self.calls = {}
        self.inputs, self.outputs, self.groups, self.dinputs = {}, {}, {}, {}
        self.main = torch.accelerator.current_stream() if self.is_late else None
        setup(self)

    def placed(self, stage):
        return stage.to(self.device)

    def weights(self):
        return self.stage.parameters()

    def stream(self):
        """A new stream that comes after what the current one has; to be used as a context."""
        if not self.is_late:
            return no_stream()
        made = torch.Stream(device="late:0")
        made.wait_stream(torch.accelerator.current_stream())
        return made

    def wait(self, stream):
        """What follows on the current stream comes after what `stream` has."""
        if self.is_late:
            torch.accelerator.current_stream().wait_stream(stream)

    def forward(self, k):
        torch.manual_seed(k + 1)
        self.inputs[k] = torch.randn(ROWS, WIDTH).to(self.device).requires_grad_()
        outputs = self.outputs_of(self.inputs[k])
        self.outputs[k] = list(outputs) if isinstance(outputs, tuple) else [outputs]

    def outputs_of(self, x):
        return self.stage(x)

    def output_grads(self, k):
        """Made when the backward begins, on the stream of who calls it."""
        torch.manual_seed(k + 100)
        return [torch.randn(output.shape).to(output.device) for output in self.outputs[k]]

    def input(self, k):
        if self.split:
            dinputs, self.groups[k] = zbpipe.stage_backward_input(
                self.outputs[k], self.output_grads(k), [self.inputs[k]], self.weights()
            )
            self.outputs.pop(k)
            self.dinputs[k] = dinputs[0]

    def weight(self, k, groups=None):
        if self.split:
            zbpipe.stage_backward_weight(self.weights(), self.groups[k] if groups is None else groups)
        else:
            torch.autograd.backward(self.outputs[k], self.output_grads(k))
            self.outputs.pop(k)
            self.dinputs[k] = self.inputs[k].grad

    def keep(self, k):
        """A copy of the input's gradient, on the current stream, of which the gradient's own is told."""
        given = self.dinputs[k]
        self.dinputs[k] = given.clone()
        if self.is_late:
            given.record_stream(torch.accelerator.current_stream())

    def drop(self, k):
        """The groups and the input go, and their memory is at once somebody else's."""
        self.groups.pop(k, None)
        self.inputs.pop(k, None)
        if self.is_late:
            for rows in (1, 8, 48, 64):
                torch.full((rows, WIDTH), 1e9, device=self.device)

    def call(self, hook, gradient):
        """Notes that a hook was called, and with what."""
        self.calls.setdefault(hook, []).append(gradient.detach().clone())

    def results(self):
        """On the CPU, read on the current stream: inputs' and weights' gradients and weights; what hooks were given."""
        read = {f"input {k}": self.dinputs[k].cpu() for k in sorted(self.dinputs)}
        for name, weight in self.stage.named_parameters():
            grad = getattr(weight, "main_grad", weight.grad)
            read |= {name: weight.detach().cpu(), f"gradient of {name}": torch.empty(0) if grad is None else grad.cpu()}
        for hook in sorted(self.calls):
            read |= {f"{hook}, call {i}": gradient.cpu() for i, gradient in enumerate(self.calls[hook])}
        return read


# ---- scenarios


def at_once(run):
    for k in range(2):
        run.forward(k)
        run.input(k)
        run.weight(k)
        run.drop(k)


def late_weights(run):
    for step in (run.forward, run.input, run.weight):
        for k in range(3):
            step(k)


def without_waiting_first(run):
    """W's stream knows nothing of I's: W itself must."""
    other = run.stream()
    for k in range(2):
        run.forward(k)
        run.input(k)
        with other:
            run.weight(k)
        run.drop(k)
    run.wait(other)


def on_another_thread(run):
    for k in range(2):
        run.forward(k)
        run.input(k)
        other = run.stream()

        def weight(k=k, other=other):
            with other:
                run.weight(k)

        thread = threading.Thread(target=weight)
        thread.start()
        thread.join()
        run.drop(k)
        run.wait(other)


def on_three_streams(run):
    """Forward, I and W each on a stream of its own; of I and W neither waits for the other."""
    forward, first, second = run.stream(), run.stream(), run.stream()
    for k in range(2):
        with forward:
            run.forward(k)
        with first:
            run.wait(forward)
            run.input(k)
            if not run.split:
                run.weight(k)
        if run.split:
            with second:
                run.weight(k)
        with forward:
            run.drop(k)
            run.wait(second)
    for stream in (forward, first, second):
        run.wait(stream)


def sent_before_w(run):
    """What I gave is read on the caller's stream, and sent on another, before W runs; the forward ran on a third."""
    sends = run.stream()
    for k in range(2):
        side = run.stream()
        with side:
            run.forward(k)
        run.wait(side)
        run.input(k)
        if not run.split:
            run.weight(k)
        run.keep(k)
        with sends:
            run.wait(run.main)
            run.keep(k)
        if run.split:
            run.weight(k)
        run.drop(k)
    run.wait(sends)


def a_root_alone(run):
    """The gradient of each output is made on a stream of I's, the forward and W have others."""
    forward, first, second = run.stream(), run.stream(), run.stream()
    for k in range(2):
        with forward:
            run.forward(k)
            run.outputs[k] = run.outputs[k][-1:]
        with first:
            run.wait(forward)
            run.input(k)
            if run.is_late:
                torch.full((WIDTH,), 7.0, device=run.device)  # in what the output's gradient leaves
            if not run.split:
                run.weight(k)
        if run.split:
            with second:
                run.weight(k)
        run.dinputs.clear()
    for stream in (forward, first, second):
        run.wait(stream)


def caller_trains_on_its_own_stream(run):
    """Zeroes, clips and steps on a stream of its own; forward and I stay on the main one."""
    optimizer = torch.optim.SGD(run.weights(), lr=0.1, momentum=0.9)
    own = run.stream()
    for step in range(2):
        for k in (2 * step, 2 * step + 1):
            run.forward(k)
            run.input(k)
        with own:
            run.wait(run.main)
            for weight in run.weights():
                if weight.grad is not None:
                    weight.grad.zero_()
            run.weight(2 * step)
            run.weight(2 * step + 1)
            nn.utils.clip_grad_norm_(run.weights(), 0.5, foreach=False)
            optimizer.step()
        run.wait(own)
        for k in (2 * step, 2 * step + 1):
            run.drop(k)


def scaled_between(run):
    """Between the W's of two microbatches the caller scales the gradients on its own stream."""
    own = run.stream()
    for k in range(2):
        run.forward(k)
        run.input(k)
    for k in range(2):
        with own:
            run.weight(k)
            for weight in run.weights():
                weight.grad.mul_(0.5)
    run.wait(own)


def groups_on_streams_of_their_own(run):
    for k in range(2):
        run.forward(k)
        run.input(k)
    for k in range(2):
        if not run.split:
            run.weight(k)
            continue
        for group in run.groups[k]:
            own = run.stream()
            with own:
                run.weight(k, [group])
            run.wait(own)


SCENARIOS = (
    at_once,
    late_weights,
    without_waiting_first,
    on_another_thread,
    sent_before_w,
    on_three_streams,
    a_root_alone,
    caller_trains_on_its_own_stream,
    scaled_between,
    groups_on_streams_of_their_own,
)


def results_of(scenario, device, make, kind=Run, **options):
    run = kind(device, make, **options)
    scenario(run)
    return run.results()


def differences(got, expected, tolerance=0):
    """What differs, in any bit or by more than `tolerance`, from the reference; hooks' calls that are missing or too many."""
    wrong = [f"{name}: only one of the two has it" for name in got.keys() ^ expected.keys()]
    for name in got.keys() & expected.keys():
        if got[name].shape != expected[name].shape:
            wrong.append(f"{name}: {got[name].shape} instead of {expected[name].shape}")
        elif not torch.equal(got[name], expected[name]):
            by = (got[name] - expected[name]).abs().max().item()
            wrong += [] if by <= tolerance else [f"{name}: by {by}"]  # NaN is more
    return wrong


def check_in_every_order(
    scenario, make, kind=Run, *, expected=None, seeds=1, policy=None, tolerance=0, setup=lambda run: None, split=True
):
    """On the late device the bits that the scenario has on the CPU, or what is expected, and no race, in each order; in
    random ones as often as there are seeds."""
    expected = results_of(scenario, "cpu", make, kind, setup=setup) if expected is None else expected
    for order in late.ORDERS:
        for seed in range(seeds if order == "random" else 1):
            late.begin(order, seed)
            with zbpipe.policy(**(policy or {})):
                got = results_of(scenario, "late", make, kind, setup=setup, split=split)
            assert not differences(got, expected, tolerance), (order, seed)
            assert not late.races(), (order, seed)
