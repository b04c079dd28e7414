"""python -m zbpipe leaks, on small training scripts."""

import os
import sys

import pytest
import torch.distributed.pipelining
from support.processes import python
from torch.optim.optimizer import _global_optimizer_post_hooks

from zbpipe._cli import main, ranks
from zbpipe.leaks import Growth

TRAINING = """
import sys
import torch

net = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
history = []

def train(steps, leak):
    for _ in range(steps):
        loss = net(torch.ones(4, 16)).sum()
        loss.backward()
        if leak:
            history.append(torch.ones(1024) * loss.item())
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    train(int(sys.argv[1]), "leak" in sys.argv)
    print("the script's end")
"""


# What makes the leak elsewhere, or the end.
CYCLE = TRAINING.replace("history.append(torch.ones(1024) * loss.item())", "c = [torch.ones(1024)]; c.append(c)")
AT_FIRST = TRAINING.replace("torch.optim.SGD", "torch.optim.Adam").replace("if leak:", "if leak and _ < 4:")
CLEANED = TRAINING.replace("    train(int", "    try:\n        train(int").replace(
    '    print("the', '    finally:\n        print("cleaned up")\n    print("the'
)
# The picture goes where the command was given.
ELSEWHERE = "    import os; os.mkdir('elsewhere'); os.chdir('elsewhere')\n"
STEPS = "5 steps (Optimizer.step) after 2 of warm-up"

