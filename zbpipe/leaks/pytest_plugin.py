"""What the pytest plugin does for tests that ask for it. Its option, marker and fixture: hook/zbpipe_pytest.py.

A test is watched from before its set-up until after its teardown, so that what its fixtures own is no leak; what leaks
is an error of the teardown. Not leaks are:

- what fixtures of a wider scope (class, module, package, session) made, in whichever test they were set up, and what
  their values have gained since: a parameter's ``.grad``, an entry in a cache;
- what a failed test leaves: its traceback, which pytest keeps, holds the frames and their variables. Such a test is not
  judged, and its report says so.

An xfail marker is about what the test does: a leak of a test that passed unexpectedly is an error all the same, unless
the marker's ``raises`` names TensorLeakError.

Processes share nothing: under pytest-xdist each worker judges its own tests.
"""

import contextlib
import gc
import traceback
import warnings
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from zbpipe._formatting import argument
from zbpipe.leaks import _allow
from zbpipe.leaks._check import TensorLeakError, TensorLeakWarning, check_tensor_leak
from zbpipe.leaks._report import Report

NOT_JUDGED = "not judged: the test raised, and its traceback keeps the frames that it went through, with their tensors"
DEPTH = 4  # of containers in a fixture's value, within which tensors are the fixture's
ACTIONS = ("error", "warn", "ignore")
ARGUMENTS = ("allow", "trace", "device", "action")

_Wrapper = Generator[None, Any, Any]
_Failed: Any = pytest.fail.Exception


class _Leaked(_Failed, TensorLeakError):  # type: ignore[misc]
    """A test's leaks, for pytest to report without a traceback; an xfail marker may name it by TensorLeakError."""

    def __init__(self, text: str, report: Report) -> None:
        _Failed.__init__(self, text, pytrace=False)
        self.report = report


