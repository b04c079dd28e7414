"""Each script in examples/ runs, and says that its results are right."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import forks

import zbpipe

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "checkpointed.py": "gradients equal those of the model in one piece, without checkpointing",
    "at_scale.py": "no tensor outlived its step",
    "leaky.py": "predictions of 20 steps",
    "compile_split.py": "gradients of 2 steps equal those of the model in one piece",
    "cuda_graph.py": "gradients of 3 steps equal" if torch.cuda.is_available() else "no GPU here",
    "custom_linear.py": "gradients of 3 steps equal those of ordinary backwards, bit for bit",
    "explain.py": "the FLOPs and bytes are those of a real step",
    "ddp.py": "gradients of 2 steps equal those of the model in one piece",
    "fsdp2.py": "gradients of 2 steps equal those of the model in one piece, to bfloat16's precision",
    "tensor_parallel.py": "gradients of 2 steps equal those of the model in one piece",
    "csv_schedule.py": "gradients of 2 steps equal those of the model in one piece",
    "huggingface.py": "losses of 5 steps equal those of the model in one piece",
    "torchtitan_cpu.py": "torchtitan trained 5 steps; zbpipe is on: True",
    "mixed_precision.py": "weights after 3 steps equal those of the model in one piece",
    "zbv.py": "step 4: loss 0.920",
    "weight_grad_store.py": "equals an ordinary backward's gradient, bit for bit",
}
# Two stages of one rank are neighbours, where torch 2.11's schedules open a connection that gloo refuses.
OLDER = torch.__version__ < (2, 12)
OF_A_V = {"at_scale.py", "checkpointed.py", "compile_split.py", "ddp.py", "tensor_parallel.py", "csv_schedule.py"}
OF_A_V |= {"huggingface.py", "mixed_precision.py", "zbv.py"}
NEEDS = {"huggingface.py": "transformers", "torchtitan_cpu.py": "torchtitan"}
# inductor imports what torch itself deprecates, which these runs make an error
ARGUMENTS = {"compile_split.py": ["aot_eager"]}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAYS.keys()


def parameters(names, is_long=lambda name: False):
    found = []
    for name in names:
        is_missing = name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None
        marks = [
            pytest.mark.skipif(is_missing, reason=f"needs {NEEDS.get(name)}"),
            pytest.mark.skipif(OLDER and name in OF_A_V, reason="torch 2.11 runs no V over gloo"),
            *([pytest.mark.long] if is_long(name) else []),
        ]
        found.append(pytest.param(name, marks=marks))
    return found


def ranks_of(name):
    """As many as the script's own words start under torchrun."""
    said = re.search(r"torchrun --nproc-per-node (\d) ", (EXAMPLES / name).read_text())
    return int(said[1]) if said else 1


# Older profilers warn once of any use: "Warning: Profiler clears ...".
QUIET = ["ignore:Warning"] if torch.__version__ < (2, 13) else []
WARNS = {"torchtitan_cpu.py"}  # torch, of what torchtitan does on a CPU
# Started as a user starts them: one of each way in which they start their ranks.
TORCHRUN_ALONE = {"at_scale.py", "torchtitan_cpu.py", "zbv.py"}
START_THEIRS = {"compile_split.py", "csv_schedule.py"}


def test_they_start_their_ranks_in_the_same_words():
    """Hence it is enough to start one of them so."""
    ends = set()
    for path in EXAMPLES.glob("*.py"):
        start, found, end = path.read_text().partition("\ndef start(rank):")
        if found:
            world = str(ranks_of(path.name))
            ends.add(end.replace(f'WORLD_SIZE="{world}"', "").replace(f"nprocs={world}", ""))
    assert len(ends) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    parameters([name for name in SAYS if name not in TORCHRUN_ALONE], is_long=lambda name: name not in START_THEIRS),
)
def test_example(name, tmp_path):
    path = os.pathsep.join([str(Path(zbpipe.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    warnings = [word for action in ["error", *QUIET] for word in ("-W", action)]
    command = [sys.executable, *warnings, str(EXAMPLES / name), *ARGUMENTS.get(name, [])]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert SAYS[name] in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", parameters(name for name in SAYS if name not in START_THEIRS))
def test_example_as_ranks(name, tmp_path):
    """Its ranks as torchrun starts them, but for torch, which each finds imported."""
    world = ranks_of(name)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    job = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world),
    }
    ranks = [
        {
            "argv": [str(EXAMPLES / name)],
            "output": [str(tmp_path / f"output.{rank}")] * 2,
            "variables": {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {},
        }
        for rank in range(world)
    ]
    warnings = "default" if name in WARNS else ",".join(["error", *QUIET])
    statuses = forks(PYTHONWARNINGS=warnings).run(ranks, timeout=300)
    said = "".join(output.read_text() for output in sorted(tmp_path.glob("output.*")))
    assert statuses == [0] * world, said
    assert SAYS[name] in said
