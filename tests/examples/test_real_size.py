"""benchmarks/real_size.py with tiny blocks, what its results become in the pages, and parts of tools/gpu.py."""

import importlib.util
import json
import sys

import pytest
import torch
from support.pages import ROOT, copy_of_pages
from support.processes import python

POLICIES = ("keep", "recompute", "input_pass")
SIDES = {
    "dense": ("unsplit", "torch", "zbpipe", "zbpipe, fused"),
    "checkpointed": ("unsplit", "torch", *POLICIES),
    "main_grad": ("unsplit", "zbpipe", "zbpipe, fused"),
    "experts": ("unsplit", "torch", "zbpipe"),
    "compiled": ("unsplit", "torch", "zbpipe"),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "figures.json"
    kinds = [*SIDES, *(["steps"] if torch.__version__ >= (2, 12) else []), "flex"]
    done = python(ROOT / "benchmarks" / "real_size.py", "--small", "--only", *kinds, "--json", path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "flex: not run: FlexAttention has no backward on a CPU" in done.stdout
    return json.loads(path.read_text())


@pytest.mark.parametrize("kind", SIDES)
def test_each_side_is_right_and_measured(kind, measured):
    for case, sides in measured["figures"][kind].items():
        assert tuple(sides) == SIDES[kind], case
        for side, of in sides.items():
            if kind == "compiled" and side == "torch":
                assert of["error"].startswith("RuntimeError: ")
                continue
            assert of["differs"] < 1e-5 and of.get("inexact", 0) < 1e-5, (case, side)
            assert all(ms["median"] > 0 for ms in of["ms"].values()) and of["ratio"]["median"] > 0
            assert of["peak"] > 0 and (of["held"] > 0) == (side != "unsplit")


def test_peaks_are_those_that_each_policy_promises(measured):
    (sides,) = measured["figures"]["checkpointed"].values()
    assert sides["unsplit"]["peak"] < min(sides[policy]["peak"] for policy in POLICIES)
    assert max(sides[policy]["peak"] for policy in POLICIES) < sides["torch"]["peak"]


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 runs no schedule on one rank over gloo")
def test_whole_steps(measured):
    found = measured["figures"]["steps"]
    assert found.keys() == {"plain", "checkpointed"}
    names = ["interleaved 1F1B", "ZBV, torch", "ZBV, keep"]
    assert list(found["plain"]) == names
    assert list(found["checkpointed"]) == [*names, "ZBV, recompute", "ZBV, input_pass"]
    assert all(of["peak"] > 0 and of["step_ms"]["median"] > 0 for sides in found.values() for of in sides.values())


def test_results_become_rows_of_the_pages(measured, tmp_path):
    project = copy_of_pages(tmp_path)
    results, made = project / "benchmarks" / "results", project / "benchmarks" / "tables.py"
    of_gpu = {
        "device": "GPU of a test",
        "torch": "2.13.0",
        "driver": "1.2",
        "date": "2099-01-01",
        "status": "",
        "parts": {"real size": {"date": "2099-01-01"}},
    }
    (results / "gpu-test.json").write_text(json.dumps({**of_gpu, "figures": {"real_size": measured["figures"]}}))
    assert python(made).returncode == 0
    numbers, readme = ((project / page).read_text() for page in ("docs/numbers.md", "README.md"))
    assert "GPU of a test, torch 2.13.0, driver 1.2, 2099-01-01:" in numbers
    ratio = measured["figures"]["checkpointed"]["32 tokens"]["keep"]["ratio"]["median"]
    assert f"|  | keep | {ratio:.2f}x | " in numbers or ratio >= 2
    assert "| compiled, torch.compile | unsplit |" in numbers and "|  | torch | raises |" in numbers
    assert "| blocks of Llama 3 8B's size, 32 tokens (GPU of a test, torch 2.13.0): time of I + W" in readme
    assert python(made, "--check").returncode == 0


# tools/gpu.py.


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "tools" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "build")
    module.FOLDER.mkdir()
    return module


WRITES = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
(folder / "a.json").write_text(json.dumps({"benchmark": "NAME", "figures": {"made": 1}}))
print("so far", flush=True)
time.sleep(SECONDS)
"""


def test_a_part_that_is_cut_off_leaves_its_own_and_the_others_results(gpu, tmp_path):
    quick, slow = tmp_path / "quick.py", tmp_path / "slow.py"
    quick.write_text(WRITES.replace("NAME", "host_time_of_a_test").replace("SECONDS", "0"))
    slow.write_text(WRITES.replace("NAME", "real_size").replace("SECONDS", "600"))
    first = gpu.Run("cpu", tmp_path, jobs=1, minutes=9)
    first.measure("whole steps", quick)
    assert first.parts["whole steps"]["ok"]
    second = gpu.Run("cpu", tmp_path, jobs=1, minutes=0.4, only=["real size"])  # 11 seconds of its 240
    assert second.names == ["build", "real size"]
    second.measure("real size", slow)
    made = json.loads(second.path.read_text())
    assert made["figures"] == {"host_time_of_a_test": {"made": 1}, "real_size": {"made": 1}}
    assert made["parts"]["whole steps"]["ok"]
    assert (made["parts"]["real size"]["ok"], made["parts"]["real size"]["error"]) == (False, "out of time")
    assert made["status"].endswith("not well: real size")


def test_no_part_takes_more_than_eight_minutes_and_all_are_run(gpu):
    assert max(gpu.PARTS.values()) <= 8 * 60
    assert [*gpu.IN_NINE_MINUTES, "real size"] == list(gpu.PARTS)


def test_a_part_that_is_not_there_is_refused():
    done = python(ROOT / "tools" / "gpu.py", "--device", "cpu", "--only", "real_sizes")
    assert done.returncode == 2
    assert "invalid choice: 'real_sizes'" in done.stderr
