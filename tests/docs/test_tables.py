"""The tables of README and docs are those that benchmarks/tables.py makes of what was measured."""

import html
import importlib.util
import json

import pytest
from support.pages import ROOT, copy_of_pages
from support.processes import python

TABLES = ROOT / "benchmarks" / "tables.py"


def test_the_pages_say_what_was_measured():
    done = python(TABLES, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def project(tmp_path):
    return copy_of_pages(tmp_path)


def test_a_figure_that_is_typed_is_found_and_written_over(project):
    page, made = project / "docs" / "numbers.md", project / "benchmarks" / "tables.py"
    text = page.read_text()
    page.write_text(text.replace(" MB (0.", " MB (9.", 1))
    assert page.read_text() != text
    done = python(made, "--check")
    assert (done.returncode, done.stdout.partition(":")[0]) == (1, "docs/numbers.md")
    assert python(made).returncode == 0
    assert page.read_text() == text


def test_another_measurement_makes_other_tables(project):
    path = project / "benchmarks" / "results" / "memory-2.13.0.json"
    measured = json.loads(path.read_text())
    measured["figures"]["stages"]["transformer"]["zbpipe"]["bytes"]["held"] += 10**6
    path.write_text(json.dumps(measured))
    done = python(project / "benchmarks" / "tables.py", "--check")
    assert (done.returncode, done.stdout.partition(":")[0]) == (1, "README.md, docs/numbers.md")


@pytest.mark.parametrize(
    ("change", "said"),
    [({"schema": 1}, "has schema 1, expected 4"), ({"wrong": ["ZBV: zbpipe failed"]}, "was wrong: ZBV: zbpipe failed")],
)
def test_what_cannot_be_believed_is_refused(change, said, project):
    path = project / "benchmarks" / "results" / "demo-2.13.0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    done = python(project / "benchmarks" / "tables.py")
    assert done.returncode == 1
    assert said in done.stderr
    assert (project / "README.md").read_text() == (ROOT / "README.md").read_text()


def test_the_picture_says_what_was_measured():
    spec = importlib.util.spec_from_file_location("timeline", ROOT / "docs" / "pictures" / "timeline.py")
    timeline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(timeline)
    said = timeline.titles(json.loads(timeline.DATA.read_text()))
    picture = html.unescape(timeline.PICTURE.read_text())
    assert len(said) == 2 and all(f">{title}<" in picture for title in said.values())
