"""The pytest plugin: runs of pytest within pytest, on small files of tests."""

import os
import re
import sys
from pathlib import Path

import hypothesis  # noqa: F401
import pytest
import torch._dynamo  # noqa: F401
from support.leaks import collects

import zbpipe.leaks.pytest_plugin  # these by the first inner run otherwise, which forgets what it imported

pytest_plugins = ["pytester"]

HOOK = Path(__file__).parents[2] / "hook"
START = "import pytest\nimport torch\n\nkept = []\n\n"


@pytest.fixture
def inner(pytester, monkeypatch):
    """Runs pytest on a file of tests, in this process."""
    monkeypatch.syspath_prepend(HOOK)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(source, *options, conftest=None):
        pytester.makepyfile(test_inner=START + source)
        if conftest is not None:
            pytester.makeconftest(conftest)
        ours = ("-p", "zbpipe_pytest", "-p", "no:cacheprovider")
        # The outer run has imported the plugin, which is no fault of a run.
        return pytester.runpytest_inprocess(*ours, *options, "-W", "ignore::pytest.PytestAssertRewriteWarning")

    return run


@pytest.fixture
def process(pytester, monkeypatch):
    """Runs pytest on a file of tests in a process of its own."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HOOK), *filter(None, sys.path)]))

    def run(source, *options):
        pytester.makepyfile(test_inner=source)
        return pytester.runpytest_subprocess("-p", "zbpipe_pytest", "-p", "no:cacheprovider", *options)

    return run


LEAK = "kept.append(torch.ones(3, 5))"


def test_marked_test_that_leaks_is_an_error_with_the_report(inner):
    result = inner(f"@pytest.mark.no_tensor_leaks\ndef test_it():\n    {LEAK}\n")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_it*", "test_inner.py::test_it leaks 60 bytes of tensors*"])
    said = result.stdout.str()
    assert "kept" in said  # the holder
    assert "3, 5" in said or "[3 x 5]" in said
    assert "not judged" not in said


def test_marked_test_that_does_not_leak_passes(inner):
    inner(
        "@pytest.mark.no_tensor_leaks\ndef test_it():\n"
        "    net = torch.nn.Linear(3, 3)\n    net(torch.ones(2, 3)).sum().backward()\n"
    ).assert_outcomes(passed=1)


def test_unmarked_tests_are_left_alone(inner):
    inner(f"def test_it():\n    {LEAK}\n@pytest.mark.no_tensor_leaks\ndef test_other(): pass\n").assert_outcomes(
        passed=2
    )


def test_option_checks_every_test(inner):
    source = f"def test_it():\n    {LEAK}\ndef test_clean(): torch.ones(2)\n"
    inner(source, "--no-tensor-leaks").assert_outcomes(passed=2, errors=1)


def test_option_checks_every_test_but_those_that_are_ignored(inner):
    inner(
        f"def test_it():\n    {LEAK}\n@pytest.mark.no_tensor_leaks(action='ignore')\ndef test_ignored():\n    {LEAK}\n",
        "--no-tensor-leaks",
    ).assert_outcomes(passed=2, errors=1)


def test_tensor_in_a_cycle_leaks(inner):
    result = inner(
        "@pytest.mark.no_tensor_leaks\ndef test_it():\n    cycle = [torch.ones(7)]\n    cycle.append(cycle)\n"
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*leaks 28 bytes of tensors*"])


def test_classes_modules_and_test_cases_can_be_marked(inner):
    inner(
        "import unittest\npytestmark = pytest.mark.no_tensor_leaks\n"
        f"class TestIt:\n    def test_it(self):\n        self.mine = torch.ones(2)\n        {LEAK}\n"
        "    def test_clean(self):\n        self.mine = torch.ones(2)\n"
        f"class Case(unittest.TestCase):\n    def test_it(self):\n        {LEAK}\n"
        "    def setUp(self):\n        self.mine = torch.ones(2)\n    def test_clean(self): pass\n"
    ).assert_outcomes(passed=4, errors=2)


def test_each_parameter_is_a_test_of_its_own(inner):
    result = inner(
        "@pytest.mark.no_tensor_leaks\n@pytest.mark.parametrize('x', [torch.ones(2), torch.ones(3), torch.ones(4)])\n"
        "def test_it(x):\n    y = x * 2\n    if len(x) == 3:\n        kept.append(y)\n"
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["test_inner.py::test_it?x1? leaks 12 bytes of tensors*"])


# What is allowed.


def test_allowed_by_the_marker(inner):
    inner(
        "net = torch.nn.Linear(2, 2)\nadam = torch.optim.Adam(net.parameters())\n"
        "@pytest.mark.no_tensor_leaks(allow=[net, adam, lambda t: t.shape == (9,)])\ndef test_it():\n"
        "    net(torch.ones(1, 2)).sum().backward()\n    adam.step()\n    kept.append(torch.ones(9))\n"
    ).assert_outcomes(passed=1)


def test_allowed_by_the_fixture(inner):
    inner(
        f"def test_it(no_tensor_leaks):\n    {LEAK}\n    no_tensor_leaks.allow(kept[-1])\n"
        f"def test_leaky(no_tensor_leaks):\n    {LEAK}\n    kept.append(torch.ones(7))\n    no_tensor_leaks.allow(kept[-1])\n"
    ).assert_outcomes(passed=2, errors=1)


def test_iterators_are_allowed_as_what_they_give(inner):
    inner(
        "net = torch.nn.Linear(2, 2)\n"
        "@pytest.mark.parametrize('i', [1, 2])\n@pytest.mark.no_tensor_leaks(allow=net.parameters())\n"
        "def test_marked(i): net(torch.ones(1, 2)).sum().backward()\n"
        "def test_it(no_tensor_leaks):\n    other = torch.nn.Linear(2, 2)\n    kept.append(other)\n"
        "    no_tensor_leaks.allow(other.parameters())\n"
    ).assert_outcomes(passed=3)


def test_fixture_refuses_what_cannot_be_allowed(inner):
    result = inner("def test_it(no_tensor_leaks): no_tensor_leaks.allow(torch.ones(2), 'weights')\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*TypeError: test_inner.py::test_it: no_tensor_leaks.allow(): allow holds a str; *"])


def test_fixture_checks_a_part_on_the_spot(inner):
    result = inner(
        "from zbpipe.leaks import TensorLeakError\n"
        f"def test_part(no_tensor_leaks):\n    with no_tensor_leaks.check():\n        {LEAK}\n"
        f"def test_caught(no_tensor_leaks):\n    with pytest.raises(TensorLeakError) as e, no_tensor_leaks.check():\n        {LEAK}\n"
        "    assert e.value.report.bytes == 60\n    kept.clear()\n"
        f"def test_recorded(no_tensor_leaks):\n    with no_tensor_leaks.check(action='record') as check:\n        {LEAK}\n"
        "    assert check.report.bytes == 60\n    kept.clear()\n"
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*TensorLeakError: *leaks 60 bytes of tensors*", "FAILED *::test_part*"])


def test_fixture_asked_for_in_the_middle_checks_from_there_on(inner):
    inner(
        f"def test_it(request):\n    {LEAK}\n    request.getfixturevalue('no_tensor_leaks')\n"
        f"def test_leaky(request):\n    request.getfixturevalue('no_tensor_leaks')\n    {LEAK}\n"
    ).assert_outcomes(passed=2, errors=1)


def test_warning_instead(inner):
    result = inner(f"@pytest.mark.no_tensor_leaks(action='warn')\ndef test_it():\n    {LEAK}\n", "-W", "always")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*TensorLeakWarning: test_inner.py::test_it leaks 60 bytes*"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("(3)", "was given 3, but takes only the keywords allow, trace, device, action"),
        ("(alow=[])", "was given alow, but takes only"),
        ("(action='eror')", "was given action='eror'; give one of error, warn, ignore"),
        ("(allow='weights')", "was given a wrong argument: allow holds a str; expected tensors"),
        ("(device='meta')", "was given a wrong argument: device is 'meta'"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(inner, given, words):
    result = inner(f"@pytest.mark.no_tensor_leaks{given}\ndef test_it(): pass\ndef test_other(): pass\n")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*test_inner.py::test_it: the marker no_tensor_leaks {words}*"])


def test_marker_is_known_to_strict_runs(inner):
    inner("@pytest.mark.no_tensor_leaks\ndef test_it(): pass\n", "--strict-markers", "-W", "error").assert_outcomes(
        passed=1
    )


# Fixtures.


@pytest.mark.parametrize(
    "scope", ["class", *[pytest.param(s, marks=pytest.mark.long) for s in ("module", "package")], "session"]
)
def test_what_wider_fixtures_make_and_gain_is_theirs(inner, scope):
    inner(
        f"""
