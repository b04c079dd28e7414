"""Everything that needs a GPU: `make gpu`, or python3 tools/gpu.py, in nine minutes; `ONLY=real_size` takes four more.

It needs CUDA, a compiler, and a Python with torch, pytest, setuptools and ninja; no network, no installed zbpipe, no
NCCL. It builds zbpipe in place for the installed torch. It runs the tests that are marked cuda. It runs the tests of
the passes, the policy, kernels and compiled stages with tensors on the device. It runs schedules with all stages on one
rank. It measures host time, memory, products and whole steps; real_size, when it is named, blocks of a real model's
size. After each part it writes the results so far to benchmarks/results/gpu-*.json, with a line for README's status.
--device cpu rehearses all that with the CPU in the device's place, and writes to build/.

--only runs the named parts, and keeps what the file has of the others: a GPU may be at hand for minutes alone. A part
that runs out of time has failed, and is reported so.
"""

import argparse
import datetime
import functools
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "gpu"
NEEDED = {"torch": "", "pytest": "", "numpy": "", "setuptools": "", "ninja": " (it compiles on all cores)"}
BLOCKS = ("16", "64", "256")
SIZES = ("--blocks", "2", "--width", "1024", "--tokens", "1024"), ("--blocks", "2")  # on a GPU, on the CPU
# The seconds that a part may take, and of nine minutes those that are reserved for the parts after it.
MINUTES = 9
PARTS = {
    "build": 180,
    "marked cuda": 90,
    "with tensors on the device": 300,
    "all stages on one rank": 60,
    "host time": 90,
    "memory and products": 150,
    "whole steps": 60,
    "checkpointed steps": 80,
    "captured graph": 20,
    "real size": 240,  # where it is named
}
IN_NINE_MINUTES = [name for name in PARTS if name != "real size"]
KEPT = {"build": 300, "marked cuda": 180, "with tensors on the device": 120, "all stages on one rank": 90}
# Folders of tests/. Others start processes on the CPU (installs, commands, docs, examples, ranks over gloo), count its
# memory (leaks, memory, release), or need no device (explain, security); of those only tests marked cuda run.
# support/on_device.py lists single tests that are left out, and why.
ON_THE_DEVICE = ("passes", "policy", "kernels", "compile")
ON_ONE_RANK = ("schedules/test_losses.py", "schedules/test_leaves.py", "schedules/test_news.py")