# Script, its arguments, the command's options, exit status, what is said, what is not.
RUNS = {
    "growth": (TRAINING + ELSEWHERE, "7 leak", "", 0, [STEPS, "history", "+1  +4096", "the script's end"], []),
    "growth is an error": (TRAINING, "7 leak", "--error", 3, ["history"], []),
    "no growth": (TRAINING, "7", "--error", 0, [STEPS, "nothing grew"], ["history"]),
    "what only the collector frees": (CYCLE, "7 leak", "--error", 3, [], []),
    "growth while it warms up": (AT_FIRST, "12 leak", "--error --warmup 5", 0, [], []),
    "no warm-up": (AT_FIRST, "5 leak", "--error --warmup 0", 3, [], []),
    "steps end the script": (
        CLEANED + "    raise SystemExit(7)\n",
        "100000000",
        "--steps 5 --warmup 1",
        0,
        ["5 steps", "cleaned up"],
        ["the script's end"],
    ),
    "no step": ("print(1)\n", "", "", 4, ["no step was seen"], []),
    "too few steps": (TRAINING, "2", "", 4, ["2 steps (Optimizer.step) were seen"], []),
    "the script's status": (TRAINING + "    sys.exit(7)\n", "6", "", 7, [], []),
    "the script's word": (TRAINING + "    sys.exit('a word')\n", "6", "", 1, ["a word"], []),
    "the script's odd status": (TRAINING + "    sys.exit([1, 2])\n", "6", "", 1, ["[1, 2]"], []),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run(name, run, tmp_path):
    source, arguments, options, expected, words, others = RUNS[name]
    status, said = run(source, *arguments.split(), options=[*options.split(), "--picture", "grown.dot"])
    assert status == expected, said
    assert [text for text in words if text not in said] == [] and [text for text in others if text in said] == []
    has_grown = " leak" in arguments and name != "growth while it warms up"
    assert (tmp_path / "grown.dot").exists() == has_grown


def test_a_picture_that_cannot_be_drawn_costs_no_report(run):
    source = TRAINING + "    import os\n    os.mkdir('grown.dot')\n"
    status, said = run(source, *["8", "leak"], options=["--error", "--picture", "grown.dot"])
    assert status == 3 and "grew, and is held by" in said and "the picture was not drawn: " in said


def test_the_scripts_exception_passes_after_the_report(run, capsys):
    with pytest.raises(ZeroDivisionError):
        run(TRAINING + "    1 / 0\n", "6")
    assert "4 steps" in capsys.readouterr().out


SCHEDULE = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
import zbpipe

def loss(output, target):
    return (output - target).pow(2).sum()

class Net(torch.nn.Linear):
    def forward(self, x, schedule):  # a name of the command's own
        return super().forward(x)

class Run:
    def __init__(self):
        self.losses = []

    def train(self, schedule, optimizers, steps, leak):
        for step in range(steps):
            losses = []
            if leak:
                self.losses.append(losses)
            schedule.step(torch.ones(8, 4), target=torch.ones(8, 4), losses=losses, schedule=torch.ones(8))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

def main():
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
    try:
        nets = [Net(4, 4), Net(4, 4)]
        stages = [PipelineStage(net, i, 2, torch.device("cpu")) for i, net in enumerate(nets)]
        schedule = ScheduleZBVZeroBubble(stages, 8, loss_fn=loss, scale_grads=False)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        for optimizer in optimizers:
            optimizer.step()  # before any schedule's
        with zbpipe.patch():
            Run().train(schedule, optimizers, 8, "leak" in sys.argv)
    finally:
        dist.destroy_process_group()

main()
"""


@pytest.mark.parametrize("kept", [False, True])
def test_schedules_steps_are_steps_and_losses_kept_by_their_caller_are_named(run, tmp_path, kept):
    status, said = run(SCHEDULE, str(tmp_path / "store"), *["leak"] * kept, options=["--error"])
    assert "6 steps (Schedule.step) after 2 of warm-up\n" in said
    assert status == (3 if kept else 0) and ("attribute losses of Run" in said) == kept, said


def test_schedules_and_optimizers_are_torchs_own_afterwards(run):
    schedules = torch.distributed.pipelining.schedules
    before = [vars(c).get("step") for c in vars(schedules).values() if isinstance(c, type)]
    hooks = len(_global_optimizer_post_hooks)
    run(TRAINING, "4")
    assert [vars(c).get("step") for c in vars(schedules).values() if isinstance(c, type)] == before
    assert len(_global_optimizer_post_hooks) == hooks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.py"], "there is no file absent.py"),
        (["--steps", "3", "x.py"], "'3' is no number of steps; give 4 or more"),
        (["--warmup", "-1", "x.py"], "'-1' is no number of steps; give 0 or more"),
        (["--picture", "x.gif", "train.py"], "x.gif is no name of a picture; expected one that ends in .dot"),
        (["--picture", "absent/x.dot", "train.py"], "absent/x.dot: there is no folder absent; make it first"),
        (["--picture", ".", "train.py"], ". is a folder; name a file in it"),
        (["--picture", "x.png", "train.py"], "x.png needs Graphviz's program dot"),
    ],
)
def test_bad_arguments_are_refused_before_the_script_runs(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train.py").write_text("raise AssertionError\n")
    with pytest.raises(SystemExit) as ended:
        main(["leaks", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def on_two_ranks(folder, source, *arguments, options=(), setting=""):
    """What the command says of a script under torchrun; `setting` changes how its ranks wait for each other."""
    (folder / "train.py").write_text("import os\n" + source)
    (folder / "sitecustomize.py").write_text(f"import zbpipe._cli.ranks\n{setting}\n")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "zbpipe", "leaks")
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return python(*torchrun, *options, "train.py", "6", *arguments, cwd=folder, OMP_NUM_THREADS="1", PYTHONPATH=path)


@pytest.mark.dist
def test_under_torchrun_the_first_rank_tells_of_all(tmp_path):
    source = TRAINING.replace('"leak" in sys.argv', 'os.environ["RANK"] == "1"').replace(
        "torch.nn.Linear(16, 16)", "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))"
    )
    source = f"import torch.distributed as dist\ndist.init_process_group('gloo')\n{source}"
    source += "    del net, optimizer\n    dist.destroy_process_group()\n"
    done = on_two_ranks(tmp_path, source, options=["--picture", "grown.dot"])
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.partition("rank 0 of 2:\n")[2].split("\n\nrank 1 of 2:\n")
    for said, grown in ((first, "nothing grew"), (second, "    >> module global __main__.history (")):
        assert said.startswith("zbpipe leaks: 4 steps (Optimizer.step) after 2 of warm-up\n") and grown in said
    assert "\n  2 tensors (8192 bytes) from steps 2 to 3, held by a list that was never cleared:\n" in second
    assert [path.name for path in tmp_path.glob("*.dot")] == ["grown.rank1.dot"]


def test_what_ranks_say_alike_is_said_once(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    said = [f"head {n // 3}\n\ntable{'s' * n}\n\nnothing grew" for n in range(4)]
    said += [f"head 0\n\ntable\n\ngrew {kind}" for kind in "abcdefghij"]
    parts = ranks._text_of(dict(enumerate(said)), [14, 15]).split("\n\n")
    assert parts[:3] == ["ranks 0 to 3 of 16, with the numbers of rank 0:\nhead 0", "table", "nothing grew"]
    assert parts[3:-2:3] == [f"rank {n} of 16:\nhead 0" for n in range(4, 11)]
    assert parts[-2:] == [
        "ranks 11 to 13: 3 other reports",
        "ranks 14 to 15: failed, or not ended in time; each prints its own report when it ends",
    ]
    assert ranks._text_of({0: said[0], 1: said[0]}, []).startswith("ranks 0 to 1 of 16:\n")


def test_without_the_agents_store_a_rank_prints_its_own(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert "rank 1 of 2:\nzbpipe leaks: 4 steps" in run(TRAINING, "6")[1]
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.setenv(name, "")
    assert "zbpipe leaks: 4 steps" in run(TRAINING, "6")[1]


LATE = "    if os.environ['RANK'] == '1':\n        import time; time.sleep(4)\n"
FAILS = "    if os.environ['RANK'] == '{}':\n        raise KeyError('the script failed')\n"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("end", "wait", "status", "printed"),
    [
        (
            LATE,
            0.5,
            0,
            ["rank 0 of 2:\n", "rank 1: failed, or not ended in time; each prints its own", "rank 1 of 2:\n"],
        ),
        # The rank that does not fail outlives torchrun's patience with it if it waits.
        (FAILS.format(0), 10_000, 1, ["rank 0 of 2:\nzbpipe leaks: "]),
        (FAILS.format(1), 10_000, 1, ["rank 1 of 2:\nzbpipe leaks: "]),
    ],
    ids=["late", "the first fails", "another fails"],
)
def test_a_rank_that_ends_too_late_or_fails_prints_its_own(tmp_path, end, wait, status, printed):
    """One that fails waits for nobody: others may wait for it to go, for as long as their group's timeout."""
    setting = f"zbpipe._cli.ranks.WAIT, zbpipe._cli.ranks._PATIENCE = {wait}, 10_000"
    done = on_two_ranks(tmp_path, TRAINING + end, "leak", setting=setting)
    assert done.returncode == status and ("KeyError: 'the script failed'" in done.stderr) == status, done.stderr
    assert [words for words in printed if words not in done.stdout] == [], done.stdout


OF_PYTHON = """
import os, pickle, sys

class Kept:
    def __del__(self):
        print("gone", flush=True)

names = ("__name__", "__file__", "__package__", "__doc__")
print([globals()[name] for name in names], "__cached__" in globals(), __spec__ and __spec__.name, __loader__ is not None)
print(sys.argv, [os.path.realpath(entry) for entry in sys.path], pickle.loads(pickle.dumps(Kept)) is Kept)
kept = Kept()
print("ends", flush=True)
"""


@pytest.mark.parametrize("is_safe", [False, True], ids=["", "safe path"])
@pytest.mark.parametrize("given", [["package/script.py"], ["-m", "package"]], ids=["script", "module"])
def test_a_script_runs_as_python_runs_it_and_its_globals_go_when_python_lets_them(given, is_safe, tmp_path):
    """PYTHONSAFEPATH came with Python 3.11; older ones do not heed it."""
    (tmp_path / "package").mkdir()
    for name in ("script.py", "__init__.py", "__main__.py"):
        (tmp_path / "package" / name).write_text("" if "init" in name else OF_PYTHON)
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    variables |= {"PYTHONSAFEPATH": "1"} if is_safe else {}

    def lines(*before):
        done = python(*before, *given, "an argument", cwd=tmp_path, **variables)
        return done.stdout.splitlines(), done.stderr, done.returncode

    (*expected, ends, gone), _, _ = lines()
    said, errors, status = lines("-m", "zbpipe", "leaks")
    assert status == 4, errors
    assert (ends, gone) == ("ends", "gone")
    assert said[:3] == [*expected, ends], errors
    # The report is not lost, whatever goes wrong at the end.
    assert said[-1] == "gone" and "no step was seen" in said[3]


def test_many_alike_steps_are_one_row():
    source = Growth()
    source.counts, source.bytes = [5] * 3 + [6] * 40, [50] * 3 + list(range(60, 100))
    source.close()
    rows = source.counts_table().splitlines()[2:]
    assert [row.split("  ")[0] for row in rows] == ["1", "2 to 3", "4", "5 to 43"]
    assert rows[-1].split()[-4:] == ["6", "99", "+0", "+1"]