def _is_asked_for(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("no_tensor_leaks")
    if "no_tensor_leaks" in getattr(item, "fixturenames", ()):
        return True
    asked = item.config.getoption("no_tensor_leaks") if marker is None else marker.kwargs.get("action") != "ignore"
    return bool(asked)


def _arguments_of(item: pytest.Item) -> dict[str, Any]:
    """The closest marker's arguments. Raises UsageError."""
    marker = item.get_closest_marker("no_tensor_leaks")
    if marker is None:
        return {}
    fault = ""
    unknown = [*map(argument, marker.args), *(name for name in marker.kwargs if name not in ARGUMENTS)]
    action = marker.kwargs.get("action", "error")
    if unknown:
        fault = f"{', '.join(unknown)}, but takes only the keywords {', '.join(ARGUMENTS)}"
    elif action not in ACTIONS:
        fault = f"action={argument(action)}; give one of {', '.join(ACTIONS)}"
    else:
        try:
            allow = _allow.checked("record", marker.kwargs.get("allow", ()), marker.kwargs.get("device"))
            marker.kwargs["allow"] = allow  # type: ignore[index]  # an iterator for the next test too, which shares it
        except (TypeError, ValueError, RuntimeError) as error:
            fault = f"a wrong argument: {error}"
    if fault:
        raise pytest.UsageError(f"{item.nodeid}: the marker no_tensor_leaks was given {fault}")
    return dict(marker.kwargs)


class _Watch:
    """A test under way: what it is allowed to leave, and whether it can be judged."""

    def __init__(self, item: pytest.Item) -> None:
        arguments = _arguments_of(item)
        self.action: str = arguments.pop("action", "error")
        self.allowed: list[Any] = [arguments.pop("allow", ())]  # the check looks into it when it is left
        self.wide = item.session.stash.setdefault(_wide, weakref.WeakSet())
        self.raised = False
        self.check: Any = check_tensor_leak(action="record", allow=[self.allowed], **arguments)
        self.check.__enter__()

    def end(self) -> Report | None:
        """Leave the check. Returns its report, or None if there is nothing to judge or it was left before."""
        check, self.check = self.check, None
        if check is None:
            return None
        for definition in list(self.wide):
            cached = definition.cached_result
            if cached is not None and cached[2] is None:
                self.allowed += _allow.tensors_in(cached[0], DEPTH)
        check.__exit__(None, None, None)
        self.allowed.clear()
        report: Report = check.report
        return None if self.raised else report


_wide = pytest.StashKey["weakref.WeakSet[Any]"]()  # definitions of fixtures of a wider scope than a test
_watch = pytest.StashKey[_Watch]()


class TensorLeaks:
    """What the fixture ``no_tensor_leaks`` gives a test."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        if _watch not in item.stash:  # the fixture was asked for by name, in the middle of the test
            item.stash[_watch] = _Watch(item)

    def allow(self, *things: Any) -> None:
        """Say that tensors are no leaks of this test.

        Args:
            things: tensors, modules, optimizers, containers or iterators of these, or predicates (tensor -> bool).

        Raises:
            TypeError: one of them is none of these; then none is allowed.
        """
        try:
            found = [_allow.checked("record", thing, None) for thing in things]
        except TypeError as error:
            raise TypeError(f"{self._item.nodeid}: no_tensor_leaks.allow(): {error}") from None
        self._item.stash[_watch].allowed += found

    @contextlib.contextmanager
    def check(self, action: str = "error", **options: Any) -> Iterator[Any]:
        """Check a part of the test, as :func:`zbpipe.leaks.check_tensor_leak`.

        Raises TensorLeakError, which has the report, if `action` is "error" and tensors leak.
        """
        _allow.checked(action, (), None)
        with check_tensor_leak(action="record", **options) as check:
            yield check
        if check.report and action == "warn":
            _warn(self._item, check.report)
        elif check.report and action == "error":
            error = TensorLeakError(check.report)
            error.args = (_text(self._item, check.report),)
            raise error


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> _Wrapper:
    try:
        return (yield)
    finally:
        if _watch in item.stash:  # after a test that was interrupted the collector must be what it was
            item.stash[_watch].raised = True
            item.stash[_watch].end()
            del item.stash[_watch]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> _Wrapper:
    refused = None
    try:
        if _is_asked_for(item):
            item.stash[_watch] = _Watch(item)
    except Exception as error:  # raised when the other plugins, which rely on each other's set-up, have had theirs
        refused = error
    result = yield
    if refused is not None:
        raise refused
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> _Wrapper:
    if fixturedef.scope == "function":
        return (yield)
    request.session.stash.setdefault(_wide, weakref.WeakSet()).add(fixturedef)
    watch = request._pyfuncitem.stash.get(_watch, None)
    with contextlib.nullcontext() if watch is None or watch.check is None else watch.check._exempted():
        return (yield)


# Outside of the wrapper that makes failures of tests marked xfail expected ones.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, _Leaked):
        if hasattr(report, "wasxfail") and not _expects_leaks(item):
            report.outcome = "failed"
            del report.wasxfail
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None:  # a line to the summary at the end, which under CI prints messages whole a second time
            first = crash.message.partition("\n")[0]
            crash.message = first.partition(f"{item.nodeid} ")[2] or first
        return report
    watch = item.stash.get(_watch, None)
    if call.excinfo is not None and watch is not None and watch.check is not None and not watch.raised:
        watch.raised = True
        if report.failed:
            report.sections.append(("tensor leaks", NOT_JUDGED))
    return report


# First of the wrappers, hence last to go on: when fixtures are torn down, and what others keep of the test is gone.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> _Wrapper:
    result = yield
    watch = item.stash.get(_watch, None)
    if watch is not None:
        if not watch.raised:
            _let_go(item)
        report = watch.end()
        if report and watch.action == "warn":
            _warn(item, report)
        elif report:
            raise _Leaked(_text(item, report), report)
    return result


def _text(item: pytest.Item, report: Report) -> str:
    return (
        f"{item.nodeid} leaks {report.bytes} bytes of tensors: born in it, and neither gone by reference counts nor "
        f"owned by its fixtures\n{report}"
    )


def _warn(item: pytest.Item, report: Report) -> None:
    warning = TensorLeakWarning(report)
    warning.args = (_text(item, report),)
    path, line, _ = item.reportinfo()
    warnings.warn_explicit(warning, None, str(path), (line or 0) + 1)


def _expects_leaks(item: pytest.Item) -> bool:
    named = [marker.kwargs.get("raises") for marker in item.iter_markers("xfail")]
    return any(TensorLeakError in (one if isinstance(one, tuple) else (one,)) for one in named)


def _let_go(item: pytest.Item) -> None:
    """Let go of what pytest itself still has of a test that passed."""
    code = getattr(getattr(item, "function", None), "__code__", None)
    if getattr(item, "funcargs", None):
        item.funcargs.clear()  # type: ignore[attr-defined]
    if getattr(item, "_instance", None) is not None:  # of a test class: pytest would keep it to the end of the run
        item._obj = None  # type: ignore[attr-defined]
        del item._instance  # type: ignore[attr-defined]
    for thing in gc.get_objects():
        # `with pytest.raises(...) as e`: e holds a traceback, that the test's frame, and that e.
        filled = type(thing) is pytest.ExceptionInfo and thing._excinfo is not None
        if filled and any(frame.f_code is code for frame, _ in traceback.walk_tb(thing.tb)):
            traceback.clear_frames(thing.tb)
