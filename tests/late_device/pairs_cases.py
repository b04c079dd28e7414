"""What makes streams hard, every three of it: a combination of the knobs below is a program of two microbatches.

Each runs as an ordinary backward too, on the same streams: where that is right, and no race, the two passes must be.
"""

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import late
from support.late_runs import Run, differences, no_stream
from support.late_stages import ROWS, SQUARE, WIDTH, ToHost, again, of, used_here
from torch.autograd.graph import saved_tensors_hooks

import zbpipe

KNOBS = {
    # Where the forwards and I are called. The caller waits for forwards on other streams before it calls I.
    "streams": ("on one stream", "forwards aside", "a stream per microbatch"),
    # How the matrix is computed that two branches use, on streams of their own; or there are no branches.
    "matrix": ("plain", "checkpointed", "with hooks"),
    "unpacking": ("at once", "slow"),  # of what the rest saves
    "outputs": ("on the device", "on the host"),
    "weight": ("W as I", "W on another stream", "W on another thread"),  # which waits for nothing of I's
    "capture": ("eager", "captured"),  # after a warm-up on a stream aside, of which the accumulators are
    "policy": ("", "all", "recompute"),
}
POLICIES = {"": {}, "all": {"defer": "all"}, "recompute": {"checkpoint": "recompute"}}
MICROBATCHES = range(2)


def unpacked_slowly(tensor):
    late_by = used_here(tensor)
    for _ in range(3):
        late_by = late_by + 0
    return late_by


class slowly(saved_tensors_hooks):
    def __init__(self):
        super().__init__(lambda tensor: tensor.detach().clone(), unpacked_slowly)


def forward(m, run, x, bias):
    """The input `bias` gets a gradient that is an expanded number."""
    knobs = run.knobs
    with slowly() if knobs["unpacking"] == "slow" else contextlib.nullcontext():
        if knobs["matrix"] == "plain":
            h = torch.tanh(x @ m.w * m.scale)
        else:
            h = in_branches(run, computed(m.w, knobs["matrix"]), m.scale, x)
        h = m.out(h) + bias.sum() * 2
        return ToHost.apply(h, m.last) if knobs["outputs"] == "on the host" else h * m.last


def computed(w, how):
    if how == "checkpointed":
        return again(lambda w: torch.sin(w * w), w)
    with slowly():
        return torch.sin(w * w)


def in_branches(run, matrix, scale, x):
    made = []
    for change in (torch.sin, torch.cos):
        side = run.stream()
        with side:
            made.append(torch.tanh(change(x) @ matrix) * scale)
        if run.is_late:
            matrix.record_stream(side)
            made[-1].record_stream(torch.accelerator.current_stream())
        run.wait(side)
    return made[0] + made[1]


STAGE = of(forward, w=SQUARE, scale=(WIDTH,), out=lambda: torch.nn.Linear(WIDTH, WIDTH), last=(WIDTH,))


class Combined(Run):
    def __init__(self, device, make, knobs, **options):
        self.knobs, self.streams, self.accumulators, self.events = knobs, [], [], {}
        super().__init__(device, make, **options)
        for k in MICROBATCHES:
            self.inputs[k] = [torch.empty(ROWS, WIDTH, device=self.device, requires_grad=True) for _ in range(2)]
        self.fill_inputs(0)

    def stream(self):
        made = super().stream()
        self.streams.append(made)
        return made

    def fill_inputs(self, seed):
        torch.manual_seed(seed)
        for x in itertools.chain(*self.inputs.values()):
            x.detach().copy_(torch.randn(ROWS, WIDTH))

    def forward(self, k):
        for x in self.inputs[k]:
            x.grad = None
        self.outputs[k] = [self.stage(self, *self.inputs[k])]

    def input(self, k):
        """I, or the ordinary backward."""
        outputs, grads = self.outputs[k], self.output_grads(k)
        del self.outputs[k]
        if not self.split:
            torch.autograd.backward(outputs, grads)
            self.dinputs[k] = [x.grad for x in self.inputs[k]]
            return
        with late.events() as self.events["I", k]:
            self.dinputs[k], self.groups[k] = zbpipe.stage_backward_input(
                outputs, grads, self.inputs[k], self.weights()
            )

    def weight(self, k):
        if self.split:
            with late.events() as self.events["W", k]:
                zbpipe.stage_backward_weight(self.weights(), self.groups.pop(k))

    def use_memory(self):
        """On every stream, what has been let go of."""
        for stream in [no_stream(), *self.streams]:
            with stream:
                for _ in range(4):
                    torch.full(SQUARE, 1e9, device=self.device)

    def results(self):
        given = {f"{k}, {name}": x for k, (x, bias) in self.dinputs.items() for name, x in (("x", x), ("bias", bias))}
        self.dinputs = given
        return super().results()


