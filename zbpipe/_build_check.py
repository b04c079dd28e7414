"""Compares what zbpipe._C was built with to what runs now, before the library is loaded.

A library that was built against another torch fails with `undefined symbol`, or worse; this fails with a sentence.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import sysconfig
from pathlib import Path

from zbpipe._version import __version__

HERE = Path(__file__).resolve().parent
# In the source tree, whether built there or not, what is built must land there. An index may have a wheel, and pip's
# cache has one, for another torch.
IS_TREE = (HERE.parent / "setup.py").exists()
FROM_AN_INDEX = "--no-cache-dir --no-binary zbpipe zbpipe"
MEND = f"pip install --force-reinstall --no-deps {'--editable .' if IS_TREE else FROM_AN_INDEX}"


def check() -> None:
    """Return if zbpipe._C can be loaded by this Python and this torch.

    Raises ImportError, with both sides and the command that mends it, if torch is not installed, if the extension was
    never built, or if it was built with another Python, zbpipe or torch (version, git revision or C++ ABI). If this is
    the source tree and another zbpipe is installed behind it on sys.path, it says so.
    """
    if importlib.util.find_spec("torch") is None:
        raise ImportError(
            f"zbpipe needs torch, and the Python at {sys.executable} has none: install torch 2.11 or newer, "
            f"then build zbpipe against it: {_how()}."
        )
    try:
        info = importlib.import_module("zbpipe._build_info")
    except ModuleNotFoundError:
        raise ImportError(
            f"zbpipe was never built in {HERE}, its compiled part zbpipe._C is not there: {_how_to_mend()}"
        ) from None

    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    _compare(
        "Python", f"{info.python_cache_tag} ({info.python_ext_suffix})", f"{sys.implementation.cache_tag} ({suffix})"
    )
    _compare("zbpipe", info.zbpipe_version, __version__)
    if importlib.util.find_spec("zbpipe._C") is None:
        raise ImportError(f"zbpipe's compiled part zbpipe._C is gone from {HERE}: {_how_to_mend()}")

    import torch

    _compare(
        "torch",
        _torch_words(info.torch_version, info.torch_git_version, info.torch_cxx11_abi),
        _torch_words(torch.__version__, torch.version.git_version, torch.compiled_with_cxx11_abi()),
    )


def _how_to_mend() -> str:
    hidden = _hidden()
    if hidden is None:
        return f"{_how()}."
    return (
        f"a built zbpipe is installed in {hidden}, and {HERE.parent} comes before it on sys.path: run Python from "
        f"another directory, or build the source tree, too: {_how()}."
    )


def _how() -> str:
    if IS_TREE:
        return f"in {HERE.parent}, run `{MEND}`"
    return f"run `{MEND}`, or, if you have its source tree, `pip install --force-reinstall --no-deps .` there"


def _hidden() -> Path | None:
    """Where another zbpipe lies that was built, and that this one hides."""
    for entry in sys.path:
        spec = importlib.machinery.PathFinder.find_spec("zbpipe", [entry])
        if spec is not None and spec.origin is not None:
            found = Path(spec.origin).resolve().parent
            if found != HERE and (found / "_build_info.py").exists():
                return found
    return None


def _torch_words(version: str, revision: str | None, cxx11_abi: bool) -> str:
    return f"{version} (git {str(revision)[:12]}, C++11 ABI {int(cxx11_abi)})"


def _compare(what: str, built: str, now: str) -> None:
    if built != now:
        raise ImportError(
            f"zbpipe was built with {what} {built}, but this process has {what} {now}: build it again: {_how_to_mend()}"
        )
