"""python -m zbpipe memory, on small training scripts."""

import gzip
import inspect
import json
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from support.commands import running
from support.functions import Hungry
from support.processes import environment
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import zbpipe
from zbpipe._cli import main
from zbpipe._cli.memory import of_rank, text_of

TRAINING = """
import os, sys
import torch, torch.utils.checkpoint, zbpipe.leaks

net = torch.nn.Linear(100, 100)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

def train(steps):
    for step in range(steps):
        for _ in range(2):
            x = torch.ones(10, 100)
            net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    train(int(sys.argv[1]))
    print("the script's end")
"""
SCHEDULE = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
import zbpipe

def loss(output, target):
    return (output - target).pow(2).sum()

dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
try:
    nets = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    stages = [PipelineStage(net, i, 2, torch.device("cpu")) for i, net in enumerate(nets)]
    schedule = ScheduleZBVZeroBubble(stages, 8, loss_fn=loss, scale_grads=False)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    with zbpipe.patch():
        for step in range(5):
            schedule.step(torch.ones(8, 4), target=torch.ones(8, 4))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
finally:
    dist.destroy_process_group()
"""
GRADIENTS = 100 * 101 * 4
STEP = "forward backward between backward between optimizer"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    before = torch.autograd.backward, len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    with running("memory", tmp_path, monkeypatch, capsys) as run:
        yield run
    after = torch.autograd.backward, len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    assert after == before, "torch is as it was"


def numbers(tmp_path, run, source, *arguments, options=()):
    status, said = run(source, *arguments, options=["--json", "step.json", *options])
    assert status == 0 and "the script's end" not in said
    return json.loads((tmp_path / "step.json").read_text()), said


def test_the_second_step_is_recorded_phase_by_phase(run, tmp_path):
    data, said = numbers(tmp_path, run, TRAINING, "100")
    assert said.startswith("zbpipe memory: step 2 (Optimizer.step) on cpu\npeak ")
    assert " ".join(phase["kind"] for phase in data["phases"]) == STEP
    backward = data["phases"][1]
    assert backward["live_end"] - backward["live_begin"] <= GRADIENTS
    assert data["live"] == GRADIENTS + 4000, "the gradients, and the script's x"
    assert data["peak"] == max(phase["peak"] for phase in data["phases"])
    # The weights, the momentum, the x of the first step.
    assert data["before"] >= 2 * GRADIENTS
    wanted = {"schema": 3, "kind": "Optimizer.step", "warmup": 1, "whole": True, "device": "cpu", "rank": 0}
    assert wanted.items() <= data.items()
    assert data["script"] == ["train.py", "100"]
    for kind in ("forward", "backward", "optimizer"):
        assert any(line.startswith(f"{kind} ") for line in said.splitlines())


@pytest.mark.parametrize(("warmup", "live"), [("0", 3 * GRADIENTS + 4000), ("3", GRADIENTS + 4000)])
def test_without_warm_up_the_script_is_recorded_from_its_beginning(run, tmp_path, warmup, live):
    """Weights, gradients and momentum, then."""
    data, said = numbers(tmp_path, run, TRAINING, "100", options=["--warmup", warmup])
    assert data["live"] == live and f"step {int(warmup) + 1}" in said


@pytest.mark.parametrize(
    ("line", "instead", "phases"),
    [
        ("net(x)", "torch.utils.checkpoint.checkpoint(net, x.requires_grad_(), use_reentrant=True)", STEP),
        (
            *("optimizer.zero_grad()", "optimizer.zero_grad(); step % 2 and zbpipe.leaks.step()"),
            f"{STEP} between {STEP.removeprefix('forward ')}",
        ),
        (
            *("net(x).sum()", "with zbpipe.memory.phase('mine', microbatch=_): y = net(x)\n            y.sum()"),
            STEP.replace(" backward", " mine backward"),
        ),
    ],
    ids=["a reentrant backward is within the outer one", "the marker says what a step is", "its own stand beside"],
)
def test_phases_are_seen_from_outside(run, tmp_path, line, instead, phases):
    options = ["--warmup", "2"] if "leaks" in instead else []
    data, _ = numbers(tmp_path, run, TRAINING.replace(line, instead), "100", options=options)
    assert " ".join(phase["kind"] for phase in data["phases"]) == phases
    assert data["kind"] == ("zbpipe.leaks.step()" if "leaks" in instead else "Optimizer.step")


def test_a_schedules_step_has_the_phases_of_its_stages(run, tmp_path):
    data, said = numbers(tmp_path, run, SCHEDULE, str(tmp_path / "store"))
    assert data["kind"] == "Schedule.step"
    assert {phase["kind"] for phase in data["phases"]} == {"forward", "I", "W", "optimizer"}
    assert [(h["stage"], h["microbatch"]) for h in data["held"]] == [(1, k) for k in range(8)]
    assert "microbatch" in said


@pytest.mark.parametrize("name", ["step.png", "step.svg", "step.json.gz"])
def test_out_draws_or_exports_into_the_folder_of_the_beginning(run, tmp_path, name):
    if name.endswith(("png", "svg")):
        pytest.importorskip("matplotlib")
    (tmp_path / "elsewhere").mkdir()
    assert (
        run(TRAINING.replace("    train(int", "    os.chdir('elsewhere'); train(int"), "9", options=["--out", name])[0]
        == 0
    )
    assert (tmp_path / name).stat().st_size > 100
    if name.endswith("gz"):
        with gzip.open(tmp_path / name, "rt") as file:
            assert any(row["name"] == "optimizer" for row in json.load(file)["traceEvents"])


# ---- what goes wrong


@pytest.mark.parametrize(
    ("source", "steps", "status", "words"),
    [
        (TRAINING, "0", 4, ["the script's end", "takes 2", "zbpipe.leaks.step()"]),
        (TRAINING, "1", 4, ["the ends of 1 steps (Optimizer.step) seen", "takes 2"]),
        ("raise SystemExit(7)", "", 7, []),
    ],
)
def test_too_few_steps_are_said_and_the_scripts_exit_status_is_the_commands(run, source, steps, status, words):
    ended, said = run(source, steps, options=["--json", "step.json"])
    assert ended == status and [text for text in words if text not in said] == []


GROWS = """
class Grows(torch.optim.SGD):
    n = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.n += 1
        self.n > 1 and torch.empty(1 << 50)