def step(run):
    knobs, main = run.knobs, run.main and torch.accelerator.current_stream()
    of_forwards = [no_stream() if knobs["streams"] == "on one stream" else run.stream() for _ in MICROBATCHES]
    of_inputs = of_forwards if knobs["streams"] == "a stream per microbatch" else [no_stream() for _ in MICROBATCHES]
    of_weights = of_inputs if knobs["weight"] == "W as I" else [run.stream() for _ in MICROBATCHES]
    for k in MICROBATCHES:
        with of_forwards[k]:
            run.forward(k)
        if of_inputs is not of_forwards and run.is_late and isinstance(of_forwards[k], torch.Stream):
            main.wait_stream(of_forwards[k])
    for k in MICROBATCHES:
        with of_inputs[k]:
            run.input(k)
    run.use_memory()
    for k in MICROBATCHES:

        def weight(k=k):
            with of_weights[k]:
                run.weight(k)

        if knobs["weight"] == "W on another thread":
            with ThreadPoolExecutor() as pool:
                pool.submit(weight).result()
        else:
            weight()
    run.use_memory()
    for stream in reversed(run.streams):
        run.wait(stream)


def program(run):
    if run.knobs["capture"] == "eager":
        step(run)
        return
    warm_up = run.stream()
    with warm_up:
        run.accumulators = [weight.view_as(weight).grad_fn.next_functions[0][0] for weight in run.weights()]
        step(run)
    run.wait(warm_up)
    run.streams.clear()
    with late.captured() if run.is_late else contextlib.nullcontext(lambda: step(run)) as again:
        if run.is_late:
            step(run)
    for seed in (1, 2):
        run.fill_inputs(seed)
        again()


def combinations():
    """All, those first with which every three values are met, of whatever knobs; the rest takes long."""
    rows = list(itertools.product(*KNOBS.values()))
    threes = {row: set(itertools.combinations(enumerate(row), 3)) for row in rows}
    left, drawn = set().union(*threes.values()), []
    while left:
        drawn.append(max(rows, key=lambda row: len(threes[row] & left)))
        left -= threes[drawn[-1]]
    for row in [*drawn, *(row for row in rows if row not in drawn)]:
        marks = () if row in drawn else pytest.mark.long
        yield pytest.param(dict(zip(KNOBS, row)), id=", ".join(filter(None, row)), marks=marks)


@pytest.mark.parametrize("knobs", list(combinations()))
def test_combination(knobs):
    def results_on(device, split):
        run = Combined(device, STAGE, knobs, split=split)
        program(run)
        return run.results(), run.events

    expected, _ = results_on("cpu", False)
    for split in (False, True):
        for order in late.ORDERS:
            late.begin(order)
            with zbpipe.policy(**POLICIES[knobs["policy"]]):
                got, events = results_on("late", split)
            assert not differences(got, expected), (split, order)
            assert not late.races(), (split, order)
            for (which, _), seen in events.items():
                assert which == "I" or all(count <= 2 for count in seen.between().values()), (order, seen)
                assert seen.host_waits == 0, (order, which, seen)