@pytest.fixture(scope="{scope}")
def net():
    net = torch.nn.Linear(3, 3)
    yield net

@pytest.fixture(scope="{scope}")
def adam(net):
    return torch.optim.Adam(net.parameters())

@pytest.fixture(scope="{scope}")
def graph(net):
    return {{"loss": net(torch.ones(4, 3)).tanh().sum()}}

@pytest.fixture(scope="{scope}")
def cache():
    return {{"rows": []}}

@pytest.mark.no_tensor_leaks
class TestIt:
    def test_makes(self, net, adam, graph, cache): pass
    def test_gains(self, net, adam, cache):
        net(torch.ones(2, 3)).sum().backward()
        adam.step()
        cache["rows"].append(torch.ones(5))
    def test_is_not_blind(self, net):
        kept.append(net(torch.ones(2, 3)).detach())
"""
    ).assert_outcomes(passed=3, errors=1)


def test_entries_of_a_fixtures_cached_function_are_its(inner):
    inner(
        """
import functools

@pytest.fixture(scope="session", params=[None, 100])
def mask(request):
    @functools.lru_cache(maxsize=request.param)
    def mask(n):
        return torch.ones(n)
    return mask

@pytest.mark.no_tensor_leaks
def test_makes(mask): mask(3)

@pytest.mark.no_tensor_leaks
def test_gains(mask): mask(4), mask(5)

