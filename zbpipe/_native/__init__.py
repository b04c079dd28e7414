"""Chooses and loads zbpipe._C: ``torch_MAJOR_MINOR/`` has the library for that release of torch.

setup.py describes each build in a file beside its library. With another torch a library would fail with ``undefined
symbol``, or worse: :func:`load` raises an ImportError before.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from zbpipe._version import __version__

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]
PYTHON = str(sys.implementation.cache_tag)
INSTALL = "pip install --no-build-isolation --no-deps --force-reinstall"


class Build(NamedTuple):
    """What a library was built with; ``torch`` is the release, which is the same on a CPU and with CUDA."""

    zbpipe: str
    torch: str
    git: str
    hip: bool

    def __str__(self) -> str:
        return f"zbpipe {self.zbpipe}, torch {self.torch} (git {self.git[:12]}{', ROCm' if self.hip else ''})"


def load() -> Build:
    """Import zbpipe._C for the torch and the Python that run, and return what it was built with.

    Raises:
        ImportError: there is no torch, no library for it, or only one that was built with another revision of torch or
            of zbpipe. The message says how to build it. Or the process runs without the GIL.
    """
    if importlib.util.find_spec("torch") is None:
        raise ImportError(
            f"zbpipe needs torch, and the Python at {sys.executable} has none: pip install 'torch>=2.11', then {_how()}"
        )
    import torch

    release = str(torch.__version__).partition("+")[0]
    folder = HERE / f"torch_{'_'.join(release.split('.')[:2])}"
    library, described = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}", folder / f"{PYTHON}.json"
    if not (library.exists() and described.exists()):
        there = sorted(f"torch {_read(path).torch}, {path.stem}" for path in HERE.glob("torch_*/*.json"))
        raise ImportError(
            f"zbpipe has no compiled part for torch {release} and {PYTHON} in {HERE} ({'; '.join(there) or 'none'} "
            f"there): {_how()}"
        )
    build = _read(described)
    now = Build(__version__, release, str(torch.version.git_version), torch.version.hip is not None)
    if build != now:
        raise ImportError(f"zbpipe's compiled part is of {build}, and this process has {now}: {_how()}")
    spec = importlib.util.spec_from_file_location("zbpipe._C", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zbpipe._C"] = module
    spec.loader.exec_module(module)
    if not getattr(sys, "_is_gil_enabled", lambda: True)():  # the import turns it on, unless somebody forbids that
        del sys.modules["zbpipe._C"]
        raise ImportError(
            "zbpipe needs the GIL, and this process runs without it (PYTHON_GIL=0 or -X gil=0); a free-threaded Python "
            "turns it on when zbpipe is imported, if neither is set"
        )
    sys.modules["zbpipe"]._C = module  # type: ignore[attr-defined] # noqa: SLF001
    return build


def _read(described: Path) -> Build:
    return Build(*map(json.loads(described.read_text()).get, Build._fields))


def _how() -> str:
    """The command that builds it here, as the end of a sentence."""
    if (TREE / "setup.py").exists():
        return (
            f"build it: in {TREE}, run `{INSTALL} --editable .`; or run Python elsewhere, if zbpipe is installed too."
        )
    return (
        f"build it: in the sources of zbpipe {__version__}, run `{INSTALL} .`, or `make wheels` for a wheel with a "
        "library for each tested torch."
    )