class Run:
    """One run: its options and its results."""

    def __init__(self, device, out, jobs, minutes, only=()):
        self.device, self.jobs, self.scale, self.begin = device, jobs, minutes / MINUTES, time.monotonic()
        self.names = ["build", *(name for name in only if name != "build")] if only else IN_NINE_MINUTES
        self.env = {
            **os.environ,
            # Every part sees the tree's zbpipe, entry points and pytest plugin before installed ones.
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, FOLDER))),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # no other plugins
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # so that a check for CUDA does not break later forks
            "NVIDIA_TF32_OVERRIDE": "0",  # float32 is float32
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it a product in deterministic mode raises
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of processes beside each test process
        }
        self.env.pop("ZBPIPE_PATCH", None)
        self.made = {"benchmark": "gpu", "schema": 1, "date": datetime.date.today().isoformat(), **self.machine()}
        if tuple(map(int, self.made["torch"].split(".")[:2])) < (2, 12):  # which sends to its own rank: see there
            self.env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "torch_2_11"), self.env["PYTHONPATH"]])
        name = re.sub(r"[^\w.]+", "_", f"{self.made['device']}-{self.made['torch']}")
        self.path = (out or (ROOT / "build" if device == "cpu" else ROOT / "benchmarks/results")) / f"gpu-{name}.json"
        earlier = json.loads(self.path.read_text()) if only and self.path.exists() else {}
        self.parts = self.made["parts"] = earlier.get("parts", {})
        self.figures = self.made["figures"] = earlier.get("figures", {})
        self.made["driver"] = earlier.get("driver")

    def machine(self):
        """The machine and its torch. Raises SystemExit if something is missing."""
        for name, why in NEEDED.items():
            if importlib.util.find_spec(name) is None:
                raise SystemExit(f"tools/gpu.py: {sys.executable} has no {name}{why}: name another Python, PYTHON=...")
        code = (
            "import json, torch; d = {device!r}; cuda = d != 'cpu'\n"
            "if cuda and not torch.cuda.is_available(): raise SystemExit(f'torch {{torch.__version__}} sees no GPU')\n"
            "name = torch.cuda.get_device_name(d) if cuda else 'cpu'\n"
            "print(json.dumps(dict(device=name, torch=torch.__version__, cuda=torch.version.cuda)))"
        )
        done = subprocess.run([sys.executable, "-c", code.format(device=self.device)], env=self.env, **CAPTURED)
        if done.returncode:
            raise SystemExit(f"tools/gpu.py: {done.stdout.strip().splitlines()[-1]}; DEVICE=cpu rehearses without one")
        return {
            **json.loads(done.stdout.splitlines()[-1]),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        }

    def part(self, name, commands, cwd=ROOT, **env):
        """Runs commands in turn until one fails, with their output in a log."""
        begin = time.monotonic()
        deadline = begin + self.scale * PARTS[name]
        if self.names is IN_NINE_MINUTES:
            deadline = min(deadline, self.begin + self.scale * (60 * MINUTES - KEPT.get(name, 0)))
        log, status = FOLDER / f"{name.replace(' ', '_')}.log", 0
        print(f"== {name}", flush=True)
        with log.open("w") as file:
            for command in commands:
                status = status or run(command, file, deadline, cwd=cwd, env={**self.env, **env})
        said = log.read_text().strip().splitlines()
        seconds = round(time.monotonic() - begin, 1)
        part = self.parts[name] = {"ok": status == 0, "seconds": seconds, "date": self.made["date"]}
        if status:
            part["error"] = "out of time" if status is OUT_OF_TIME else "\n".join(said[-15:])
        print("\n".join(said[-15 if status else -1 :]), f"-- {part['seconds']} s", sep="\n", flush=True)
        return part

    def pytest(self, name, *arguments, **env):
        report = FOLDER / f"{name.replace(' ', '_')}.xml"
        report.unlink(missing_ok=True)
        options = ["-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-q", "--tb=short", "-p", "no:cacheprovider"]
        options += ["-p", "_zbpipe_hook.plugin", f"--junitxml={report}"]
        if self.jobs > 1 and importlib.util.find_spec("xdist"):
            options += ["-p", "xdist", "-n", self.jobs, "--dist", "loadfile"]
        part = self.part(name, [["-m", "pytest", *options, *arguments]], cwd=ROOT / "tests", **env)
        part |= counted(report)
        self.write()

    def measure(self, name, script, *arguments):
        folder = FOLDER / "figures"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        command = [ROOT / "benchmarks" / script, "--device", self.device, "--json", folder, *arguments]
        self.part(name, [command])
        for path in folder.iterdir():
            found = json.loads(path.read_text())
            name, figures = found["benchmark"], found["figures"]
            is_table = isinstance(figures, dict)  # of which a part that is cut off has some
            self.figures[name] = {**self.figures.get(name, {}), **figures} if is_table else figures
            self.made["driver"] = found.get("driver")
        self.write()

    def write(self):
        self.made["seconds"] = round(sum(part["seconds"] for part in self.parts.values()), 1)
        self.made["status"] = self.status()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.made, indent=1) + "\n")

    def status(self):
        """The line for README."""
        totals = {key: sum(part.get(key, 0) for part in self.parts.values()) for key in ("passed", "failed", "skipped")}
        since = min((part.get("date", self.made["date"]) for part in self.parts.values()), default=self.made["date"])
        line = f"{self.made['device']}, torch {self.made['torch']}, Python {self.made['python']}, {since}: "
        line += ", ".join(f"{count:,} {key}" for key, count in totals.items())
        if host := self.figures.get("host_time"):
            ratios = [f"{side} {host[BLOCKS[1]][side]['ratio']['median']:.2f}x" for side in ("zbpipe", "torch")]
            line += f"; host time of I + W to an unsplit backward, {BLOCKS[1]} blocks: {', '.join(ratios)}"
        not_ok = [name for name, part in self.parts.items() if not part["ok"]]
        return f"{line}; not well: {', '.join(not_ok)}" if not_ok else line


