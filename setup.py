"""Builds zbpipe._C: C core, C++ shim, C bindings, linked against the torch that is installed.

Environment: ZBPIPE_WERROR=1 makes warnings errors; ZBPIPE_SANITIZE=address,undefined builds for the sanitizers, with
asserts; ZBPIPE_DEBUG=1 builds with asserts and debug information; ZBPIPE_UNITS=n compiles the shim in n pieces, 0 each
file alone. In place, where one file is changed at a time, the pieces are smaller and libtorch's headers are read once
for all: a whole build takes longer and half a gigabyte of disk, the next one after a change is shorter.
"""

import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))
os.chdir(ROOT)

COMPILES = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}
WERROR = os.environ.get("ZBPIPE_WERROR") == "1"
SANITIZE = os.environ.get("ZBPIPE_SANITIZE", "")
DEBUG = bool(SANITIZE) or os.environ.get("ZBPIPE_DEBUG") == "1"
KIND = SANITIZE.replace(",", "-") or ("debug" if DEBUG else "release")

IN_PLACE = "--inplace" in sys.argv
# The shim's files are compiled some at a time: each alone would read libtorch's headers for most of its time.
UNITS = int(os.environ.get("ZBPIPE_UNITS", "0" if DEBUG else "24" if IN_PLACE else "2"))
# Those headers, which in place are read once for all units.
LIBTORCH = """\
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
"""
# gcc warns of types in an included file that have parts from an unnamed namespace: elsewhere they might be others.
ONE_FILE = '#ifndef __clang__\n#pragma GCC diagnostic ignored "-Wsubobject-linkage"\n#endif\n'

C_FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Wshadow"]
CXX_FLAGS = ["-Wall", "-Wextra"]
# Every compiler that can build this torch has them; a C library that knows no third level takes it for the second. The
# sanitizers look where the second flag does, and closer.
HARDENED = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3"]
HARDENED_LINK = ["-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"]
# Templates of libtorch and the C++ library are visible whatever the compiler is told.
EXPORTS = "{ global: PyInit__C; local: *; };\n"


def sources(pattern):
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").glob(pattern))


def is_older(made, sources):
    return not os.path.exists(made) or os.path.getmtime(made) <= max(map(os.path.getmtime, sources))


def write(path, text):
    """Write `text` to a file, only if that changes it: what is newer than its object is compiled again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def units(directory):
    """Write files that include those of the shim, a share each, to `directory`, and return their names."""
    files = sources("**/*.cpp")
    if UNITS == 0:
        return files
    names = []
    for number in range(min(UNITS, len(files))):
        share = files[number::UNITS]
        text = ONE_FILE + "".join(f'#include "{Path(name).relative_to("csrc").as_posix()}"\n' for name in share)
        unit = directory / f"shim_{number}.cpp"
        write(unit, text)
        names.append(unit.relative_to(ROOT).as_posix())
    return names


def check_compilers(python_include):
    """Raise SystemExit with one sentence if there is no C or C++ compiler, or Python's headers are not installed."""
    from distutils.ccompiler import new_compiler
    from distutils.sysconfig import customize_compiler

    compiler = new_compiler()
    customize_compiler(compiler)
    # What torch's BuildExtension takes.
    commands = {"CC": compiler.compiler_so[0], "CXX": (os.environ.get("CXX") or "c++").split()[0]}
    for variable, command in commands.items():
        if shutil.which(command) is None:
            raise SystemExit(
                f"zbpipe: there is no compiler {command!r}, and zbpipe is C and C++: install gcc and g++ (Debian: "
                f"apt-get install build-essential), or name another in {variable}, then install zbpipe again."
            )
    if not Path(python_include, "Python.h").exists():
        raise SystemExit(
            f"zbpipe: there is no Python.h in {python_include}: install the headers of this Python (Debian: apt-get "
            "install python3-dev), then install zbpipe again."
        )


def without_run_paths(command):
    """A linker's command without the places where this machine's Python looks for libraries: torch has loaded ours."""
    of_python = str(sysconfig.get_config_var("LDSHARED")).split()
    return [part for part in command if part not in of_python or not part.startswith(("-Wl,-rpath", "-Wl,-R"))]


def common_flags(names):
    """Flags for C and C++, with `names` in the place of this machine's paths."""
    flags = ["-fvisibility=hidden", *(f"-ffile-prefix-map={path}={name}" for path, name in names.items())]
    flags += ["-O1", "-g1", "-fno-omit-frame-pointer"] if DEBUG else ["-O2", "-g0", *HARDENED]
    # gcc sees uninitialized reads in torch's headers once they are instrumented; libtorch hides the type information
    # that the check of virtual tables asks for.
    flags += [f"-fsanitize={SANITIZE}", "-fno-sanitize=vptr", "-Wno-maybe-uninitialized"] if SANITIZE else []
    flags += ["-Werror"] if WERROR else []
    return flags


