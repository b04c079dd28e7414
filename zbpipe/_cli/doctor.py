"""Say which zbpipe and which torch are installed here. Say also whether zbpipe
knows this torch, its graphs and its private parts that zbpipe uses, what
ZBPIPE_PATCH=1 would do here, what is patched, and the policy. The exit status
is 1 if something would not work, also where zbpipe cannot be imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from zbpipe import _build, _native, get_policy, is_patched
from zbpipe._first_aid import find_numpy, line
from zbpipe._patch.env import OFF, ON, RELEASE_OUTPUTS
from zbpipe._stage import self_check
from zbpipe._torch import needs, probe
from zbpipe._version import __version__

# Run in a fresh interpreter with ZBPIPE_PATCH=1, as a script that knows nothing of zbpipe.
SCRIPT = """
import torch.distributed.pipelining.stage as stage
print("ZBPIPE", stage.stage_backward.__module__.startswith("zbpipe."))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all",
        action="store_true",
        help="print every part of torch that was looked at, not only those that differ; look also at the compilers, "
        "whose import takes seconds",
    )
    parser.set_defaults(run=lambda given: run(everything=given.all))


def version() -> str:
    """One line: zbpipe's version, what it was built with and what runs."""
    built = f"zbpipe {__version__} (built with torch {_build.torch})"
    return f"{built}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def run(everything: bool = False) -> int:
    """Print the report; `everything`: also what is as it should be. Return the exit status."""
    faults: list[str] = []
    notes: list[str] = []
    line("zbpipe", f"{__version__}, {Path(__file__).parents[1]}")
    line("built with", f"{_build}, {_native.PYTHON}")
    line("Python", f"{sys.version.split()[0]}, {sys.executable}")
    line("machine", platform.machine())
    line("torch", f"{torch.__version__}, {torch_is(notes)}, {Path(torch.__file__).parent}")
    line("numpy", find_numpy(faults))
    line("CUDA", f"{torch.version.cuda}, {torch.cuda.device_count()} devices" if torch.version.cuda else "none")
    try:
        line("private parts", private_parts(everything, faults, notes))
    except (ImportError, RuntimeError) as error:  # the hook raises where ZBPIPE_PATCH is neither on nor off
        line("private parts", "not looked at")
        faults.append(f"torch.distributed.pipelining cannot be imported: {error}")
    differences = self_check.report()
    line("graphs", "differ from what zbpipe knows" if differences else "as zbpipe knows them")
    faults += differences
    for name in ("ZBPIPE_PATCH", RELEASE_OUTPUTS, "ZBPIPE_POLICY"):
        value = os.environ.get(name)
        line(name, "not set" if value is None else repr(value))
        if name != "ZBPIPE_POLICY" and (value or "").strip().lower() not in (*ON, *OFF):
            faults.append(f"{name} is {value!r}: set it to 1 or to 0")
    if importlib.util.find_spec("_zbpipe_hook"):
        unread = importlib.import_module("_zbpipe_hook").misspelled()
        faults += [f"{name}: zbpipe reads no such variable, so it has no effect" for name in unread]
    line("ZBPIPE_PATCH=1", would_patch(faults))
    line("patched now", "yes" if is_patched() else "no")
    line("policy", str(get_policy()))
    for note in notes:
        print(f"note: {note}")
    for fault in faults:
        print(f"FAULT: {fault}")
    print("something would not work" if faults else "all is well")
    return 1 if faults else 0


def torch_is(notes: list[str]) -> str:
    """Whether the tests have run on this torch; a note says on which they have, if not."""
    if torch.__version__.partition("+")[0] in needs.TESTED:  # built for the CPU or for a GPU
        return "tested"
    ran = f"they have on {', '.join(needs.TESTED)}"
    release = probe.release_of(torch.__version__)
    if release is not None and needs.OLDEST <= release <= needs.NEWEST:
        notes.append(f"zbpipe's tests have not run on torch {torch.__version__}; {ran}")
        return "known, not run"
    age = "older" if release is not None and release < needs.OLDEST else "newer"
    notes.append(
        f"torch {torch.__version__} is {age} than those that zbpipe knows; its tests have not run on it; {ran}"
    )
    return "not known"


def private_parts(everything: bool, faults: list[str], notes: list[str]) -> str:
    """What the probe finds, as the rest of a line. Differences are faults, or notes where memory alone suffers."""
    left_out = [] if everything else probe.unread()
    rows = probe.report(left_out)
    different = [row for row in rows if not row.ok]
    for row in rows if everything else different:
        mark = "ok" if row.ok else "DIFFERS"
        print(f"  {mark:<8}{row.name}: {row.expected}; {row.found} ({row.need.name}, torch {row.releases})")
    for row in different:
        said = notes if row.need.weight is needs.Weight.MEMORY else faults
        said.append(f"{row.name} {row.found}; {row.need.weight.value}: {row.need.consequence}")
    result = f"{len(rows)} looked at, {len(different)} differ" if different else f"{len(rows)} looked at, all known"
    names = ", ".join(need.name for need in left_out)
    return f"{result}; not those of {names}, which --all imports" if left_out else result


def would_patch(faults: list[str]) -> str:
    """What ZBPIPE_PATCH=1 does to a script in this environment, found out by running one."""
    flags = sys.flags
    switches = {"-I": flags.isolated, "-E": flags.ignore_environment, "-S": flags.no_site, "-s": flags.no_user_site}
    command = [sys.executable, *(switch for switch, is_on in switches.items() if is_on), "-c", SCRIPT]
    environment = {**os.environ, "ZBPIPE_PATCH": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = [words.split()[1] for words in ran.stdout.splitlines() if words.startswith("ZBPIPE ")]
    if said and said[-1] == "True":
        return "yes, when torch is imported"
    loads = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if said and loads != "1":
        reason = f"torch did not load it: TORCH_DEVICE_BACKEND_AUTOLOAD={loads} is set"
    elif said:
        reason = "zbpipe was found on sys.path but never installed, so torch knows no hook; install it with pip"
    else:
        reason = (ran.stderr.strip() or "it ended without a word").splitlines()[-1]
    faults.append(f"ZBPIPE_PATCH=1 would not patch a script here ({reason}); zbpipe.patch() in the script does")
    return "no"
