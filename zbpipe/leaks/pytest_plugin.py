"""What the pytest plugin does for tests that ask for it. Its option, marker and fixture: _zbpipe_hook/plugin.py.

A test is watched from before its set-up until after its teardown, so what its fixtures own is no leak. A leak is an
error of the teardown. No leak is what fixtures of a wider scope (class, module, package, session) made, in whichever
test they were set up, and what their values have gained since: a parameter's ``.grad``, an entry in a collection at
most four deep. A test that failed is not judged, and its report says so: pytest keeps its traceback, which holds the
frames' variables.
"""

import contextlib
import traceback
import warnings
import weakref
from collections.abc import Generator
from typing import Any

import pytest

from zbpipe._formatting import argument
from zbpipe.leaks import _allow
from zbpipe.leaks._check import TensorLeakError, TensorLeakWarning, check_tensor_leak
from zbpipe.leaks._judge import living
from zbpipe.leaks._report import Report

NOT_JUDGED = "not judged: the test raised, and its traceback keeps the frames that it went through, with their tensors"
ACTIONS = ("error", "warn", "ignore")

_Wrapper = Generator[None, Any, Any]
_Failed: Any = pytest.fail.Exception


class _Leaked(_Failed, TensorLeakError):  # type: ignore[misc]
    """A test's leaks, for pytest to report without a traceback; an xfail marker may name it by TensorLeakError."""

    def __init__(self, text: str, report: Report) -> None:
        _Failed.__init__(self, text, pytrace=False)
        self.report = report


def _is_asked_for(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("no_tensor_leaks")
    asked = item.config.getoption("no_tensor_leaks") if marker is None else marker.kwargs.get("action") != "ignore"
    return bool(asked) or "no_tensor_leaks" in getattr(item, "fixturenames", ())


class _Watch:
    """A test under way: what it is allowed to leave, and whether it can be judged."""

    def __init__(self, item: pytest.Item) -> None:
        marker = item.get_closest_marker("no_tensor_leaks")
        given = {} if marker is None else marker.kwargs
        arguments = {name: value for name, value in given.items() if name not in ("allow", "action")}
        self.action: str = given.get("action", "error")
        try:
            if marker is not None and marker.args:
                raise TypeError("an argument was given without its name; write action='warn', say")
            if self.action not in ACTIONS:
                raise ValueError(f"action is {argument(self.action)}; expected one of {', '.join(ACTIONS)}")
            self.allowed: list[Any] = [_allow.checked("record", given.get("allow", ()))]
            # The check looks into what is allowed when it is left.
            self.check: Any = check_tensor_leak(action="record", allow=[self.allowed], **arguments)
        except (TypeError, ValueError) as error:
            takes = "the marker no_tensor_leaks takes allow, trace and action"
            raise pytest.UsageError(f"{item.nodeid}: {takes}: {error}") from None
        if "allow" in given:  # an iterator's list for the next test too, which shares the marker
            given["allow"] = self.allowed[0]  # type: ignore[index]
        self.wide = item.session.stash.setdefault(_wide, weakref.WeakSet())
        self.raised = False
        self.check.__enter__()

    def end(self) -> Report | None:
        """Leave the check. Returns its report, or None if there is nothing to judge or it was left before."""
        check, self.check = self.check, None
        if check is None:
            return None
        for definition in list(self.wide):
            cached = definition.cached_result
            if cached is not None and cached[2] is None:
                self.allowed += _allow.tensors_in(cached[0], is_wide=True)
        check.__exit__(None, None, None)
        self.allowed.clear()
        return None if self.raised else check.report


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
            found = [_allow.checked("record", thing) for thing in things]
        except TypeError as error:
            raise TypeError(f"{self._item.nodeid}: no_tensor_leaks.allow(): {error}") from None
        self._item.stash[_watch].allowed += found


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
            warning = TensorLeakWarning(report)
            warning.args = (_text(item, report),)
            path, line, _ = item.reportinfo()
            warnings.warn_explicit(warning, None, str(path), (line or 0) + 1)
        elif report and watch.action == "error":
            raise _Leaked(_text(item, report), report)
    return result


def _text(item: pytest.Item, report: Report) -> str:
    return (
        f"{item.nodeid} leaks {report.bytes} bytes of tensors: it allocated them, its fixtures do not own them, and no "
        f"reference count has freed them\n{report}"
    )


def _let_go(item: pytest.Item) -> None:
    """Let go of what pytest itself still has of a test that passed."""
    code = getattr(getattr(item, "function", None), "__code__", None)
    if getattr(item, "funcargs", None):
        item.funcargs.clear()  # type: ignore[attr-defined]
    if getattr(item, "_instance", None) is not None:  # of a test class: pytest would keep it to the end of the run
        item._obj = None  # type: ignore[attr-defined]
        del item._instance  # type: ignore[attr-defined]
    for info in living(pytest.ExceptionInfo):
        # `with pytest.raises(...) as e`: e holds a traceback, that the test's frame, and that e.
        if info._excinfo is not None and any(frame.f_code is code for frame, _ in traceback.walk_tb(info.tb)):
            traceback.clear_frames(info.tb)