def extension():
    """Return the arguments of setup() that need torch: the extension module and the command that builds it."""
    from zbpipe_build import require_torch

    require_torch()
    from distutils.ccompiler import new_compiler
    from distutils.sysconfig import customize_compiler

    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

    namespace = {}
    exec((ROOT / "zbpipe" / "_version.py").read_text(), namespace)
    build_info = {
        "zbpipe_version": namespace["__version__"],
        "torch_version": str(torch.__version__),
        "torch_git_version": str(torch.version.git_version),
        "torch_cxx11_abi": bool(torch._C._GLIBCXX_USE_CXX11_ABI),
        "python_cache_tag": sys.implementation.cache_tag,
        "python_ext_suffix": sysconfig.get_config_var("EXT_SUFFIX"),
        "kind": KIND,
    }
    headers = sources("**/*.h")
    python_include = sysconfig.get_path("include")
    check_compilers(python_include)
    # Headers that are not ours are system headers: their warnings are not ours to mend.
    torch_headers = [flag for path in [*include_paths(), python_include] for flag in ("-isystem", path)]
    # Messages name the lines that they come from: those of the tree, of torch's headers and of Python's.
    flags = common_flags({ROOT: ".", Path(torch.__file__).parent: "torch", python_include: "python"})

    # One place per Python, torch and kind: what is built for one is no part of another's wheel.
    place = f"build/{sys.implementation.cache_tag}-{platform.machine()}-torch-{build_info['torch_version']}-{KIND}"

    class Build(build):
        """build, which begins without the modules of earlier builds: one that is gone would go on being installed."""

        def initialize_options(self):
            super().initialize_options()
            self.build_base = place

        def run(self):
            if Path(self.build_lib).is_relative_to(place):
                shutil.rmtree(self.build_lib, ignore_errors=True)
            super().run()

    class BuildExt(BuildExtension):
        """BuildExtension, which compiles C as C++, with the .c files compiled as C and linked as extra objects."""

        def finalize_options(self):
            super().finalize_options()
            # Kept between builds, so that a second one compiles only what changed.
            self.build_temp = str(ROOT / place / "objects")

        def build_extensions(self):
            for linker in {"linker_so", "linker_so_cxx"} & vars(self.compiler).keys():
                setattr(self.compiler, linker, without_run_paths(getattr(self.compiler, linker)))
            super().build_extensions()

        def build_extension(self, ext):
            compiler = new_compiler()
            customize_compiler(compiler)
            c_files = sources("**/*.c")
            c_objects = compiler.object_filenames(c_files, output_dir=self.build_temp)
            compiler.compile(
                [file for file, made in zip(c_files, c_objects) if is_older(made, [file, "setup.py", *headers])],
                output_dir=self.build_temp,
                include_dirs=["csrc"],
                extra_postargs=["-isystem", python_include, *C_FLAGS, *flags],
            )
            ext.extra_objects = [str(ROOT / name) for name in c_objects]
            if IN_PLACE and self.use_ninja:
                self.precompile(ext)
            super().build_extension(ext)
            info = Path(self.get_ext_fullpath(ext.name)).with_name("_build_info.py")
            info.write_text(
                '"""What zbpipe._C was built with; written by setup.py."""\n\n'
                + "".join(f"{name} = {value!r}\n" for name, value in build_info.items())
            )

        def precompile(self, ext):
            """Read libtorch's headers once for all units, with their own flags: else the compiler would not take it."""
            header = ROOT / place / "precompiled" / "libtorch.h"
            write(header, LIBTORCH)
            self.compiler.src_extensions.append(".h")
            (made,) = self.compiler.compile(
                [header.relative_to(ROOT).as_posix()],
                output_dir=str(header.parent),
                include_dirs=ext.include_dirs,
                extra_postargs=ext.extra_compile_args,
            )
            found = Path(f"{header}.gch")
            found.unlink(missing_ok=True)
            found.symlink_to(made)
            ext.extra_compile_args += ["-include", str(header)]

        def copy_extensions_to_source(self):
            super().copy_extensions_to_source()
            built = Path(self.build_lib, "zbpipe", "_build_info.py")
            self.copy_file(str(built), str(ROOT / "zbpipe" / "_build_info.py"))

    exports = ROOT / place / "exports"
    exports.parent.mkdir(parents=True, exist_ok=True)
    exports.write_text(EXPORTS)
    module = CppExtension(
        "zbpipe._C",
        units(ROOT / place / "units"),
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=[*torch_headers, *CXX_FLAGS, *flags],
        extra_link_args=[
            f"-Wl,--version-script={exports}",
            *([f"-fsanitize={SANITIZE}"] if SANITIZE else []),
            *(HARDENED_LINK if not DEBUG else []),
        ],
        depends=headers + sources("**/*.cpp"),
    )
    return {"ext_modules": [module], "cmdclass": {"build": Build, "build_ext": BuildExt}}


# Nowhere in the tree: with a zbpipe.egg-info beside it, Python would take the tree for an installed zbpipe.
Path("build").mkdir(exist_ok=True)
EGG_INFO = {"egg_info": {"egg_base": "build"}}

setup(options=EGG_INFO, **(extension() if COMPILES & set(sys.argv) else {}))
