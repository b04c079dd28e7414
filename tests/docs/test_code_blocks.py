"""Every code block of the README and the docs runs, and prints what is said below it.

- ``python``: the blocks of a page run one after the other, in one process, in a copy of the project's folder.
- ``text`` right behind one: what it prints.
- ``console``: each line after ``$`` is a command, what follows until the next is its output.
- ``sh``: commands that set things up; the tests or CI run them elsewhere, and here each must be known.

In what is expected ``...`` stands for any lines, within a line for any text, and the width of columns is left open. A
number must be the one that is printed, or as near to it as a comment before the block says: ``<!-- numbers within 5 % -->``.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.processes import environment

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- numbers within (\d+) % -->\n)?```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
# Run by others: the install tests, CI, the Makefile's own targets.
SET_UP = re.compile(
    r"(pip install (--no-build-isolation )?(torch(==[0-9.]+)?|\.|-e \.|zbpipe)|uv pip install|make [a-z-]+|git clone|python -m build)( .*)?(#.*)?"
)
# Other torches run every block too; what they print may differ in which nodes and phases there are.
IS_WRITTEN_FOR = torch.__version__.startswith("2.13.")


def blocks_of(page):
    """(language, source, what stands right behind it, if that is text, and how far numbers may be from it)."""
    text = (ROOT / page).read_text()
    found = list(BLOCK.finditer(text))
    for match, after in itertools.zip_longest(found, found[1:]):
        follows = after is not None and after[2] == "text" and not text[match.end() : after.start()].strip()
        said = after if follows else match
        yield match[2], match[3], after[3] if follows else None, int(said[1] or 0) / 100


def of_language(page, language):
    return [(source, said, within) for found, source, said, within in blocks_of(page) if found == language]


def is_like(said, expected, within=0.0):
    """Both lists of lines, or texts; ``within``: what part of it a number may be off."""
    said, expected = (lines.strip().splitlines() if isinstance(lines, str) else lines for lines in (said, expected))
    if not expected:
        return not said
    if expected[0].strip() == "...":
        return any(is_like(said[i:], expected[1:], within) for i in range(len(said) + 1))
    return bool(said) and is_like_line(said[0], expected[0], within) and is_like(said[1:], expected[1:], within)


def is_like_line(said, expected, within):
    said, expected = (re.sub(r"-{2,}", "--", " ".join(line.split())) for line in (said, expected))
    texts = (re.escape(text).replace(r"\.\.\.", ".*") for text in NUMBER.split(expected))
    found = re.fullmatch(f"({NUMBER.pattern})".join(texts), said)
    numbers = zip(found.groups(), NUMBER.findall(expected), strict=True) if found else ()
    return found is not None and all(abs(float(a) - float(b)) <= within * float(b) for a, b in numbers)


@pytest.fixture
def project(tmp_path):
    """What the pages' commands read of the project, at the paths that they name."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(command, project, **variables):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        command, cwd=project, env=environment(OMP_NUM_THREADS="1", PATH=path, **variables), capture_output=True, text=True, timeout=280, check=False
    )  # fmt: skip


def test_the_comparison_sees_a_difference():
    assert is_like("a  1.5\nb\nc", "a 1.5\n...\nc") and is_like("a\nc", "a\n...") and is_like("a 9 2", "a ... 2")
    assert not is_like("a 1", "b 1") and not is_like("a\nb", "a") and not is_like("a", "a\nb")
    assert is_like("Nan 1.04", "Nan 1.00", 0.05) and not is_like("1.06", "1.00", 0.05) and not is_like("1.06", "1.00")


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_of_a_known_kind(page):
    for language, source, *_ in blocks_of(page):
        assert language in ("python", "text", "console", "sh", "{eval-rst}", "{toctree}"), source
        for line in source.splitlines() if language == "sh" else []:
            assert SET_UP.fullmatch(line.strip()), line


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if of_language(page, "python")])
def test_python_runs(page, project):
    if page == "docs/tutorial.md" and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11 runs no V of one rank over gloo")
    blocks = of_language(page, "python")
    parts = [f"{source}\nprint('{'=' * 8}', flush=True)\n" for source, *_ in blocks]
    (project / "page.py").write_text("\n".join(parts))
    done = run([sys.executable, "-W", "error", "page.py"], project)
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = done.stdout.split("=" * 8 + "\n")
    for (source, expected, within), said in zip(blocks, outputs, strict=False):
        if expected is not None and IS_WRITTEN_FOR:
            assert is_like(said, expected, within), f"{source}\nprints\n{said}"


COMMANDS = [
    (page, number, command, within)
    for page in PAGES
    for source, _, within in of_language(page, "console")
    for number, command in enumerate(re.split(r"^\$ ", source, flags=re.MULTILINE)[1:])
]


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("page", "number", "command", "within"), COMMANDS, ids=[f"{p}-{c.splitlines()[0]}" for p, _, c, _ in COMMANDS]
)
def test_command_prints_what_is_said(page, number, command, within, project):
    line, _, expected = command.partition("\n")
    done = run(["bash", "-c", line], project)
    assert done.returncode == 0, done.stderr
    assert not IS_WRITTEN_FOR or is_like(done.stdout, expected, within), f"{line}\nprints\n{done.stdout}\n{done.stderr}"
