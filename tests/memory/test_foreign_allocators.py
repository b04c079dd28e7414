"""Recordings where the CPU allocator is somebody else's: installed before, during, around. Each program is a process of
its own, for allocators stay installed for good."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support.processes import python
from torch.utils.cpp_extension import include_paths

COMPILER = shutil.which(os.environ.get("CXX", "c++"))

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

PRELUDE = """
import ctypes, pytest, sys, torch
from zbpipe import memory
torch.set_num_threads(1)
foreign = ctypes.CDLL(sys.argv[1])
foreign.foreign_raw_allocate.restype = foreign.foreign_installed.restype = ctypes.c_void_p
foreign.foreign_raw_deallocate.argtypes = [ctypes.c_void_p]
CONTEXT, RAW, SECOND_RAW, CHAIN = range(4)
"""
PROGRAMS = {
    "there before": """
for kind, clones in ((CONTEXT, 0), (RAW, 1)):
    foreign.foreign_install(kind)
    before = foreign.foreign_installed()
    with memory.record() as rec:
        during, kept = foreign.foreign_installed(), foreign.foreign_live()  # zbpipe keeps one empty tensor in a process
        with memory.record():
            assert foreign.foreign_installed() == during != before
        assert foreign.foreign_installed() == during
        a = torch.ones(10)
        assert (rec.live, foreign.foreign_live()) == (40, kept + 1)
        b = torch.ones(5)
        c = b[1:].clone()
        del b, c
        a.resize_(20)
        assert rec.live == 80
        assert foreign.foreign_clones() == clones, "a context of ours is not simple"
    assert foreign.foreign_installed() == before
    assert foreign.foreign_live() == kept + 1
    assert float(a[:10].sum()) == 10
    a.resize_(30)
    del a
    assert foreign.foreign_live() == kept <= 1
""",
    "one that comes while we record": """
rec = memory.record()
rec.__enter__()
a = torch.empty(10)
foreign.foreign_install(RAW)
theirs = foreign.foreign_installed()
b = torch.empty(20)  # goes past us
with pytest.warns(RuntimeWarning, match="another CPU allocator"):
    rec.__exit__(None, None, None)
assert rec.allocated == 40
with memory.record() as again:
    c = torch.empty(30)
    del a, b
assert again.allocated == 120 and [event.bytes for event in again.events() if event.older] == [-40]
assert foreign.foreign_installed() == theirs, "theirs stays"
del c
assert foreign.foreign_live() == 0
""",
    "a chain over ours is seen once": """
rec = memory.record()
rec.__enter__()
foreign.foreign_install(CHAIN)
a = torch.empty(10)
assert rec.allocated == 40
with pytest.warns(RuntimeWarning):
    rec.__exit__(None, None, None)
with memory.record() as again:  # ours over theirs over ours
    b = torch.empty(20)
    del a
assert (again.allocated, again.live, again.allocations) == (80, 80, 1)
foreign.foreign_restore()
c = torch.empty(10)  # through ours, which is at rest
with memory.record() as last:
    d = torch.empty(30)
    del c
assert last.allocated == 120 and len([*last.events()]) == 1
""",
    "raw blocks": """
with memory.record() as rec:
    a, b = foreign.foreign_raw_allocate(100), foreign.foreign_raw_allocate(50)
    assert rec.live == 150
    foreign.foreign_raw_deallocate(a)
    assert rec.live == 50
foreign.foreign_raw_deallocate(b)  # past us: we are out again
with memory.record() as rec:
    for size in (50, 100, 50):  # their addresses are given out again
        foreign.foreign_raw_deallocate(foreign.foreign_raw_allocate(size))
    assert rec.live == 0
    assert foreign.foreign_clones() == 1
assert rec.allocated == 232
""",
    "too many are refused": """
before = foreign.foreign_installed()
for kind in (RAW, CONTEXT, CHAIN):  # and ours over each of them
    with memory.record() as rec:
        torch.empty(1)
    assert rec.allocated == 4 and foreign.foreign_installed() == before
    foreign.foreign_install(kind)
    before = foreign.foreign_installed()
with memory.record():
    pass
foreign.foreign_install(SECOND_RAW)
with pytest.raises(RuntimeError, match="replaced 4 times"):
    memory.record().__enter__()
""",
    "a priority forbids it": """
foreign.foreign_set_priority(5)
with pytest.raises(RuntimeError, match="priority"):
    memory.record().__enter__()
torch.empty(3)
""",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("foreign") / "foreign.so"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    options = ["-std=c++20", "-shared", "-fPIC", "-O1", abi, *(f"-I{folder}" for folder in include_paths())]
    source, lib = Path(__file__).with_name("foreign_allocator.cpp"), Path(torch.__file__).parent / "lib"
    # make asan preloads a sanitizer, which would find the compiler's own leaks.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run([COMPILER, *options, source, f"-L{lib}", "-lc10", "-o", path], check=True, env=env)
    return path


@pytest.mark.parametrize("program", PROGRAMS)
def test_beside_a_foreign_allocator(library, program):
    done = python("-W", "error", "-c", PRELUDE + PROGRAMS[program], library)
    assert done.returncode == 0, done.stderr
