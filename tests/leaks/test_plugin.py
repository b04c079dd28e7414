"""The pytest plugin: runs of pytest within pytest, on the programs of plugin_cases.py."""

import collections
import os
import re
import sys
from pathlib import Path

import hypothesis  # noqa: F401
import pytest
import torch._dynamo  # noqa: F401
from leaks.plugin_cases import MARKED, OF_ASYNC, SCOPES, UNMARKED
from support.leaks import collects

import zbpipe.leaks.pytest_plugin  # these by the first inner run otherwise, which forgets what it imported

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
START = "import pytest\nimport torch\n\nkept = []\n\n"
LEAKS = f"{START}@pytest.mark.no_tensor_leaks\ndef test_leaks():\n    kept.append(torch.ones(3, 5))\n"


@pytest.fixture
def inner(pytester, monkeypatch):
    """Runs pytest on files of tests, in this process."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(*options, **sources):
        pytester.makepyfile(**sources)
        ours = ("-p", "_zbpipe_hook.plugin", "-p", "no:cacheprovider")
        # The outer run has imported the plugin, which is no fault of a run.
        return pytester.runpytest_inprocess(*ours, *options, "-W", "ignore::pytest.PytestAssertRewriteWarning")

    return run


@pytest.fixture
def process(pytester, monkeypatch):
    """Runs pytest on a file of tests in a process of its own."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))

    def run(source, *options):
        pytester.makepyfile(test_inner=source)
        return pytester.runpytest_subprocess("-p", "_zbpipe_hook.plugin", "-p", "no:cacheprovider", *options)

    return run


def expected(source):
    return dict(re.findall(r"(?m)^ *(?:async )?def (test_\w+)\(.*\):.*  # (.+)$", source))


def word_of(report):
    """What a report of one phase tells, None if nothing."""
    leak = re.search(r"leaks (\d+) bytes of tensors", str(report.longrepr))
    if report.when != "call" and report.passed:
        return None
    if hasattr(report, "wasxfail"):
        return {"call": {"passed": "xpassed", "skipped": "xfailed"}[report.outcome], "teardown": "leak expected"}[
            report.when
        ]
    if report.when == "teardown" and leak:
        return f"leaks {leak[1]}"
    return report.outcome if report.when == "call" or report.skipped else f"{report.when} failed"


def became(result):
    """What became of each test, as the comments say it, parameters in order."""
    words = collections.defaultdict(list)
    for report in result.reprec.getreports("pytest_runtest_logreport"):
        said = words[report.nodeid]
        said += filter(None, [word_of(report)])
        if ("tensor leaks", zbpipe.leaks.pytest_plugin.NOT_JUDGED) in report.sections:
            said.append("not judged")
    warnings = [call.warning_message for call in result.reprec.getcalls("pytest_warning_recorded")]
    for text in map(str, warnings):
        if found := re.search(r"TensorLeakWarning\W+(\S+) leaks (\d+) bytes", text):
            words[found[1]].append(f"warns of {found[2]}")
    of_functions = collections.defaultdict(list)
    for name, said in words.items():
        of_functions[re.split(r"::|\[", name.partition("[")[0])[-1]].append(", ".join(dict.fromkeys(said)))
    return {name: "; ".join(said) for name, said in of_functions.items()}


def test_marked_tests(inner):
    result = inner("-W", "ignore:The PyTorch API of nested tensors", test_marked=MARKED, conftest=OF_ASYNC)
    assert became(result) == expected(MARKED)


# By the names of the tests, what is said of them.
SAID = {
    "test_refused_by_the_fixture": "*TypeError: test_unmarked.py::test_refused_by_the_fixture: no_tensor_leaks.allow(): allow holds a str; *",
    "test_wrong_0": "*test_wrong_0: the marker * takes allow, trace and action: an argument was given without its name; write *",
    "test_wrong_1": "*test_wrong_1: the marker *: * got an unexpected keyword argument 'alow'*",
    "test_wrong_2": "*test_wrong_2: the marker *: action is 'eror'; expected one of error, warn, ignore*",
    "test_wrong_3": "*test_wrong_3: the marker *: allow holds a str; expected tensors*",
}


def test_unmarked_tests(inner):
    result = inner("--strict-markers", "-W", "always", test_unmarked=UNMARKED)
    assert became(result) == expected(UNMARKED)
    for line in SAID.values():
        result.stdout.fnmatch_lines([line])


