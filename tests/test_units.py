"""Every file of csrc/ as a translation unit of its own: the wheel's build includes several in one."""

import os
import shlex
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.layers import circle, symbols_of

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
COMPILERS = {".c": ("CC", "cc", "-std=c11"), ".cpp": ("CXX", "c++", "-std=c++20")}


def compile_alone(source, made):
    from torch.utils.cpp_extension import include_paths

    variable, usual, standard = COMPILERS[source.suffix]
    headers = [flag for path in (*include_paths(), sysconfig.get_path("include")) for flag in ("-isystem", path)]
    command = [*shlex.split(os.environ.get(variable, usual)), standard, "-fPIC", "-O0", "-Wall", "-Wextra", "-Werror"]
    done = subprocess.run([*command, f"-I{CSRC}", *headers, "-c", source, "-o", made], capture_output=True, text=True)
    return done.stderr if done.returncode else ""


@pytest.mark.long
def test_each_file_compiles_alone_and_their_objects_have_no_circle(tmp_path):
    sources = sorted(path for path in CSRC.rglob("*") if path.suffix in COMPILERS)
    names = {source: source.relative_to(CSRC).as_posix() for source in sources}
    objects = {names[source]: tmp_path / f"{number}.o" for number, source in enumerate(sources)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = dict(
            zip(names.values(), pool.map(lambda source: compile_alone(source, objects[names[source]]), sources))
        )
    assert {name: text for name, text in said.items() if text} == {}
    edges = symbols_of(objects)
    assert "shim/weight/run.cpp" in edges["pass/weight_pass.c"], "the detector sees nothing"
    assert len(edges) > 60
    assert circle(edges) == []
    assert not {file for file, of in edges.items() if file.startswith("core/") and any("core/" not in o for o in of)}
    folders = {}
    for file, of in edges.items():
        if file.endswith(".c"):
            folder = file.rpartition("/")[0]
            folders.setdefault(folder, set()).update({o.rpartition("/")[0] for o in of if o.endswith(".c")} - {folder})
    assert circle(folders) == []
