"""Builds zbpipe._C for the installed torch, into zbpipe/_native/torch_MAJOR_MINOR/.

Environment: ZBPIPE_WERROR=1 makes warnings errors. ZBPIPE_SANITIZE=address,undefined builds for the sanitizers.
ZBPIPE_UNITS=n compiles the shim in n pieces. ZBPIPE_PACK=1 compiles nothing: the wheel has every library that was built
in place. ZBPIPE_LOCAL=+torch2.13.0 ends the version.
"""

import json
import os
import runpy
import shutil
import sys
import sysconfig
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036
    raise SystemExit(f"zbpipe needs Python 3.10 or newer, and {sys.executable} is {sys.version.split()[0]}.")

from setuptools import Distribution, setup

PYTHON = sys.implementation.cache_tag
COMPILES = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}
PACK = os.environ.get("ZBPIPE_PACK") == "1"
SANITIZE = os.environ.get("ZBPIPE_SANITIZE", "")
# Each piece spends most of its time on libtorch's headers.
UNITS = int(os.environ.get("ZBPIPE_UNITS", "6"))

VERSION = runpy.run_path("zbpipe/_version.py")["__version__"]

# Else gcc guesses which class is destroyed behind a base of libtorch's, and wants a table that libtorch hides.
FLAGS = ["-Wall", "-Wextra", "-fvisibility=hidden", "-fno-devirtualize-speculatively"]
C_FLAGS = ["-std=c11", "-Wconversion", "-Wshadow"]
# A C library without level 3 takes it for level 2.
HARDENED = ["-O2", "-g0", "-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3"]
HARDENED_LINK = ["-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"]
# libtorch hides the type information that the check of virtual tables needs. In torch's instrumented headers gcc warns
# of uninitialized reads that are none.
SANITIZED = [f"-fsanitize={SANITIZE}", "-fno-sanitize=vptr", "-Wno-maybe-uninitialized", "-O1", "-g1"]
# Templates of libtorch and of the C++ library are visible in spite of -fvisibility=hidden.
EXPORTS = "{ global: PyInit__C; local: *; };\n"
# gcc warns of types in an included file with parts from an unnamed namespace, since another file might have others.
ONE_FILE = '#ifndef __clang__\n#pragma GCC diagnostic ignored "-Wsubobject-linkage"\n#endif\n'


def sources(*patterns):
    return sorted(path.as_posix() for name in patterns for path in Path("csrc").glob(name))


def written(path, text):
    """Writes a file only if that changes it, since a file newer than its object is compiled again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path.as_posix()


def units(folder):
    """The files to compile as C++: each includes its share of the shim's."""
    files = sources("**/*.cpp")
    shares = [files[number::UNITS] for number in range(min(UNITS, len(files)))]
    texts = [ONE_FILE + "".join(f'#include "{name.removeprefix("csrc/")}"\n' for name in share) for share in shares]
    return [written(folder / f"shim_{number}.cpp", text) for number, text in enumerate(texts)]


def check_compilers(compiler):
    """Raises SystemExit if a compiler is missing, or Python's headers are."""
    for variable, command in ("CC", compiler.compiler_so[0]), ("CXX", (os.environ.get("CXX") or "c++").split()[0]):
        if shutil.which(command) is None:
            raise SystemExit(
                f"zbpipe: there is no compiler {command!r}: install gcc and g++ (Debian: apt-get install "
                f"build-essential), or name another in {variable}."
            )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise SystemExit(
            f"zbpipe: there is no Python.h in {sysconfig.get_path('include')}: install the headers of this Python "
            "(Debian: apt-get install python3-dev)."
        )


