"""What the compiled part is: hardened, silent about the machine that built it, and without a way to files or code."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import elf

from zbpipe import _C  # the file that is looked at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF")
COMPILER = shutil.which(os.environ.get("CC", "cc"))
IS_EXECUTABLE = 1

# Of the C and C++ libraries and of Python: what opens files, loads and runs code, starts processes, talks to others.
WAYS_OUT = re.compile(
    r"_*(f?re?open|fopen|fdopen|open|openat|creat|dlm?open|dlsym|system|popen|posix_spawnp?|fork|vfork|exec[vl]p?e?|fexecve|"
    r"socket|connect|bind|getenv|setenv|putenv|mprotect|mmap|memfd_create|ptrace|process_vm_writev)(64)?(_2|_chk)?"
    r"|_ZN?S?t?.*basic_(if|of|f)stream.*|.*basic_filebuf.*|.*filesystem.*"
    r"|Py(Run|Eval_Eval|Marshal|Import_Exec|Sys_SetObject).*|Py_CompileString.*|PyCode_New.*"
)
# A source's name with its directory, or a directory, as the compiler puts them into messages. On aarch64 the first of
# them follows code.
ABSOLUTE = re.compile(rb"(?<![ -~])/[\w./+@-]+\.(?:c|cc|cpp|cxx|h|hpp|inc|py)(?=\0)")


def faults_of(path):
    library = elf.Library(path)
    if elf.GNU_RELRO not in library.segments:
        yield "can be written to after it was linked"
    flags, flags_1 = library.dynamic.get(elf.FLAGS, 0), library.dynamic.get(elf.FLAGS_1, 0)
    if elf.BIND_NOW not in library.dynamic and not flags & 8 and not flags_1 & 1:
        yield "looks for symbols when they are used"
    if library.segments.get(elf.GNU_STACK, IS_EXECUTABLE) & IS_EXECUTABLE:
        yield "asks for a stack that can be executed"
    if elf.TEXTREL in library.dynamic:
        yield "writes to its own code"
    if "__stack_chk_fail" not in library.imported:
        yield "does not look for overruns of the stack"
    if not any(name.endswith("_chk") for name in library.imported):
        yield "does not look for overruns of buffers"
    if library.exported != {"PyInit__C"}:
        yield "exports others' names"
    if {elf.RPATH, elf.RUNPATH} & library.dynamic.keys():
        yield "looks for libraries in a place of its own"
    if any(WAYS_OUT.fullmatch(name) for name in library.imported):
        yield "can open, load or run something"
    here = {Path(__file__).parents[2], Path(torch.__file__).parent, Path.home(), Path(sys.prefix)}
    if ABSOLUTE.search(library.data) or any(bytes(path) in library.data for path in here if len(path.parts) > 2):
        yield "names places of the machine that built it"


def test_the_extension_is_hardened():
    assert list(faults_of(_C.__file__)) == []


HARDENED = ["-O2", "-fvisibility=hidden", "-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
LINKED = ["-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"]
EXTENSION = """
#include <string.h>
#define SHOWN __attribute__((visibility("default")))
void given(char *);
SHOWN int PyInit__C(const char *from, size_t size) {
    char there[8];
    given(there);
    memcpy(there, from, size);
    return there[0];
}
"""
FAULTS = {
    "can be written to after it was linked": (["-Wl,-z,norelro"], ""),
    "looks for symbols when they are used": (["-Wl,-z,lazy"], ""),
    "asks for a stack that can be executed": (["-Wl,-z,execstack"], ""),
    "does not look for overruns of the stack": (["-fno-stack-protector"], ""),
    "does not look for overruns of buffers": (["-U_FORTIFY_SOURCE"], ""),
    "exports others' names": ([], "SHOWN int other = 1;"),
    "looks for libraries in a place of its own": (["-Wl,-rpath,/somewhere"], ""),
    "can open, load or run something": (
        [],
        "#include <stdio.h>\nvoid use(void); void use(void) { given((char *)fopen(0, 0)); }",
    ),
    "names places of the machine that built it": (
        [],
        'const char *file(void) { return "/home/somebody/build/file.h"; }',
    ),
}


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_each_fault_is_seen(fault, tmp_path):
    flags, text = FAULTS.get(fault, ([], ""))
    source, library = tmp_path / "extension.c", tmp_path / "extension.so"
    source.write_text(EXTENSION + text)
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [COMPILER, "-shared", "-fPIC", *HARDENED, *LINKED, *flags, "-w", "extension.c", "-o", str(library)]
    subprocess.run(command, check=True, cwd=tmp_path, env=env)
    assert list(faults_of(library)) == ([fault] if fault else [])
