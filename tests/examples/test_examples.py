"""Each script in examples/ runs, and says that its results are right."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zbpipe

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "compile_split.py": "gradients of 2 steps equal those of the model in one piece",
    "cuda_graph.py": "gradients of 3 steps equal" if torch.cuda.is_available() else "no GPU here",
    "custom_linear.py": "gradients of 3 steps equal those of ordinary backwards, bit for bit",
    "explain.py": "the FLOPs and bytes are those of a real step",
    "ddp.py": "gradients of 2 steps equal those of the model in one piece",
    "fsdp2.py": "gradients of 2 steps equal those of the model in one piece, to bfloat16's precision",
    "tensor_parallel.py": "gradients of 2 steps equal those of the model in one piece",
    "csv_schedule.py": "gradients of 2 steps equal those of the model in one piece",
    "huggingface.py": "losses of 5 steps equal those of the model in one piece",
    "mixed_precision.py": "weights after 3 steps equal those of the model in one piece",
}
# Two stages of one rank are neighbours, where torch 2.11's schedules open a connection that gloo refuses.
OLDER = torch.__version__ < (2, 12)
OF_A_V = {
    "compile_split.py",
    "ddp.py",
    "tensor_parallel.py",
    "csv_schedule.py",
    "huggingface.py",
    "mixed_precision.py",
}
NEEDS = {"huggingface.py": "transformers"}
# inductor imports what torch itself deprecates, which these runs make an error
ARGUMENTS = {"compile_split.py": ["aot_eager"]}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAYS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_example(name, tmp_path):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    if OLDER and name in OF_A_V:
        pytest.skip("torch 2.11 runs no V over gloo")
    path = os.pathsep.join([str(Path(zbpipe.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    # Older profilers warn once of any use: "Warning: Profiler clears ...".
    quiet = ["-W", "ignore:Warning"] if torch.__version__ < (2, 13) else []
    warnings = ["-W", "error", *quiet]
    command = [sys.executable, *warnings, str(EXAMPLES / name), *ARGUMENTS.get(name, [])]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert SAYS[name] in ran.stdout
