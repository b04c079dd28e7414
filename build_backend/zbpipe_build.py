"""The in-tree PEP 517 backend: setuptools' own, with two additions.

The build sees the torch of the environment that zbpipe is installed into, also under pip's build isolation,
and every wheel carries what `hook/` holds, the start-up hook behind `ZBPIPE_PATCH=1`.

Nothing here imports torch: asking for build requirements or building a source distribution needs none.
"""

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import site
import sys
import sysconfig
import zipfile
from pathlib import Path

try:
    from setuptools import build_meta
except ModuleNotFoundError:
    # uv turns isolation off by itself (pyproject.toml, tool.uv), and then installs no build requirements.
    raise SystemExit(
        f"zbpipe: this build runs without isolation, and {sys.prefix} has no setuptools: install setuptools>=77.0.3 "
        "and ninja there, then install zbpipe again."
    ) from None

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = (2, 11)

get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
build_sdist = build_meta.build_sdist


def see_environment():
    """Put the site directories of the running interpreter's environment behind whatever is on sys.path.

    pip's isolated build runs the interpreter that zbpipe is installed for, only with its site directories hidden.
    """
    paths = sysconfig.get_paths()
    for directory in dict.fromkeys([paths["purelib"], paths["platlib"], *site.getsitepackages()]):
        if os.path.isdir(directory) and directory not in sys.path:
            site.addsitedir(directory)
    user = site.getusersitepackages()
    if sys.prefix == sys.base_prefix and os.path.isdir(user) and importlib.util.find_spec("torch") is None:
        site.addsitedir(user)


def in_throwaway_environment():
    """Tell whether the running interpreter is one that `python -m build` or uv made for this build alone."""
    prefix = Path(sys.prefix)
    return prefix.name.startswith("build-env-") or any(part.startswith("builds-v") for part in prefix.parts)


def require_torch():
    """Make torch importable for this build.

    Raises SystemExit with one sentence when the environment has no torch, when the build front end hides it, or
    when it is older than zbpipe can use.
    """
    see_environment()
    if importlib.util.find_spec("torch") is None:
        if in_throwaway_environment():
            raise SystemExit(
                f"zbpipe: this build runs in an isolated environment ({sys.prefix}) that hides the torch zbpipe must "
                "be built against: run it again with --no-build-isolation (uv pip, pip) or --no-isolation "
                "(python -m build), in the environment that has torch, setuptools and ninja."
            )
        raise SystemExit(
            f"zbpipe: torch is not installed in {sys.prefix}, and zbpipe is built against the torch that will import "
            "it: install torch 2.11 or newer there, then install zbpipe again."
        )
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        raise SystemExit(
            f"zbpipe: torch {version} is installed in {sys.prefix}, but zbpipe needs 2.11 or newer: "
            "upgrade torch, then install zbpipe again."
        )


def get_requires_for_build_wheel(config_settings=None):
    require_torch()
    return build_meta.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings=None):
    require_torch()
    return build_meta.get_requires_for_build_editable(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    require_torch()
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    add_to_wheel(Path(wheel_directory, name), sorted(ROOT.joinpath("hook").glob("*.p*")))
    return name


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    require_torch()
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    add_to_wheel(Path(wheel_directory, name), sorted(ROOT.joinpath("hook").glob("*.p*")))
    return name


def add_to_wheel(wheel, files):
    """Rewrite `wheel` with `files` added at its root and listed in its RECORD."""
    rewritten = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(rewritten, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                data = "".join([*(record_line(file) for file in files), data.decode()]).encode()
            new.writestr(item, data)
        for file in files:
            new.writestr(file.name, file.read_bytes())
    rewritten.replace(wheel)


def record_line(file):
    data = file.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{file.name},sha256={digest},{len(data)}\n"
