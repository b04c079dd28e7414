"""I and W never wait for a GPU: the calls of CUDA's runtime that the profiler sees in them, beside an ordinary backward's.

On a CPU the late device counts the same calls (tests/late_device/streams_cases.py). What a user's own hooks and Functions
do is theirs.
"""

import collections

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import zbpipe

WAITS = ("Synchronize", "cudaMemcpy", "cuMemcpy")  # a copy that is Async waits for nobody, but for pageable memory
COPIES = ("Memcpy DtoH", "Memcpy HtoD")
WIDTH, ROWS = 64, 32


def of_runtime(names):
    """What waits among the calls of a runtime, and how many events are recorded."""
    names = list(names)
    waits = collections.Counter(
        name for name in names
        if name.startswith(COPIES) or (any(part in name for part in WAITS) and "Async" not in name)
    )  # fmt: skip
    return waits, sum(name.startswith(("cudaEventRecord", "cuEventRecord")) for name in names)


def test_which_calls_count():
    calls = ["cudaLaunchKernel", "cudaMemcpyAsync", "cudaEventRecordWithFlags", "cudaStreamWaitEvent", "aten::mm"]
    assert of_runtime(calls) == ({}, 1)
    waits, _ = of_runtime(["cudaStreamSynchronize", "cudaMemcpy", "Memcpy DtoH (Device -> Pageable)", *calls])
    assert waits.keys() == {"cudaStreamSynchronize", "cudaMemcpy", "Memcpy DtoH (Device -> Pageable)"}


cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def calls_of(run):
    """Without those of the profiler's own end."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        with record_function("measured"):
            run()
        torch.cuda.synchronize()
    (span,) = (event.time_range for event in prof.events() if event.name == "measured" and event.cpu_time_total)
    return of_runtime(
        event.name for event in prof.events()
        if event.name.startswith("Memcpy") or span.start <= event.time_range.start <= span.end
    )  # fmt: skip


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, WIDTH, WIDTH, dtype=torch.bfloat16) / WIDTH)
        self.register_buffer("ends", torch.tensor([ROWS // 2, ROWS], dtype=torch.int32))

    def forward(self, x):
        return torch._grouped_mm(x.bfloat16(), self.up, offs=self.ends).float()


class Autocast(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(x).float()


def layers():
    return nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*layers()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def hooked():
    stage = nn.Sequential(*layers())
    for weight in stage.parameters():
        weight.register_hook(lambda grad: grad * 2)
    return stage


STAGES = {
    "layers": (lambda: nn.Sequential(*layers()), {}),
    "fused": (lambda: nn.Sequential(*layers()), {"fused": True}),
    "main_grad": (lambda: nn.Sequential(*layers()), {"main_grad": True}),
    "everything deferred": (lambda: nn.Sequential(*layers()), {"defer": "all"}),
    "hooked weights": (hooked, {}),
    "autocast": (lambda: Autocast(*layers()), {}),
    "experts": (Experts, {}),
    "convolution": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()),
        {},
    ),
    **{f"checkpointed, {kind}": (Checkpointed, {"checkpoint": kind}) for kind in ("keep", "recompute", "input_pass")},
}


class Microbatches:
    """Two forwards, each on its own stream or on the caller's, and what to call then."""

    def __init__(self, name, aside=False):
        make, self.choices = STAGES[name]
        torch.manual_seed(0)
        self.stage = make().cuda()
        for weight in self.stage.parameters():
            weight.grad = torch.zeros_like(weight)
            if self.choices.get("main_grad"):
                weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        self.stream = torch.cuda.Stream() if aside else torch.cuda.current_stream()
        self.grad = torch.ones(ROWS, WIDTH, device="cuda")

    def forward(self):
        self.stream.wait_stream(torch.cuda.current_stream())
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        with torch.cuda.stream(self.stream):
            out = self.stage(x)
        torch.cuda.current_stream().wait_stream(self.stream)
        return x, out

    def whole(self):
        _, out = self.forward()
        return calls_of(lambda: out.backward(self.grad))

    def split(self):
        """(waits, events) of I, and of W."""
        x, out = self.forward()
        groups = []
        with zbpipe.policy(**self.choices):
            of_input = calls_of(lambda: groups.extend(zbpipe.stage_backward_input([out], [self.grad], [x], None)[1]))
            return of_input, calls_of(lambda: zbpipe.stage_backward_weight(None, groups))


class TestOnAGPU:
    pytestmark = cuda

    @pytest.mark.parametrize("name", STAGES)
    def test_nobody_waits_for_the_device(self, name):
        run = Microbatches(name)
        run.whole(), run.split()  # the first ones load kernels
        ordinary, _ = run.whole()
        (of_input, _), (of_weight, _) = run.split()
        assert not of_input - ordinary and not of_weight - ordinary, (of_input, of_weight, ordinary)

    @pytest.mark.parametrize("aside", [False, True], ids=["one stream", "the forward aside"])
    def test_events_of_a_weight_pass(self, aside):
        """None on one stream, two for a pair of streams."""
        run = Microbatches("layers", aside)
        run.whole(), run.split()
        _, (_, events) = run.split()
        assert events == 2 * aside

    def test_a_wait_is_seen(self):
        run = Microbatches("layers")
        run.stage[0].weight.register_hook(lambda grad: print(grad.sum().item()))
        run.split()
        _, (waits, _) = run.split()
        assert waits