@pytest.mark.no_tensor_leaks
def test_is_not_blind(mask): kept.append(mask(6) * 2)
"""
    ).assert_outcomes(passed=6, errors=2)


@pytest.mark.parametrize("ci", [False, True])
def test_a_report_is_printed_once(inner, monkeypatch, ci):
    monkeypatch.setenv("CI", "1") if ci else monkeypatch.delenv("CI", raising=False)
    result = inner(f"@pytest.mark.no_tensor_leaks\ndef test_leaks():\n    {LEAK}\n")
    result.assert_outcomes(passed=1, errors=1)
    assert result.stdout.str().count("outlived the check") == 1
    result.stdout.fnmatch_lines(["ERROR test_inner.py::test_leaks - leaks 60 bytes of tensors*"])


def test_a_leak_where_memory_of_a_fixture_was_is_a_leak(inner):
    result = inner(
        """
@pytest.fixture(scope="module")
def data():
    return [torch.ones(3) for _ in range(3000)]

@pytest.mark.no_tensor_leaks
def test_leaks(data):
    data.clear()
    kept.extend(torch.ones(3) for _ in range(3000))

@pytest.mark.no_tensor_leaks
def test_leaks_too(data):
    kept.append(torch.ones(3))
"""
    )
    result.assert_outcomes(passed=2, errors=2)
    assert re.findall(r"(?m)^test_inner.py::(\w+) leaks (\d+) bytes", result.stdout.str()) == [
        ("test_leaks", "36000"),
        ("test_leaks_too", "12"),
    ]


def test_what_a_wider_fixture_leaves_to_the_collector_is_its(inner):
    inner(
        "@pytest.fixture(scope='module')\ndef made():\n    cycle = [torch.ones(6)]\n    cycle.append(cycle)\n"
        "@pytest.mark.no_tensor_leaks\ndef test_it(made): pass\n"
        "@pytest.mark.no_tensor_leaks\ndef test_leaks():\n    cycle = [torch.ones(6)]\n    cycle.append(cycle)\n"
    ).assert_outcomes(passed=2, errors=1)


def test_a_leak_where_memory_of_a_torn_down_fixture_was_is_a_leak(inner, pytester):
    pytester.makepyfile(
        test_first="import pytest, torch\n@pytest.fixture(scope='module')\ndef data():\n"
        "    d = [torch.ones(3) for _ in range(3000)]\n    yield d\n    d.clear()\n"
        "@pytest.mark.no_tensor_leaks\ndef test_uses(data): pass\n"
    )
    inner(
        f"@pytest.mark.no_tensor_leaks\ndef test_it():\n    {LEAK}\n", "test_first.py", "test_inner.py"
    ).assert_outcomes(passed=2, errors=1)


def test_memory_that_no_tensor_in_sight_explains_is_the_fixtures_that_made_it(inner):
    result = inner(
        """
