"""Builds zbpipe._C: C core, C++ shim, C bindings, linked against the torch that is installed.

Environment: ZBPIPE_WERROR=1 makes warnings errors; ZBPIPE_SANITIZE=address,undefined builds for the sanitizers, with
asserts; ZBPIPE_DEBUG=1 builds with asserts and debug information.
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

C_FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Wshadow"]
CXX_FLAGS = ["-Wall", "-Wextra"]


def sources(pattern):
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").glob(pattern))


def common_flags():
    flags = ["-fvisibility=hidden"]
    flags += ["-O1", "-g1", "-UNDEBUG", "-fno-omit-frame-pointer"] if DEBUG else ["-O2", "-g0"]
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
    }
    python_include = sysconfig.get_path("include")
    # Headers that are not ours are system headers: their warnings are not ours to mend.
    torch_headers = [flag for path in [*include_paths(), python_include] for flag in ("-isystem", path)]

    kind = SANITIZE.replace(",", "-") or ("debug" if DEBUG else "release")
    # One place per Python, torch and kind: what is built for one is no part of another's wheel.
    place = f"build/{sys.implementation.cache_tag}-{platform.machine()}-torch-{build_info['torch_version']}-{kind}"

    class Build(build):
        """build, which begins without the modules of earlier builds: one that is gone would go on being installed."""

        def initialize_options(self):
            super().initialize_options()
            self.build_base = place

        def run(self):
            shutil.rmtree(self.build_lib, ignore_errors=True)
            super().run()

    class BuildExt(BuildExtension):
        """BuildExtension, which compiles C as C++, with the .c files compiled as C and linked as extra objects."""

        def finalize_options(self):
            super().finalize_options()
            # Kept between builds, so that a second one compiles only what changed.
            self.build_temp = str(ROOT / place / "objects")

        def build_extension(self, ext):
            compiler = new_compiler()
            customize_compiler(compiler)
            c_objects = compiler.compile(
                sources("core/*.c") + sources("bindings/*.c"),
                output_dir=self.build_temp,
                include_dirs=["csrc"],
                extra_postargs=["-isystem", python_include, *C_FLAGS, *common_flags()],
            )
            ext.extra_objects = [str(ROOT / name) for name in c_objects]
            super().build_extension(ext)
            info = Path(self.get_ext_fullpath(ext.name)).with_name("_build_info.py")
            info.write_text(
                '"""What zbpipe._C was built with; written by setup.py."""\n\n'
                + "".join(f"{name} = {value!r}\n" for name, value in build_info.items())
            )

        def copy_extensions_to_source(self):
            super().copy_extensions_to_source()
            built = Path(self.build_lib, "zbpipe", "_build_info.py")
            self.copy_file(str(built), str(ROOT / "zbpipe" / "_build_info.py"))

    module = CppExtension(
        "zbpipe._C",
        sources("shim/*.cpp"),
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=[*torch_headers, *CXX_FLAGS, *common_flags()],
        extra_link_args=[f"-fsanitize={SANITIZE}"] if SANITIZE else [],
        depends=sources("*/*.h"),
    )
    return {"ext_modules": [module], "cmdclass": {"build": Build, "build_ext": BuildExt}}


setup(**(extension() if COMPILES & set(sys.argv) else {}))