CAPTURED = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "check": False}
OUT_OF_TIME = "out of time"


def run(command, file, deadline, **options):
    """The exit status of a Python. At the deadline it is interrupted, so that pytest writes its report, then killed."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=file, stderr=subprocess.STDOUT, start_new_session=True, **options
    )
    try:
        return process.wait(max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return OUT_OF_TIME


def counted(report):
    """The numbers of tests that passed, failed and were skipped, and each failure's message."""
    found = {"passed": 0, "failed": 0, "skipped": 0, "failures": {}}
    for case in xml.parse(report).iter("testcase") if report.exists() else ():
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        key = "passed" if outcome is None else "skipped" if outcome.tag == "skipped" else "failed"
        found[key] += 1
        if key == "failed":
            name = f"{case.get('classname')}::{case.get('name')}"
            found["failures"][name] = (outcome.get("message") or "").strip()[:500]
    return found


def marked_cuda():
    """The files with tests that are marked cuda."""
    tests = ROOT / "tests"
    return sorted(str(path.relative_to(tests)) for path in tests.rglob("test_*.py") if "mark.cuda" in path.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:1, or cpu for a rehearsal")
    parser.add_argument("--out", type=Path, help="the folder for the JSON file")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all of it ({MINUTES})")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="tests at a time")
    parser.add_argument(
        "--only", nargs="+", default=[], choices=[name.replace(" ", "_") for name in PARTS], metavar="PART"
    )
    given = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    only = [name for name in PARTS if name.replace(" ", "_") in given.only]
    gpu = Run(given.device, given.out, given.jobs, given.minutes, only)
    print(f"{gpu.made['device']}, torch {gpu.made['torch']}, Python {gpu.made['python']}: results in {gpu.path}")
    setup = [ROOT / "setup.py", "--quiet"]
    whole = [[*setup, "build_ext", "--inplace"], [*setup, "egg_info", "--egg-base", FOLDER], ["-m", "zbpipe", "doctor"]]
    plugin = ("-p", "support.on_device", "-m", "not long and not system and not cuda")
    on_device = functools.partial(gpu.pytest, ZBPIPE_DEVICE=given.device)
    sizes = SIZES[given.device == "cpu"]
    runs = {  # of a part's name
        "build": lambda name: gpu.part(name, whole),
        "marked cuda": lambda name: gpu.pytest(name, "-m", "cuda and not long", *marked_cuda()),
        "with tensors on the device": lambda name: on_device(name, *plugin, *ON_THE_DEVICE),
        "all stages on one rank": lambda name: on_device(name, *plugin, *ON_ONE_RANK),
        "host time": lambda name: gpu.measure(
            name, "split.py", "--only", "host_time", "--repeat", "5", "--blocks", *BLOCKS
        ),
        "memory and products": lambda name: gpu.measure(name, "split.py", "--only", "memory", "--repeat", "5"),
        "whole steps": lambda name: gpu.measure(name, "step_overhead.py", "--ranks", "1", "--blocks", "16"),
        "checkpointed steps": lambda name: gpu.measure(name, "checkpointed.py", "--ranks", "1", *sizes),
        "captured graph": lambda name: gpu.part(name, [[ROOT / "examples" / "cuda_graph.py"]]),
        "real size": lambda name: gpu.measure(name, "real_size.py"),
    }
    for name in gpu.names:
        runs[name](name)
        if not gpu.parts["build"]["ok"]:
            break
    gpu.write()
    print(gpu.made["status"])
    return 0 if all(name in gpu.parts and gpu.parts[name]["ok"] for name in gpu.names) else 1


if __name__ == "__main__":
    sys.exit(main())