def extension():
    """The arguments of setup() that need torch: the extension module and the command that builds it."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # a zbpipe that is broken must not stop its own build
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
    except ModuleNotFoundError:
        raise SystemExit(
            f"zbpipe: the Python that builds ({sys.prefix}) has no torch: install torch 2.11 or newer, setuptools and "
            "ninja, then zbpipe with --no-build-isolation (uv: docs/install.md)."
        ) from None
    from distutils.ccompiler import new_compiler
    from distutils.sysconfig import customize_compiler

    release, git = torch.__version__.partition("+")[0], str(torch.version.git_version)
    build = {"zbpipe": VERSION, "torch": release, "git": git, "hip": torch.version.hip is not None}
    # One folder of objects per Python, torch and kind, for the next build.
    place = Path("build", f"{PYTHON}-torch-{torch.__version__}-{SANITIZE.replace(',', '-') or 'release'}")
    python_include = sysconfig.get_path("include")
    # The library's messages name files without this machine's paths.
    names = {Path.cwd(): ".", Path(torch.__file__).parent: "torch", python_include: "python"}
    flags = [*FLAGS, *(f"-ffile-prefix-map={path}={name}" for path, name in names.items())]
    flags += [*SANITIZED, "-fno-omit-frame-pointer"] if SANITIZE else HARDENED
    flags += ["-Werror"] if os.environ.get("ZBPIPE_WERROR") == "1" else []
    compiler = new_compiler()
    customize_compiler(compiler)
    check_compilers(compiler)

    class BuildExt(BuildExtension):
        """BuildExtension compiles C as C++: here the .c files are compiled as C and linked as further objects."""

        def finalize_options(self):
            super().finalize_options()
            self.build_temp = str(place / "objects")

        def build_extensions(self):
            # No run paths of this machine: torch has loaded the libraries that _C needs.
            for linker in {"linker_so", "linker_so_cxx"} & vars(self.compiler).keys():
                command = getattr(self.compiler, linker)
                kept = [word for word in command if not word.startswith(("-Wl,-rpath", "-Wl,-R"))]
                setattr(self.compiler, linker, kept)
            super().build_extensions()

        def build_extension(self, ext):
            c_files, changed = sources("**/*.c"), max(map(os.path.getmtime, ["setup.py", *sources("**/*.h")]))
            objects = compiler.object_filenames(c_files, output_dir=self.build_temp)
            for file, made in zip(c_files, objects):
                if not os.path.exists(made) or os.path.getmtime(made) <= max(changed, os.path.getmtime(file)):
                    compiler.compile(
                        [file],
                        output_dir=self.build_temp,
                        include_dirs=["csrc"],
                        extra_postargs=["-isystem", python_include, *C_FLAGS, *flags],
                    )
            ext.extra_objects = objects
            super().build_extension(ext)
            library = Path(self.get_ext_fullpath(ext.name))
            library.with_name(f"{PYTHON}.json").write_text(json.dumps(build, indent=1) + "\n")

        def run(self):
            super().run()
            # Where Python runs in the clone, the tree comes before what is installed.
            if not self.inplace and not SANITIZE:
                self.copy_extensions_to_source()

        def copy_extensions_to_source(self):
            made = Path(self.get_ext_filename(self.extensions[0].name)).with_name(f"{PYTHON}.json")
            made.parent.mkdir(exist_ok=True)
            super().copy_extensions_to_source()
            self.copy_file(str(Path(self.build_lib, made)), str(made))

    module = CppExtension(
        f"zbpipe._native.torch_{'_'.join(release.split('.')[:2])}._C",
        units(place / "units"),
        include_dirs=[os.path.abspath("csrc")],
        extra_compile_args=[
            *(flag for path in [*include_paths(), python_include] for flag in ("-isystem", path)),
            *flags,
        ],
        extra_link_args=[
            f"-Wl,--version-script={written(place / 'exports', EXPORTS)}",
            *([f"-fsanitize={SANITIZE}"] if SANITIZE else HARDENED_LINK),
        ],
        depends=sources("**/*.h", "**/*.cpp"),
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": BuildExt}}


PACKED = [f"torch_*/_C{sysconfig.get_config_var('EXT_SUFFIX')}", f"torch_*/{PYTHON}.json"]
BUILD_LIB = f"build/lib-{PYTHON}"
Path("build").mkdir(exist_ok=True)
if "bdist_wheel" in sys.argv:
    shutil.rmtree(BUILD_LIB, ignore_errors=True)  # else deleted modules would still be installed
setup(
    version=VERSION + os.environ.get("ZBPIPE_LOCAL", ""),
    package_data={"": ["py.typed", "*.pyi"], "zbpipe._native": PACKED if PACK else []},
    # An egg_info in the tree would make the tree an installed zbpipe.
    options={"egg_info": {"egg_base": "build"}, "build": {"build_lib": BUILD_LIB}},
    # A packed wheel, too, is for this Python and machine, though this build compiles nothing.
    distclass=type("Compiled", (Distribution,), {"has_ext_modules": lambda self: True}),
    **(extension() if COMPILES & set(sys.argv) and not PACK else {}),
)