"""


@pytest.mark.parametrize(
    ("where", "line", "instead"),
    [
        ("forward", "x = torch.ones(10, 100)", "x = torch.ones(10, 100 if step == 0 else 1 << 50)"),
        ("backward", "net(x).sum()", "(Hungry.apply(net(x)) if step else net(x)).sum()"),
        ("between", "optimizer.step()", "step and torch.empty(1 << 50); optimizer.step()"),
        ("optimizer", "torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)", "Grows(net.parameters(), lr=0.1)"),
        (
            "between",
            "optimizer.step()",
            "try: step and Hungry.apply(net(x)).sum().backward()\n        except RuntimeError: pass\n"
            "        step and torch.empty(1 << 50); optimizer.step()",
        ),
    ],
)
def test_a_script_that_fails_in_the_step_shows_what_was_recorded(run, tmp_path, capsys, where, line, instead):
    """In a backward it was "between": the phase had ended by the time the error was seen, and another had begun."""
    hungry = textwrap.dedent(inspect.getsource(Hungry))
    source = TRAINING.replace(line, instead).replace("net =", f"{hungry}\n{GROWS}\nnet =", 1)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        run(source, "100", options=["--on-out-of-memory", "oom", "--json", "step.json"])
    assert "up to where the script failed on cpu\npeak " in capsys.readouterr().out
    assert json.loads((tmp_path / "step.json").read_text())["whole"] is False
    (report,) = (tmp_path / "oom").glob("*.txt")
    assert report.read_text().startswith(f"out of memory on cpu in {where} at train.py:")
    assert torch.autograd.backward.__module__ == "torch.autograd"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--out step.txt train.py", "must end in one of .png"),
        ("--out nowhere/step.png train.py", "there is no folder nowhere"),
        ("--json . train.py", "is a folder"),
        ("--device meta train.py", "cpu and cuda"),
        ("--device cuda:nonsense train.py", "cpu and cuda"),
        ("--warmup -1 train.py", "not a number of steps"),
        ("nothing.py", "there is no file nothing.py"),
        pytest.param(
            *("--device cuda train.py", "no CUDA device"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_a_wrong_command_line_is_refused_before_the_script_runs(run, capsys, tmp_path, options, words):
    (tmp_path / "train.py").write_text("print('ran')")
    with pytest.raises(SystemExit) as ended:
        main(["memory", *options.split()])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert words in said.err and "ran" not in said.out


@pytest.mark.parametrize("ends", ["sys.exit(0)", "torch.empty(1 << 50)"])
def test_a_child_that_the_step_forks_reports_and_writes_nothing(tmp_path, ends):
    child = f"step == 1 and os.fork() == 0 and {ends}; [os.wait() for _ in range(step)]; optimizer.step()"
    (tmp_path / "train.py").write_text(TRAINING.replace("optimizer.step()", child))
    done = by_itself(tmp_path, "-m zbpipe memory --json step.json --on-out-of-memory oom train.py 9")
    assert done.stdout.count("zbpipe memory: ") == 1
    assert json.loads((tmp_path / "step.json").read_text())["whole"] is True
    assert not (tmp_path / "oom").exists()


def by_itself(folder, arguments):
    done = subprocess.run(
        [sys.executable, *arguments.split()],
        cwd=folder, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


# ---- what is printed


def test_a_peak_outside_of_all_phases_is_put_into_none():
    """Found on a script that compared with another model between its schedule's steps."""
    for inside, outside, highest in ((100, 1000, "none of its phases"), (1000, 100, "I")):
        with zbpipe.memory.record() as recording:
            with recording.phase("I"):
                torch.ones(inside)
            torch.ones(outside)
        assert of_rank("step 2", recording, 0)["highest"] == highest


