"""Two devices, memory that goes back, releases of outputs, captures."""

import gc

import pytest
import torch
from support import late
from support.late_runs import Run, check_in_every_order, differences, no_stream, results_of
from support.late_stages import ROWS, STAGES, WIDTH, ToHost, mlp, of

import zbpipe
from zbpipe._stage import self_check  # which is made anew

pytestmark = pytest.mark.drops_groups


def on_both(m, x):
    """The first layers on one device, the last on the other; a scale of the first comes in again at the end."""
    h = m.first(x) * m.scale
    there = m.second[0].weight.device
    return m.second(h.to(there)) * m.scale.to(there)


HALVES = of(on_both, first=mlp, second=mlp, scale=(WIDTH,))


class OnBoth(Run):
    def placed(self, stage):
        stage.to(self.device)
        if self.is_late:
            stage.second.to("late:1")
        return stage

    def streams(self):
        """New streams of both devices, which wait for nothing."""
        return [late.stream(device) if self.is_late else no_stream() for device in (0, 1)]


def halves_at_once(run):
    for k in range(2):
        run.forward(k)
        run.input(k)
        run.weight(k)


def halves_on_other_streams(run):
    """W on streams that know nothing of I's; at the end the device's main streams wait for them."""
    for k in range(2):
        run.forward(k)
        run.input(k)
    first, second = run.streams()
    for k in range(2):
        if not run.split:
            run.weight(k)
            continue
        with second, first:
            run.weight(k)
    if run.is_late:
        for device, stream in enumerate((first, second)):
            torch.accelerator.current_stream(device).wait_stream(stream)


@pytest.mark.parametrize("policy", [{}, {"defer": "all"}, {"defer": "nothing"}], ids=["matrices", "all", "nothing"])
@pytest.mark.parametrize("scenario", [halves_at_once, halves_on_other_streams], ids=lambda s: s.__name__)
def test_two_devices(scenario, policy):
    check_in_every_order(scenario, HALVES, OnBoth, seeds=5, policy=policy)


@pytest.mark.parametrize("name", STAGES)
def test_groups_that_are_dropped_give_their_memory_back(name):
    """At once, on the stream where it was allocated, whether W has run or not; what comes after is right."""
    expected = results_of(lambda run: [step(1) for step in (run.forward, run.input, run.weight)], "cpu", STAGES[name])

    def scenario(run):
        run.forward(0)
        run.input(0)
        held = late.bytes_in_use()
        run.drop(0)
        run.dinputs.clear()
        gc.collect()
        assert late.bytes_in_use() < held
        run.forward(1)
        run.input(1)
        run.weight(1)

    check_in_every_order(scenario, STAGES[name], expected=expected)


@pytest.mark.parametrize("release", [zbpipe.deallocate_output, zbpipe.release_storage], ids=lambda f: f.__name__)
def test_an_output_released_after_its_send(release):
    """The send is another stream's; who releases has told the allocator of it."""

    def scenario(run):
        sends, sent = run.stream(), {}
        for k in range(2):
            run.forward(k)
            output = run.outputs[k][0]
            grads = run.output_grads(k)
            with sends:
                run.wait(run.main)
                sent[10 + k] = output.detach() * 1
            if run.is_late:
                output.record_stream(sends)
                before = late.bytes_in_use()
                assert release(output) == output.numel() * 4
                assert late.bytes_in_use() == before - output.numel() * 4
                torch.full((ROWS, WIDTH), 7.0, device="late")
            run.output_grads = lambda k, grads=grads: grads
            run.input(k)
            run.weight(k)
            del run.output_grads
        run.wait(sends)
        run.dinputs |= sent

    check_in_every_order(scenario, STAGES["mlp"])


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch cannot tell of a stream that it is captured")
@pytest.mark.parametrize("make", [mlp, of(lambda m, x: ToHost.apply(x, m.w), w=(WIDTH,))], ids=["", "on the host"])
def test_passes_on_both_sides_of_a_capture_are_refused(make):
    run = Run("late", make)
    main = torch.accelerator.current_stream()
    for k in range(2):
        run.forward(k)
    run.input(0)
    with late.capturing(main):
        run.input(1)
        with pytest.raises(RuntimeError, match=r"made by an input pass outside the capture .* called within one"):
            run.weight(0)
    with pytest.raises(RuntimeError, match=r"made by an input pass within the capture .* called outside of it"):
        run.weight(1)
    run.weight(0)
    with late.capturing(main):
        run.weight(1)
    expected = results_of(lambda run: [f(k) for f in (run.forward, run.weight) for k in range(2)], "cpu", make)
    assert not differences(run.results(), expected)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch cannot tell of a stream that it is captured")
@pytest.mark.parametrize("name", ["mlp", "normed", "handed over"])
def test_accumulators_of_the_default_stream_in_a_capture(name):
    """torch refuses them, in its own words, and says what to do."""

    class Captured(Run):
        def forward(self, k):
            self.outputs[k] = [self.stage(self.inputs[k])]

        def output_grads(self, k):
            return [self.inputs[k].detach()]

        def step(self):
            for part in (self.forward, self.input, self.weight):
                part(0)

    said = []
    for split in (False, True):
        run = Captured("late", STAGES[name], split=split)
        run.inputs[0] = torch.zeros(ROWS, WIDTH, device="late", requires_grad=True)
        accumulators = [weight.view_as(weight).grad_fn.next_functions[0][0] for weight in run.weights()]
        with pytest.raises(RuntimeError) as caught, late.captured():
            run.step()
        said.append(str(caught.value))
        del accumulators
    assert said[0] == said[1]


@pytest.mark.parametrize("name", ["mlp", "normed", "tied", "batched", "weight root", "branches", "handed over"])
def test_both_passes_in_one_captured_graph(name, monkeypatch):
    """Replayed on other inputs: each time the gradients of these. In the first capture zbpipe checks itself."""
    monkeypatch.setattr(self_check, "_found", {})

    class Captured(Run):
        def forward(self, k):
            torch.manual_seed(k + 1)
            self.inputs[0] = torch.randn(ROWS, WIDTH).to(self.device).requires_grad_()
            self.outputs[0] = outputs_of(self.stage, self.inputs[0])

    def by_steps(run):
        for k in range(3):
            run.stage.zero_grad()
            run.forward(k)
            run.weight(0)

    expected = results_of(by_steps, "cpu", STAGES[name], Captured)
    for order in late.ORDERS:
        late.begin(order)
        run = Run("late", STAGES[name])
        x = torch.zeros(ROWS, WIDTH, device="late", requires_grad=True)
        for weight in run.weights():
            weight.grad = torch.zeros_like(weight)
        grads = [torch.zeros(output.shape, device="late") for output in outputs_of(run.stage, x)]
        with late.captured() as replay:
            outputs = outputs_of(run.stage, x)
            dinputs, groups = zbpipe.stage_backward_input(outputs, grads, [x], run.weights())
            zbpipe.stage_backward_weight(run.weights(), groups)
        del outputs, groups
        for k in range(3):
            torch.manual_seed(k + 1)
            x.detach().copy_(torch.randn(ROWS, WIDTH))
            torch.manual_seed(100)
            for grad in grads:
                grad.copy_(torch.randn(grad.shape))
            for weight in run.weights():
                weight.grad.zero_()
            replay()
        run.dinputs[0] = dinputs[0]
        assert set(self_check._found.values()) == {""}
        assert not differences(run.results(), expected), order


def outputs_of(stage, x):
    outputs = stage(x)
    return list(outputs) if isinstance(outputs, tuple) else [outputs]