def lost():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

@pytest.fixture(scope="session")
def nested():
    return lost()

@pytest.mark.no_tensor_leaks
def test_uses(nested): pass

@pytest.mark.no_tensor_leaks
def test_leaks():
    kept.append(lost())

@pytest.fixture(scope="session")
def other():
    return lost()

@pytest.mark.no_tensor_leaks
def test_uses_and_leaks(other):
    kept.append(lost())
""",
        "-W",
        "ignore:The PyTorch API of nested tensors",
    )
    result.assert_outcomes(passed=3, errors=2)
    # The 48 bytes of both tests' blocks that nothing in sight explains are leaks, other's are not.
    assert sorted(re.findall(r"(?m)^test_inner.py::(\w+) leaks (\d+) bytes", result.stdout.str())) == [
        ("test_leaks", "68"),
        ("test_uses_and_leaks", "68"),
    ]


def test_what_a_tests_own_fixtures_hold_goes_with_them(process):
    # In this process the outer run's handler would keep the record.
    process(
        START
        + """
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
    ).assert_outcomes(passed=1)


def test_fixture_that_leaks(inner):
    result = inner(
        "@pytest.fixture\ndef x():\n    yield 1\n    kept.append(torch.ones(11))\n"
        "@pytest.mark.no_tensor_leaks\ndef test_it(x): pass\n"
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*leaks 44 bytes of tensors*"])


ASYNC = """
import asyncio, inspect
import pytest, torch

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.function):
        names = pyfuncitem._fixtureinfo.argnames
        asyncio.run(pyfuncitem.obj(**{n: pyfuncitem.funcargs[n] for n in names}))
        return True

async def make():
    x = torch.ones(3)
    await asyncio.sleep(0)
    yield x
    await asyncio.sleep(0)

@pytest.fixture
def awaited():
    loop, made = asyncio.new_event_loop(), make()
    yield loop.run_until_complete(made.__anext__())
    with pytest.raises(StopAsyncIteration):
        loop.run_until_complete(made.__anext__())
    loop.close()
"""
ASYNC_TESTS = """
import asyncio

async def twice(x):
    await asyncio.sleep(0)
    return x * 2

@pytest.mark.no_tensor_leaks
async def test_clean(awaited):
    task = asyncio.ensure_future(twice(awaited))
    y = await task

@pytest.mark.no_tensor_leaks
async def test_leaky(awaited):
    kept.append(await twice(awaited))
"""


def test_async_tests_and_fixtures(inner):
    result = inner(ASYNC_TESTS, conftest=ASYNC)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*test_leaky leaks 12 bytes of tensors*"])


# Exceptions.


def test_failed_tests_are_not_judged_and_say_so(inner):
    result = inner(
        "pytestmark = pytest.mark.no_tensor_leaks\n"
        "def test_fails():\n    x = torch.ones(3)\n    assert x is None\n"
        f"def test_fails_and_leaks():\n    {LEAK}\n    assert False\n"
        "@pytest.fixture\ndef broken():\n    x = torch.ones(3)\n    raise ValueError\n"
        "def test_set_up(broken): pass\n"
        "@pytest.fixture\ndef breaks():\n    x = torch.ones(3)\n    yield\n    raise ValueError\n"
        "def test_teardown(breaks): pass\n"
        "def test_skips():\n    x = torch.ones(3)\n    pytest.skip('now')\n"
        "@pytest.mark.xfail\ndef test_expected():\n    x = torch.ones(3)\n    assert x is None\n"
        "def test_after(): torch.ones(3)\n"
    )
    result.assert_outcomes(passed=2, failed=2, errors=2, skipped=1, xfailed=1)
    said = result.stdout.str()
    assert "bytes of tensors" not in said
    assert said.count("not judged: the test raised") == 4


def test_exceptions_that_a_test_expects_are_no_leaks(inner):
    inner(
        """
pytestmark = pytest.mark.no_tensor_leaks

def raises():
    x = torch.ones(3)
    raise ValueError(f"of {x}")

def test_raises():
    y = torch.ones(4)
    with pytest.raises(ValueError):
        raises()

def test_raises_as():
    y = torch.ones(4)
    with pytest.raises(ValueError) as caught:
        raises()
    assert "of" in str(caught.value)

def test_except():
    y = torch.ones(4)
    try:
        raises()
    except ValueError as error:
        assert "of" in str(error)
"""
    ).assert_outcomes(passed=3)


def test_exception_that_is_kept_is_a_leak(inner):
    result = inner(
        "@pytest.mark.no_tensor_leaks\ndef test_it():\n    x = torch.ones(13)\n"
        "    try:\n        raise ValueError\n    except ValueError as error:\n        kept.append(error)\n"
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*leaks 52 bytes of tensors*"])


def test_an_expected_failure_hides_no_leak(inner):
    result = inner(f"@pytest.mark.xfail(reason='numbers')\n@pytest.mark.no_tensor_leaks\ndef test_it():\n    {LEAK}\n")
    result.assert_outcomes(xpassed=1, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_it*", "*leaks 60 bytes of tensors*"])


@pytest.mark.parametrize("raises", ["TensorLeakError", "(ValueError, TensorLeakError)"])
def test_a_leak_that_is_expected_by_its_name(inner, raises):
    inner(
        "from zbpipe.leaks import TensorLeakError\n"
        f"@pytest.mark.xfail(raises={raises})\n@pytest.mark.no_tensor_leaks\ndef test_it():\n    {LEAK}\n"
    ).assert_outcomes(xpassed=1, xfailed=1)


def test_the_collector_is_what_it_was_after_every_outcome(inner):
    inner(
        "import gc\npytestmark = pytest.mark.no_tensor_leaks\n"
        "def test_before(): assert gc.get_threshold()[0] == 0\n"
        "def test_fails(): assert False\n"
        "def test_exits():\n    pytest.exit('enough')\n"
    )
    assert collects()


def test_workers_of_xdist_judge_their_own_tests(process):
    pytest.importorskip("xdist")
    source = START + (
        "@pytest.mark.parametrize('i', range(6))\ndef test_it(i):\n    x = torch.ones(9)\n    if i % 2:\n        kept.append(x)\n"
    )
    result = process(source, "-p", "xdist", "-n", "2", "--dist", "each", "--no-tensor-leaks")
    result.assert_outcomes(passed=12, errors=6)


# What it costs those who do not ask.

IDLE = """
import sys

def test_nothing_was_imported():
    assert not {"torch", "zbpipe", "numpy"} & set(sys.modules)
"""


def test_nothing_is_imported_until_a_test_asks(process):
    process(IDLE).assert_outcomes(passed=1)


def test_asked_for_it_is_imported(process):
    """So that the test above cannot pass for want of a plugin."""
    process(IDLE, "--no-tensor-leaks").assert_outcomes(failed=1)


def test_deselected_tests_do_not_ask(process):
    process(
        IDLE + "import pytest\n@pytest.mark.no_tensor_leaks\ndef test_other(): pass\n", "-k", "nothing"
    ).assert_outcomes(passed=1, deselected=1)


def test_it_is_installed_for_pytest_to_find():
    text = (HOOK.parent / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\nzbpipe_pytest = "zbpipe_pytest"\n' in text
    assert (HOOK / "zbpipe_pytest.py").exists()
    assert zbpipe.leaks.pytest_plugin.__name__ in (HOOK / "zbpipe_pytest.py").read_text()