def test_tables_fit_80_columns():
    with zbpipe.memory.record() as recording:
        for kind in ("forward", "a phase that somebody gave a very long name"):
            with recording.phase(kind, microbatch=1023):
                torch.ones(100_000_000 // 4)
    report = of_rank("step 2 (Schedule.step)", recording, 0)
    ranks = {rank: {**report, "peak": 999_999_999, "allocations": 100_000} for rank in range(1024)}
    said = text_of(ranks, [], 1024)
    assert "a phase that somebody gave a v…" in said and said.count("and 1008 ranks with less in use") == 1
    assert max(map(len, [*said.splitlines(), *text_of({0: report}, [], 1).splitlines()])) <= 80, said


def test_what_a_rank_lacks_is_said():
    with zbpipe.memory.record(max_events=1) as recording:
        torch.ones(3)
    report, lacks = of_rank("step 2", recording, 0), "1 events did not fit into the log (max_events=1)"
    assert f"\nincomplete: {lacks}" in text_of({0: report}, [], 1)
    assert f"\nincomplete on rank 1: {lacks}" in text_of({0: {**report, "incomplete": ""}, 1: report}, [], 2)


@pytest.mark.dist
def test_under_torchrun_one_report_tells_of_all_ranks(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
        + TRAINING.replace("net =", "kept = torch.ones(1_000_000) if dist.get_rank() else None\nnet =", 1)
    )
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2"
    said = by_itself(tmp_path, f"{torchrun} -m zbpipe memory --json step.json --out step.json.gz train.py 6").stdout
    assert said.count("zbpipe memory: ranks 0 to 1 of 2\nranks 0 to 1: step 2 (Optimizer.step) on cpu\n") == 1
    header = r"rank  peak in +peak, MB +before, MB +live, MB +blocks"
    assert len(re.findall(header, said)) == len(re.findall(r"(?m)^phase +ms", said)) == 1
    before = {line.split()[0]: float(line.split()[3]) for line in said.splitlines() if line[:1] in "01" and line}
    assert "\nrank 1, which has most in use at once, by phase:\n" in said
    assert before["1"] - before["0"] == pytest.approx(4.0, abs=0.1)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"step.rank{rank}.json").read_text())["rank"] == rank
        with gzip.open(tmp_path / f"step.rank{rank}.json.gz", "rt") as file:
            assert json.load(file)["traceEvents"]
