"""The in-tree PEP 517 backend: setuptools' own, with three additions.

The build sees the torch of the environment that zbpipe is installed into, also under pip's build isolation;
every wheel requires the very torch that it was built for, and carries what `hook/` holds, the start-up hook behind
`ZBPIPE_PATCH=1`.

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


def instead_of_setuptools():
    """What is there in the place of one that is new enough; None if that is there."""
    try:
        import setuptools
    except ModuleNotFoundError:
        return "no setuptools"
    numbers = tuple(map(int, re.findall(r"\d+", setuptools.__version__)[:3]))
    return None if numbers >= (77, 0, 3) else f"setuptools {setuptools.__version__}"


if found := instead_of_setuptools():
    # uv turns isolation off by itself (pyproject.toml, tool.uv), and then installs no build requirements.
    raise SystemExit(
        f"zbpipe: this build runs without isolation, and {sys.prefix} has {found}: install setuptools>=77.0.3 "
        "and ninja there, then install zbpipe again."
    )

from setuptools import build_meta  # noqa: E402

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
    return prepared(metadata_directory, build_meta.prepare_metadata_for_build_wheel, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    return prepared(metadata_directory, build_meta.prepare_metadata_for_build_editable, config_settings)


def prepared(metadata_directory, prepare, config_settings):
    require_torch()
    name = prepare(metadata_directory, config_settings)
    metadata = Path(metadata_directory, name, "METADATA")
    metadata.write_bytes(of_this_torch(metadata.read_bytes()))
    return name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    require_torch()
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    complete(Path(wheel_directory, name))
    return name


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    require_torch()
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    complete(Path(wheel_directory, name))
    return name


def of_this_torch(metadata):
    """`metadata` with the torch that is installed required, as pip knows it, in the place of any that can be built for.

    What is built loads with no other: zbpipe/_build_check.py. A torch that pip knows nothing of changes nothing.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return metadata
    return re.sub(
        rb"^Requires-Dist: torch[ (]*>=[^\r\n]*", f"Requires-Dist: torch=={version}".encode(), metadata, flags=re.M
    )


def complete(wheel):
    """Rewrite `wheel` with the torch that it requires, and with the files of hook/ at its root, as its RECORD says."""
    added = {file.name: file.read_bytes() for file in sorted(ROOT.joinpath("hook").glob("*.p*"))}
    rewritten = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(wheel) as old:
        files = {item: old.read(item) for item in old.infolist()}
    (record,) = (item for item in files if item.filename.endswith(".dist-info/RECORD"))
    (metadata,) = (item for item in files if item.filename.endswith(".dist-info/METADATA"))
    files[metadata] = of_this_torch(files[metadata])
    lines = [line for line in files[record].decode().splitlines() if not line.startswith(f"{metadata.filename},")]
    changed = added | {metadata.filename: files[metadata]}
    files[record] = "".join(f"{line}\n" for line in [*map(record_line, changed, changed.values()), *lines]).encode()
    with zipfile.ZipFile(rewritten, "w", zipfile.ZIP_DEFLATED) as new:
        for item, data in files.items():
            new.writestr(item, data)
        for name, data in added.items():
            new.writestr(name, data)
    rewritten.replace(wheel)


def record_line(name, data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}"