def test_the_option_checks_every_test_but_those_that_are_ignored(inner):
    result = inner("--no-tensor-leaks", "-k", "test_leaks or test_is_ignored", test_unmarked=UNMARKED)
    assert became(result) == {
        "test_leaks": "passed, leaks 60",
        "test_is_ignored": "passed",
        "test_is_ignored_with_the_fixture": "passed",
    }


@pytest.mark.parametrize(
    "scope", ["class", *[pytest.param(s, marks=pytest.mark.long) for s in ("module", "package")], "session"]
)
def test_what_wider_fixtures_make_and_gain_is_theirs(inner, scope):
    source = SCOPES.replace("SCOPE", scope)
    assert became(inner(test_scopes=source)) == expected(source)


@pytest.mark.parametrize("ci", [False, True])
def test_a_report_is_printed_once_with_the_holder(inner, monkeypatch, ci):
    monkeypatch.setenv("CI", "1") if ci else monkeypatch.delenv("CI", raising=False)
    result = inner(test_inner=LEAKS)
    assert result.stdout.str().count("outlived the check") == 1 and "not judged" not in result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_leaks*",
            "test_inner.py::test_leaks leaks 60 bytes of tensors*",
            "*[[]3, 5]*",
            "*>> module global test_inner.kept*",
            "ERROR test_inner.py::test_leaks - leaks 60 bytes of tensors*",
        ]
    )


def test_the_collector_is_what_it_was_after_every_outcome(inner):
    inner(
        test_inner="import gc, pytest\npytestmark = pytest.mark.no_tensor_leaks\n"
        "def test_before(): assert gc.get_threshold()[0] == 0\n"
        "def test_fails(): assert False\n"
        "def test_exits():\n    pytest.exit('enough')\n"
    )
    assert collects()


OWN_FIXTURES = """
@pytest.fixture
def returned():
    return torch.ones(3)

@pytest.fixture
def yielded(returned):
    x = returned * 2
    yield [x]
    assert x.sum() == 6

@pytest.fixture
def finalized(request):
    box = [torch.ones(2)]
    request.addfinalizer(box.clear)
    return box

@pytest.fixture(autouse=True)
def own():
    yield torch.ones(2)

@pytest.mark.no_tensor_leaks
def test_it(returned, yielded, finalized, tmp_path, capsys, caplog):
    import logging
    logging.warning("%s", returned)
    yielded.append(torch.ones(4))
    finalized.append(torch.ones(4))
"""
WORKERS = """
@pytest.mark.parametrize("i", range(6))
def test_it(i):
    x = torch.ones(9)
    if i % 2:
        kept.append(x)
"""
IDLE = """
import sys

def test_nothing_was_imported():
    assert not {"torch", "zbpipe", "numpy"} & set(sys.modules)
"""
DESELECTED = f"{IDLE}\nimport pytest\n@pytest.mark.no_tensor_leaks\ndef test_other(): pass\n"
XDIST = ["-p", "xdist", "-n", "2", "--dist", "each", "--no-tensor-leaks"]


@pytest.mark.parametrize(
    ("source", "options", "outcomes"),
    [
        # In this process the outer run's handler would keep the record.
        pytest.param(START + OWN_FIXTURES, [], {"passed": 1}, id="a test's own fixtures"),
        pytest.param(START + WORKERS, XDIST, {"passed": 12, "errors": 6}, id="workers of xdist"),
        pytest.param(IDLE, [], {"passed": 1}, id="nothing asked for"),
        pytest.param(IDLE, ["--no-tensor-leaks"], {"failed": 1}, id="asked for"),
        pytest.param(
            DESELECTED, ["-k", "nothing"], {"passed": 1, "deselected": 1}, id="asked for by what is deselected"
        ),
    ],
)
def test_in_a_process_of_its_own(process, source, options, outcomes):
    process(source, *options).assert_outcomes(**outcomes)


def test_it_is_installed_for_pytest_to_find():
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\n"_zbpipe_hook.plugin" = "_zbpipe_hook.plugin"' in text
    assert (ROOT / "_zbpipe_hook/plugin.py").exists()
    assert zbpipe.leaks.pytest_plugin.__name__ in (ROOT / "_zbpipe_hook/plugin.py").read_text()
