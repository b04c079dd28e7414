"""The demo from end to end, as a user starts it, and its parts that can be wrong without showing it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from demo import report
from demo.config import SCHEDULES, SIDES
from demo.measure import knowing_blocks, measure_step
from demo.train import Difference, Step, difference
from support.processes import environment

ROWS = (
    "loss of the first step",
    "loss of the last step",
    "losses: largest difference",
    "gradients: from torch's own",
    "gradients: from an ordinary backward",
    "step time",
    "CPU time of a step",
    "memory, peak of the step",
)

runs_a_v = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 runs no V over gloo")


@contextlib.contextmanager
def demo(out: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts the demo in a process group of its own; whatever is left of it at the end is killed."""
    with subprocess.Popen(
        [sys.executable, "-m", "demo", "--device", "cpu", "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=out.parent,
        env={name: value for name, value in environment().items() if name not in ("RANK", "WORLD_SIZE")},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@runs_a_v
@pytest.mark.dist
@pytest.mark.slow
def test_quick_demo_prints_a_table_per_schedule_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    figures = tmp_path / "demo.json"
    with demo(picture, "--quick", "--json", str(figures)) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert "\nRIGHT " in out
    assert [line for line in out.replace(str(tmp_path), "").splitlines() if len(line) > 80] == []

    tables = re.split(r"\n(?=\S.*\(Schedule)", out)[1:]
    assert len(tables) == len(SCHEDULES)
    for text, kind in zip(tables, SCHEDULES.values(), strict=True):
        assert kind.label in text
        assert kind.class_name in text
        assert "failed" not in text
        for row in ROWS:
            assert re.search(rf"^{re.escape(row)}.*\d", text, re.MULTILINE), row
        first, last = (re.search(rf"^loss of the {which} .*", text, re.MULTILINE) for which in ("first", "last"))
        assert first is not None
        assert last is not None
        assert all(float(b) < float(a) for a, b in zip(first[0].split()[-2:], last[0].split()[-2:], strict=True))

    seen = json.loads(figures.read_text())
    assert (seen["schema"], seen["wrong"], seen["torch"]) == (4, [], torch.__version__.partition("+")[0])
    assert [(run["schedule"], run["side"]) for run in seen["runs"]] == [
        (kind.label, side) for kind in SCHEDULES.values() for side in SIDES
    ]
    assert all(run["error"] is None and len(run["losses"]) == 4 and run["peak"] > 0 for run in seen["runs"])

    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width > 600
    assert height > 400


@runs_a_v
@pytest.mark.dist
@pytest.mark.slow
def test_ctrl_c_ends_every_rank(tmp_path: Path) -> None:
    with demo(tmp_path / "demo.png", "--schedules", "zbv", "--steps", "1000") as process:
        assert process.stderr is not None
        assert any(re.search(r" [1-9]\d*/1000 ", line) for line in process.stderr)  # the progress bar moves: it trains
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)  # returns only when every rank has closed the pipe
    assert process.returncode == 130, out + err
    assert "Traceback" not in err


@pytest.mark.dist
def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    for arguments in (
        ["--ranks", "0"],
        ["--steps", "1"],
        ["--schedules", "gpipe"],
        ["--out", "no/such/x.png"],
        ["--json", "no/such"],
    ):
        with demo(tmp_path / "demo.png", *arguments) as process:
            _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert arguments[0] in err


def _v_shaped_step(side: str) -> tuple[int, int]:
    """The demo's peak of a step whose stages are all on this rank, and what a recording since before the stages were
    made says: all live bytes, less the weights and the batch."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, schedules

    import zbpipe
    from zbpipe import memory

    width = 64
    with memory.record() as all_of_it, zbpipe.patch() if side == "zbpipe" else contextlib.nullcontext():
        modules = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(4)]
        stages = [PipelineStage(m, i, 4, torch.device("cpu")) for i, m in enumerate(modules)]
        schedule = schedules.ScheduleInterleavedZeroBubble(stages, 8, loss_fn=lambda y, t: (y - t).pow(2).mean())
        x, t = torch.randn(512, width), torch.randn(512, width)
        weights = sum(p.nbytes for m in modules for p in m.parameters())

        def step() -> None:
            for module in modules:
                module.zero_grad()
            schedule.step(x, target=t, return_outputs=False)

        for _ in range(2):
            step()
        for stage in stages:
            stage.submod.zero_grad()
            stage.clear_runtime_states()
        with all_of_it.phase("measured"):
            measured = measure_step(step, stages, torch.device("cpu"))
    (phase,) = [p for p in all_of_it.phases if p.kind == "measured"]
    return measured.peak, phase.peak - weights - x.nbytes - t.nbytes


@pytest.mark.dist
@pytest.mark.parametrize("side", ["torch", "zbpipe"])
@pytest.mark.usefixtures("alone")
def test_the_peak_of_stages_on_one_rank_is_exact(side: str) -> None:
    """torch keeps what the last step handed over on the rank in its receive infos, and frees it in the measured one."""
    measured, true = _v_shaped_step(side)
    # What stages and schedule keep from step to step beside weights: nothing of the size of a tensor of the step.
    assert 0 <= true - measured < 64 * 4, (measured, true)


def test_a_buffer_that_is_freed_unseen_is_told() -> None:
    import torch

    class Stage:
        stage_index = 1

        def __init__(self) -> None:
            self.grad_recv_info: dict[int, object] = {}
            self.args_recv_info: dict[int, object] = {}

        def forward_one_chunk(self) -> None: ...

        backward_one_chunk = backward_weight_one_chunk = forward_one_chunk

    stage = Stage()
    info = SimpleNamespace(buffer=torch.empty(10))
    stage.args_recv_info[0] = (info,)

    def step() -> None:
        info.buffer = torch.empty(20)

    with pytest.raises(RuntimeError, match="40 bytes of older receive buffers"):
        measure_step(step, [stage], torch.device("cpu"))
    with knowing_blocks(torch.device("cpu")):
        step()
        assert measure_step(step, [stage], torch.device("cpu")).peak == 160


def test_a_planted_fault_is_found() -> None:
    """The verdict must see wrong gradients, wrong losses, a failure and a loss that does not fall."""
    import torch

    def result(side: str, losses: tuple[float, float] = (5.0, 4.0), apart: float = 0.0) -> report.Result:
        steps = [Step(loss, 0.1, 0.1) for loss in losses]
        return report.Result("zbv", side, steps, Difference(apart, apart), Difference(apart, apart))

    right = result("torch")
    assert report.find_faults(right, result("zbpipe")) == []
    assert report.find_faults(right, result("zbpipe", apart=1e-3))
    assert report.find_faults(right, result("zbpipe", apart=float("inf")))
    assert report.find_faults(right, result("zbpipe", losses=(5.0, 4.1)))
    assert report.find_faults(right, result("zbpipe", losses=(5.0, float("nan"))))
    assert report.find_faults(result("torch", losses=(4.0, 5.0)), result("zbpipe", losses=(4.0, 5.0)))
    failed = result("zbpipe")
    failed.error = "rank 1: ValueError: planted"
    assert "planted" in report.find_faults(right, failed)[0]

    gradient = torch.tensor([1.0, 2.0])
    assert difference({"w": gradient}, {"w": gradient + torch.tensor([0.0, 0.5])}) == Difference(0.5, 0.2)
    assert difference({"w": gradient}, {"w": None}).relative == float("inf")
    assert difference({"w": gradient * float("nan")}, {"w": gradient}).relative == float("inf")
