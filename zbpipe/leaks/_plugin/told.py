"""How a test's leaks are told: a text, a warning, pictures."""

import contextlib
import hashlib
import itertools
import re
import warnings
from pathlib import Path

import pytest

from zbpipe.leaks._check import TensorLeakWarning
from zbpipe.leaks._draw import can_render
from zbpipe.leaks._report import Report


def text(item: pytest.Item, report: Report) -> str:
    text = (
        f"{item.nodeid} leaks {report.bytes} bytes of tensors: born in it, and neither gone by reference counts nor "
        f"owned by its fixtures\n{report}"
    )
    return text + "".join(f"\npicture: {path}" for path in _draw(item, report))


def warn(item: pytest.Item, report: Report) -> None:
    warning = TensorLeakWarning(report)
    warning.args = (text(item, report),)
    path, line, _ = item.reportinfo()
    warnings.warn_explicit(warning, None, str(path), (line or 0) + 1)


def _draw(item: pytest.Item, report: Report) -> list[Path]:
    """Write the picture, as a text, and drawn if Graphviz is there."""
    config = item.config
    chosen = config.getoption("tensor_leak_pictures")
    if chosen:
        folder = Path(config.invocation_params.dir, chosen)
    elif config.getini("tensor_leak_pictures"):
        folder = Path(config.rootpath, config.getini("tensor_leak_pictures"))
    else:
        folder = config._tmp_path_factory.getbasetemp() / "tensor-leaks"  # type: ignore[attr-defined]
    folder.mkdir(parents=True, exist_ok=True)
    suffixes = [".dot", ".svg"] if can_render() else [".dot"]
    base = _file_name(item)
    return [report.draw(_unused(folder, base, suffix)) for suffix in suffixes]


def _file_name(item: pytest.Item) -> str:
    """Of a test, its parameters and the worker; short, and different for different tests."""
    worker = getattr(item.config, "workerinput", {}).get("workerid", "")
    file, _, name = item.nodeid.partition("::")
    words = re.sub(r"[^A-Za-z0-9]+", "-", f"{Path(file).stem}-{name}").strip("-")[:80]
    digest = hashlib.sha256(item.nodeid.encode()).hexdigest()[:8]
    return "-".join(part for part in (words, digest, worker) if part)


def _unused(folder: Path, base: str, suffix: str) -> Path:
    """A file that is now made, empty; a test may leak, or run, several times."""
    for number in itertools.count(1):
        path = folder / (f"{base}{suffix}" if number == 1 else f"{base}-{number}{suffix}")
        with contextlib.suppress(FileExistsError), path.open("x"):
            return path
    raise AssertionError
