"""python -m zbpipe: its help and version, and the doctor, beside torch as it is and with faults planted."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.processes import python
from torch.distributed.pipelining import _backward, schedules

import zbpipe
from zbpipe import _build, _first_aid  # what the version says; what runs before zbpipe can be imported
from zbpipe._cli import main
from zbpipe._cli.doctor import would_patch  # what the script that it starts says is planted
from zbpipe._torch import needs, probe  # the releases that doctor knows

ROOT = Path(__file__).parents[2]

# What the probe imports of torch deprecates parts of torch itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("ZBPIPE_PATCH", "ZBPIPE_RELEASE_OUTPUTS", "ZBPIPE_POLICY", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def doctor(capsys, monkeypatch):
    """Runs the doctor in this process, without the script that it starts; returns its status and its lines."""
    monkeypatch.setattr("zbpipe._cli.doctor.would_patch", lambda faults: "not asked")

    def doctor(*arguments):
        status = main(["doctor", *arguments])
        return status, capsys.readouterr().out.splitlines()

    return doctor


def test_without_a_command_it_says_what_there_is(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: python -m zbpipe")
    assert "doctor" in said
    assert "leaks" in said


@pytest.mark.parametrize("command", ["", "doctor", "explain", "leaks"])
def test_help_fits_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*filter(None, [command]), "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_version_is_one_line_in_a_narrow_window_too(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    python = ".".join(map(str, sys.version_info[:3]))
    assert capsys.readouterr().out == (
        f"zbpipe {zbpipe.__version__} (built with torch {_build.torch}), torch {torch.__version__}, Python {python}\n"
    )


def test_all_is_well(doctor):
    status, lines = doctor()
    assert (status, lines[-1]) == (0, "all is well")
    assert not [line for line in lines if line.startswith(("FAULT", "  "))]
    said = dict(line.split(":", 1) for line in lines[:-1])
    assert said["torch"].strip().startswith(f"{torch.__version__}, ")
    assert said["machine"].strip() == platform.machine()
    assert " looked at, all known" in said["private parts"]
    assert said["patched now"].strip() == "no"
    with zbpipe.patch():
        _, lines = doctor()
    assert "patched now:            yes" in lines


def test_a_function_of_torch_that_takes_something_else_is_a_fault(doctor, monkeypatch):
    monkeypatch.setattr(_backward, "stage_backward_weight", lambda weights, groups: None)
    status, lines = doctor()
    assert (status, lines[-1]) == (1, "something would not work")
    (fault,) = [line for line in lines if line.startswith("FAULT")]
    assert "_backward.stage_backward_weight takes (weights, groups) where zbpipe knows (weights, param_groups" in fault


def test_what_only_memory_depends_on_is_a_note(doctor, monkeypatch):
    monkeypatch.setattr(schedules, "_check_torch_compile_compatibility", lambda: None)
    status, lines = doctor()
    assert (status, lines[-1]) == (0, "all is well")
    (note,) = [line for line in lines if line.startswith("note")]
    assert "_check_torch_compile_compatibility takes ()" in note


@pytest.mark.parametrize(
    ("version", "said", "noted"),
    [
        ("2.13.0", "tested", None),
        ("2.13.0+cu130", "tested", None),
        ("2.15.0+cpu", "tested", None),
        ("2.13.1", "known, not run", "zbpipe's tests have not run on torch 2.13.1; they have on 2.1"),
        ("2.15.0.dev20260801", "known, not run", "zbpipe's tests have not run on torch 2.15.0.dev20260801; "),
        ("3.0.0", "not known", "torch 3.0.0 is newer than those that zbpipe knows; "),
        ("2.10.0", "not known", "torch 2.10.0 is older than those that zbpipe knows; "),
    ],
)
def test_a_torch_is_tested_only_if_the_tests_have_run_on_it(doctor, monkeypatch, version, said, noted):
    monkeypatch.setattr(torch, "__version__", version)
    status, lines = doctor()
    assert status == 0
    (line,) = [line for line in lines if line.startswith("torch:")]
    assert line.split(":", 1)[1].strip().startswith(f"{version}, {said}, ")
    notes = [line for line in lines if line.startswith("note: ")]
    assert [note.startswith(f"note: {noted}") for note in notes] == [True] * (noted is not None)


def test_the_newest_torch_is_the_same_wherever_it_is_said():
    (newest,) = (
        line.removeprefix("torch==")
        for line in (ROOT / "requirements" / "newest.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    releases = [probe.release_of(version) for version in needs.TESTED]
    assert newest == needs.TESTED[-1]
    assert releases == sorted(set(releases))
    assert releases[-1] == needs.NEWEST
    assert releases[0] == needs.OLDEST


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True])
def test_compilers_are_imported_only_when_asked_for(everything):
    arguments = ["doctor", "--all"] if everything else ["doctor"]
    code = (
        "import sys\nfrom zbpipe._cli import doctor\nfrom zbpipe._cli import main\n"
        f"doctor.would_patch = lambda faults: 'not asked'\nstatus = main({arguments})\n"
        "print('imported:', 'torch._inductor.compile_fx' in sys.modules)\nsys.exit(status)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"imported: {everything}" in done.stdout
    assert ("; not those of compilers, which --all imports" in done.stdout) is not everything
    assert ("  ok      torch._inductor.compile_fx.compile_fx: callable" in done.stdout) is everything


@pytest.mark.parametrize("name", ["ZBPIPE_PATCH", "ZBPIPE_RELEASE_OUTPUTS"])
def test_a_variable_that_is_neither_on_nor_off_is_a_fault(doctor, monkeypatch, name):
    monkeypatch.setenv(name, "maybe")
    status, lines = doctor()
    assert status == 1
    assert f"FAULT: {name} is 'maybe': set it to 1 or to 0" in lines


@pytest.mark.slow
def test_whether_the_variable_patches_is_found_out_by_running_a_script():
    done = python("-m", "zbpipe", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "yes, when torch is imported" in done.stdout


@pytest.mark.parametrize(("loads", "reason"), [(None, "never installed"), ("0", "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is")])
def test_why_the_variable_would_not_patch(monkeypatch, loads, reason):
    """Also where the hook can be imported, from a tree on PYTHONPATH: torch finds it by what pip has noted."""
    if loads:
        monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", loads)
    ran = subprocess.CompletedProcess([], 0, stdout="ZBPIPE False\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ran)
    faults = []
    assert would_patch(faults) == "no"
    assert reason in faults[0]


def test_a_command_imports_none_of_what_the_others_need():
    code = "import sys, zbpipe._cli; print({'torch.distributed.pipelining', 'torch._dynamo', 'matplotlib'} & set(sys.modules))"
    assert python("-c", code).stdout == "set()\n"


PACKAGE = Path(zbpipe.__file__).parent
NO_NUMPY = "import sys\nsys.modules['numpy'] = None\n"


def place(folder, *, built=True, torch_is=None, at_start="", git=None):
    """A folder for PYTHONPATH with this package, and what is said of torch, at Python's start and of torch's revision."""
    if built and git is None:
        (folder / "zbpipe").symlink_to(PACKAGE)
    else:
        unbuilt = () if built else ("torch_*_*",)
        shutil.copytree(PACKAGE, folder / "zbpipe", ignore=shutil.ignore_patterns("__pycache__", *unbuilt))
    for described in folder.glob("zbpipe/_native/torch_*_*/*.json") if git else ():
        described.write_text(json.dumps({**json.loads(described.read_text()), "git": git}))
    if torch_is is not None:
        (folder / "torch.py").write_text(torch_is)
    (folder / "sitecustomize.py").write_text(at_start)
    shutil.copytree(ROOT / "_zbpipe_hook", folder / "_zbpipe_hook")  # which torch's entry point names
    return folder


def rows_of_the_page():
    """What the first table of docs/troubleshooting.md says is printed, as patterns."""
    table = (ROOT / "docs" / "troubleshooting.md").read_text().split("\n\n")[2]
    said = [line.split("`")[1] for line in table.splitlines()[2:]]
    return [re.escape(text).replace(re.escape("..."), ".*") for text in said]


ROWS = rows_of_the_page()
NEWER = "import types\n__version__ = '9.9.9'\nversion = types.SimpleNamespace(git_version='abc')\n"
# State: how zbpipe and torch are there, Python's switches, the environment, the row of the page, and what is said besides.
STATES = {
    "another torch": ({"torch_is": NEWER}, ["-S"], {}, 0, "torch 9.9.9 and cpython-.* in .*torch 2.* there.: build it"),
    "never built": ({"built": False}, ["-S"], {"sees": "torch"}, 0, "none there.: build it"),
    "another revision of torch": ({"git": "abcdef"}, ["-S"], {"sees": "torch"}, 1, r"\(git abcdef\), and this .*: build it"),
    "no torch": ({}, ["-S"], {}, 2, ": pip install 'torch>=2.11', then "),
    "a torch that does not load": ({"torch_is": "raise OSError('libcudart.so.13: no such file')"}, ["-S"], {}, 3, "libcudart"),
    "no numpy": ({"at_start": NO_NUMPY}, [], {}, 4, "and torch's schedules send .*: pip install numpy"),
    "a bad policy": ({}, [], {"ZBPIPE_POLICY": "defer=never"}, 5, "is 'defer=never': defer is 'never'"),
    "a policy of one word": ({}, [], {"ZBPIPE_POLICY": "all"}, 5, "says 'all'"),
    "neither on nor off": ({}, [], {"ZBPIPE_PATCH": "maybe"}, 6, "'maybe'"),
    "no autoload": ({}, [], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, 7, "AUTOLOAD=0.*; zbpipe.patch.. in the script does"),
    "a misspelled variable": ({}, [], {"ZBPIPE_POLCY": "defer=all"}, 8, r"ZBPIPE_POLCY \(ZBPIPE_POLICY\?\): "),
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_what_the_page_says_first_the_doctor_finds(tmp_path, state):
    way, switches, environment, row, besides = STATES[state]
    path = [str(place(tmp_path, **way))]
    if environment.get("sees"):  # what is installed, but for what its .pth files lead to: an editable zbpipe
        path.append(str(Path(torch.__file__).parents[1]))
    environment = {"PYTHONPATH": os.pathsep.join(path), **environment}
    done = python(*switches, "-m", "zbpipe", "doctor", cwd=tmp_path, **environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "something would not work"
    faults = [line for line in lines if line.startswith("FAULT: ")]
    assert any(re.search(ROWS[row], fault) and re.search(besides, fault) for fault in faults), faults
    assert [line.split(":")[0] for line in lines][:1] == ["zbpipe"]
    assert {"Python", "machine", "torch", "numpy"} <= {line.split(":")[0] for line in lines}


def test_no_row_of_the_page_is_left_out():
    assert {row for _, _, _, row, _ in STATES.values()} == set(range(len(ROWS)))


def test_only_the_doctor_is_served_so(tmp_path):
    environment = {"PYTHONPATH": str(place(tmp_path)), "ZBPIPE_POLICY": "defer=never"}
    for arguments in (["-m", "zbpipe", "leaks"], ["-c", "import zbpipe", "doctor"]):
        done = python(*arguments, cwd=tmp_path, **environment)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("Traceback") and "ValueError: ZBPIPE_POLICY is" in done.stderr


@pytest.mark.parametrize(
    ("program", "arguments", "asked"),
    [
        (["-m", "zbpipe", "doctor"], ["-m", "doctor"], True),
        (["-mzbpipe", "doctor", "--all"], ["-m", "doctor", "--all"], True),
        (["/bin/zbpipe", "doctor"], ["/bin/zbpipe", "doctor"], True),
        (["zbpipe.exe", "doctor"], ["zbpipe.exe", "doctor"], True),
        (["-m", "zbpipe", "leaks", "doctor"], ["-m", "leaks", "doctor"], False),
        (["-m", "other", "doctor"], ["-m", "doctor"], False),
        (["train.py", "doctor"], ["train.py", "doctor"], False),
        (["-c", "import zbpipe"], [], False),
    ],
)
def test_the_doctor_is_known_by_the_command_line(monkeypatch, program, arguments, asked):
    monkeypatch.setattr(sys, "orig_argv", ["python", *program])
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    _first_aid.watch_import()
    assert (sys.excepthook is not sys.__excepthook__) == asked
    _first_aid.import_is_done()
    assert sys.excepthook is sys.__excepthook__


@pytest.mark.parametrize("is_tree", [True, False])
def test_what_is_to_be_done_can_be_done_where_zbpipe_is(tmp_path, is_tree):
    place(tmp_path, built=False)
    if is_tree:
        (tmp_path / "setup.py").touch()
    path = os.pathsep.join([str(tmp_path), str(Path(torch.__file__).parents[1])])
    done = python("-S", "-c", "import zbpipe", cwd=tmp_path, PYTHONPATH=path)
    last = done.stderr.splitlines()[-1]
    if is_tree:
        assert last.endswith(
            f"in {tmp_path}, run `pip install --no-build-isolation --no-deps --force-reinstall --editable .`; or run Python "
            "elsewhere, if zbpipe is installed too."
        )
    else:
        assert last.endswith(
            f"in the sources of zbpipe {zbpipe.__version__}, run `pip install --no-build-isolation --no-deps --force-reinstall "
            ".`, or `make wheels` for a wheel with a library for each tested torch."
        )
