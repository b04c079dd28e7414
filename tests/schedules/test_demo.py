"""The demo from end to end, as a user starts it, and its parts that can be wrong without showing it."""

from __future__ import annotations

import contextlib
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

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from zbpipe.demo import report
from zbpipe.demo.config import SCHEDULES, Config
from zbpipe.demo.measure import Action, Event, count, receive_buffers
from zbpipe.demo.train import Difference, Step, difference

ROWS = (
    "loss of the first step",
    "loss of the last step",
    "losses: largest difference",
    "gradients: from torch's own",
    "gradients: from an ordinary backward",
    "step time",
    "CPU time of a step",
    "memory held from I to W",
    "memory, peak of the step",
)


@contextlib.contextmanager
def demo(out: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts the demo in a process group of its own; whatever is left of it at the end is killed."""
    with subprocess.Popen(
        [sys.executable, "-m", "zbpipe.demo", "--device", "cpu", "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=out.parent,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.dist
@pytest.mark.slow
def test_quick_demo_prints_a_table_per_schedule_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    with demo(picture, "--quick") as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert "\nRIGHT " in out

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
        assert [float(cell) for cell in last[0].split()[-2:]] < [float(cell) for cell in first[0].split()[-2:]]
        held = re.search(r"from I to W +([\d.]+) MB +([\d.]+) MB", text)
        assert held is not None
        assert 0 < float(held[2]) <= float(held[1])

    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width > 600
    assert height > 400


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
    for arguments in (["--ranks", "0"], ["--steps", "1"], ["--schedules", "gpipe"], ["--out", "no/such/x.png"]):
        with demo(tmp_path / "demo.png", *arguments) as process:
            _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert arguments[0] in err


def test_counting_memory_on_a_trace_made_by_hand() -> None:
    """Held: live when I returned and freed by W. Not: freed in between, born later, older than the step, stage 0's."""
    actions = [
        Action("F", 1, 0, 0, 10),
        Action("I", 1, 0, 10, 20),
        Action("I", 0, 0, 20, 25),
        Action("I", 1, 1, 25, 29),
        Action("W", 1, 0, 30, 40),
        Action("W", 0, 0, 40, 45),
        Action("W", 1, 1, 45, 50),
    ]
    events = [
        Event(1, 0xA, 100),  # held for microbatch 0
        Event(2, 0xB, 1000),  # freed by I
        Event(3, 0xC, 10),  # held for microbatch 1
        Event(4, 0xD, 7),  # stage 0's
        Event(15, 0xB, -1000),
        Event(16, 0xE, 5000),  # freed between I and W
        Event(22, 0xE, -5000),
        Event(31, 0xF, 300),  # W's own
        Event(32, 0xF, -300),
        Event(35, 0xA, -100),
        Event(36, 0x9, -1),  # older than the step
        Event(42, 0xD, -7),
        Event(49, 0xC, -10),
    ]
    memory = count(actions, events)
    assert memory.held == 110
    assert memory.peak == 100 + 10 + 7 + 5000
    assert memory.kinds == ["F", "I", "I", "I", "W", "W", "W"]
    assert max(memory.live) == memory.peak
    assert memory.live[-1] == 0

    standing = [Event(float("-inf"), 0x9, 20), Event(float("-inf"), 0x8, 3)]  # the first is freed in the step
    memory = count(actions, events, standing)
    assert memory.held == 110 + 20  # while W of microbatch 0 ran
    assert memory.peak == 100 + 10 + 7 + 5000 + 23
    assert memory.live[-1] == 3


def test_receive_buffers_are_counted_once_and_only_where_they_have_memory() -> None:
    import torch

    buffer = torch.empty(3, 4)
    infos = tuple(SimpleNamespace(buffer=b) for b in (buffer, buffer.view(12), None, torch.empty(5, device="meta")))
    stage = SimpleNamespace(args_recv_info={0: infos}, grad_recv_info={0: (SimpleNamespace(buffer=torch.empty(2)),)})
    assert sorted(event.size for event in receive_buffers([stage])) == [8, 48]


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


def test_schedules_deal_every_stage_once() -> None:
    for ranks in (1, 2, 3):
        config = Config(ranks=ranks)
        for kind in SCHEDULES.values():
            owned = [stage for rank in range(ranks) for stage in config.stages_of(rank, kind)]
            assert sorted(owned) == list(range(config.num_stages))
            assert config.num_stages - 1 in config.stages_of(config.rank_of_last_stage(kind), kind)
