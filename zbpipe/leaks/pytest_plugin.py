"""What the pytest plugin does for tests that ask for it. Its options, marker and fixture: hook/zbpipe_pytest.py.

A test is watched from before its set-up until after its teardown, so that what its fixtures own is no leak; what leaks
is an error of the teardown. Not leaks are:

- what fixtures of a wider scope (class, module, package, session) made, in whichever test they were set up, and what
  their values have gained since: a parameter's ``.grad``, an entry in a cache;
- what a failed test leaves: its traceback, which pytest keeps, holds the frames and their variables. Such a test is not
  judged, and its report says so.

An xfail marker is about what the test does: a leak of a test that passed unexpectedly is an error all the same, unless
the marker's ``raises`` names TensorLeakError.

Processes share nothing: under pytest-xdist each worker judges its own tests, and names its pictures by its own name.
"""

import contextlib
import functools
import gc
import hashlib
import importlib.util
import itertools
import re
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zbpipe import _C
from zbpipe.leaks import Report, TensorLeakError, TensorLeakWarning, check_tensor_leak
from zbpipe.leaks._check import _checked_allow
from zbpipe.leaks._report import Leak
from zbpipe.leaks._search import storages_now

ACTIONS = ("error", "warn", "ignore")
ARGUMENTS = ("allow", "trace", "device", "action")
NOT_JUDGED = "not judged: the test raised, and its traceback keeps the frames that it went through, with their tensors"
DEPTH = 4  # of containers in a fixture's value, within which tensors are the fixture's

_Wrapper = Generator[None, Any, Any]


_Failed: Any = pytest.fail.Exception


class _Leaked(_Failed, TensorLeakError):  # type: ignore[misc]
    """A test's leaks, for pytest to report without a traceback; an xfail marker may name it by TensorLeakError."""

    def __init__(self, text: str, report: Report) -> None:
        _Failed.__init__(self, text, pytrace=False)
        self.report = report


class _Wide:
    """Fixtures of a wider scope than a test."""

    def __init__(self) -> None:
        self.definitions: weakref.WeakSet[Any] = weakref.WeakSet()

    def values(self) -> Iterator[Any]:
        for definition in list(self.definitions):
            cached = definition.cached_result
            if cached is not None and cached[2] is None:
                yield cached[0]


class _OfFixtures:
    """What fixtures of a wider scope made while one test was watched: no leaks of that test.

    A storage is known by its identity, which a weak reference keeps from being given to another one. A block of CPU
    memory that no tensor in sight explains is known by its serial, which none gets twice.
    """

    def __init__(self) -> None:
        self._storages: set[int] = set()
        self._references: list[object] = []
        self._serials: list[range] = []
        self._unexplained: Counter[tuple[str, int]] = Counter()  # blocks by device and bytes

    def add(self, report: Report, since: int) -> None:
        """A fixture was set up, from the block with that serial on, and this was left."""
        self._references.append(storages_now())
        self._storages |= {leak.storage for leak in report.leaks if leak.storage}
        self._serials.append(range(since, _C.next_serial()))
        # Of CUDA's blocks sizes alone are known; and the collector, which ran at the check's end, ran in the test.
        self._unexplained.update(
            (leak.device, leak.bytes)
            for leak in report.leaks
            if (not leak.storage and leak.device != "cpu") or leak.fate != "alive"
        )

    def look(self) -> None:
        """The test has ended, and will be judged: look which blocks in question still live."""
        if not self._serials:
            return
        in_sight = {address for _, address, _, _ in _C.storage_spans(storages_now())}
        self._unexplained.update(
            ("cpu", size)
            for address, size, serial in _C.live_blocks(0)
            if address not in in_sight and any(serial in serials for serials in self._serials)
        )

    def without(self, leaks: list[Leak]) -> list[Leak]:
        """The leaks but for the fixtures'."""
        left = self._unexplained.copy()
        return [leak for leak in leaks if not self._owns(leak, left)]

    def _owns(self, leak: Leak, left: Counter[tuple[str, int]]) -> bool:
        if leak.storage:
            return leak.storage in self._storages
        left[leak.device, leak.bytes] -= 1
        return left[leak.device, leak.bytes] >= 0


class _Watch:
    """A test under way: what it is allowed to leave, and whether it can be judged."""

    def __init__(self, item: pytest.Item) -> None:
        arguments = _arguments(item)
        self.action: str = arguments.pop("action", "error")
        self.allowed: list[Any] = [arguments.pop("allow", ())]  # the check looks into it when it is left
        self.wide = item.session.stash[_wide]
        self.of_fixtures = _OfFixtures()
        self.raised = False
        self.check: Any = check_tensor_leak(action="record", allow=[self.allowed], **arguments)
        self.check.__enter__()

    def end(self) -> Report | None:
        """Leave the check. Returns its report, or None if there is nothing to judge or it was left before."""
        check, self.check = self.check, None
        if check is None:
            return None
        self.allowed.append([t for value in self.wide.values() for t in _tensors(value, DEPTH)])
        self.of_fixtures.look()
        check.__exit__(None, None, None)
        self.allowed.clear()
        report: Report = check.report
        report.leaks = self.of_fixtures.without(report.leaks)
        return None if self.raised else report


_wide = pytest.StashKey[_Wide]()
_watch = pytest.StashKey[_Watch]()


class TensorLeaks:
    """What the fixture ``tensor_leaks`` gives a test."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        if _watch not in item.stash:  # the fixture was asked for by name, in the middle of the test
            _begin(item)

    def allow(self, *things: Any) -> None:
        """Say that tensors are no leaks of this test.

        Args:
            things: tensors, modules, optimizers, containers or iterators of these, or predicates (tensor -> bool).

        Raises:
            TypeError: one of them is none of these; then none is allowed.
        """
        things = tuple(map(_at_once, things))
        try:
            for thing in things:
                _checked_allow("record", thing, None)
        except TypeError as error:
            raise TypeError(f"{self._item.nodeid}: tensor_leaks.allow(): {error}") from None
        self._item.stash[_watch].allowed += things

    @contextlib.contextmanager
    def check(self, action: str = "error", **options: Any) -> Iterator[Any]:
        """Check a part of the test, as :func:`zbpipe.leaks.check_tensor_leak` with pictures where the test's go.

        Raises TensorLeakError, which has the report, if `action` is "error" and tensors leak.
        """
        if action not in ("error", "warn", "record"):
            raise ValueError(f"action is {action!r}; give 'error', 'warn' or 'record'")
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
    item.session.stash.setdefault(_wide, _Wide())
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
            _begin(item)
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
    wide = request.session.stash.setdefault(_wide, _Wide())
    wide.definitions.add(fixturedef)
    if not _watched(request):
        return (yield)
    since = _C.next_serial()
    with check_tensor_leak(action="record") as check:
        result = yield
    request._pyfuncitem.stash[_watch].of_fixtures.add(check.report, since)  # type: ignore[arg-type]
    return result


# Outside of the wrapper that makes failures of tests marked xfail expected ones.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, _Leaked):
        if hasattr(report, "wasxfail") and not _expects_leaks(item):
            report.outcome = "failed"
            del report.wasxfail
        _shorten(report, item)
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
    if _watch in item.stash:
        watch = item.stash[_watch]
        if not watch.raised:
            _let_go(item)
        report = watch.end()
        if report:
            if watch.action == "warn":
                _warn(item, report)
            else:
                raise _Leaked(_text(item, report), report)
    return result


def _shorten(report: Any, item: pytest.Item) -> None:
    """Leaves one line to the summary at the end, which under CI prints messages whole a second time."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        first = crash.message.partition("\n")[0]
        crash.message = first.partition(f"{item.nodeid} ")[2] or first


def _expects_leaks(item: pytest.Item) -> bool:
    def names_it(raises: Any) -> bool:
        return any(map(names_it, raises)) if isinstance(raises, tuple) else raises is TensorLeakError

    return any(names_it(marker.kwargs.get("raises")) for marker in item.iter_markers("xfail"))


def _is_asked_for(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("no_tensor_leak")
    if marker is not None and marker.kwargs.get("action") == "ignore":
        return "tensor_leaks" in getattr(item, "fixturenames", ())
    config = item.config
    return bool(
        marker is not None
        or "tensor_leaks" in getattr(item, "fixturenames", ())
        or config.getoption("no_tensor_leaks")
        or config.getini("no_tensor_leaks")
    )


def _arguments(item: pytest.Item) -> dict[str, Any]:
    """The closest marker's arguments. Raises UsageError."""
    marker = item.get_closest_marker("no_tensor_leak")
    if marker is None:
        return {}
    unknown = [*map(repr, marker.args), *(name for name in marker.kwargs if name not in ARGUMENTS)]
    if unknown:
        raise pytest.UsageError(
            f"{item.nodeid}: the marker no_tensor_leak was given {', '.join(unknown)}, but takes only the keywords "
            f"{', '.join(ARGUMENTS)}"
        )
    action = marker.kwargs.get("action", "error")
    if action not in ACTIONS:
        raise pytest.UsageError(
            f"{item.nodeid}: the marker no_tensor_leak was given action={action!r}; give one of {', '.join(ACTIONS)}"
        )
    arguments = {name: _at_once(value) for name, value in marker.kwargs.items()}
    marker.kwargs.update(arguments)  # type: ignore[attr-defined]  # an iterator for the next test too, which shares it
    try:
        _checked_allow("record", arguments.get("allow", ()), arguments.get("device"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise pytest.UsageError(
            f"{item.nodeid}: the marker no_tensor_leak was given a wrong argument: {error}"
        ) from None
    return arguments


def _at_once(thing: Any) -> Any:
    """An iterator, as of a module's parameters(), can be looked into once: its list."""
    return list(thing) if issubclass(type(thing), Iterator) else thing


def _begin(item: pytest.Item) -> None:
    item.session.stash.setdefault(_wide, _Wide())
    item.stash[_watch] = _Watch(item)


def _watched(request: pytest.FixtureRequest) -> bool:
    item = request._pyfuncitem
    return _watch in item.stash and item.stash[_watch].check is not None


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


def _text(item: pytest.Item, report: Report) -> str:
    text = (
        f"{item.nodeid} leaks {report.bytes} bytes of tensors: born in it, and neither gone by reference counts nor "
        f"owned by its fixtures\n{report}"
    )
    return text + "".join(f"\npicture: {path}" for path in _draw(item, report))


def _warn(item: pytest.Item, report: Report) -> None:
    warning = TensorLeakWarning(report)
    warning.args = (_text(item, report),)
    path, line, _ = item.reportinfo()
    warnings.warn_explicit(warning, None, str(path), (line or 0) + 1)


def _draw(item: pytest.Item, report: Report) -> list[Path]:
    """Write the pictures: the one to click through, and the one to look at if matplotlib is there."""
    config = item.config
    chosen = config.getoption("tensor_leak_pictures")
    if chosen:
        folder = Path(config.invocation_params.dir, chosen)
    elif config.getini("tensor_leak_pictures"):
        folder = Path(config.rootpath, config.getini("tensor_leak_pictures"))
    else:
        folder = config._tmp_path_factory.getbasetemp() / "tensor-leaks"  # type: ignore[attr-defined]
    folder.mkdir(parents=True, exist_ok=True)
    suffixes = [".html", ".png"] if importlib.util.find_spec("matplotlib") else [".html"]
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


def _tensors(thing: Any, depth: int) -> Iterator[torch.Tensor]:
    """The tensors that a fixture's value owns."""
    kind = type(thing)  # not isinstance(): a lazy object's __class__ may run anything
    if issubclass(kind, torch.Tensor):
        yield thing
    elif issubclass(kind, torch.nn.Module):
        yield from (*thing.parameters(), *thing.buffers())
    elif depth == 0 or issubclass(kind, type):
        return
    elif kind is functools._lru_cache_wrapper:
        for value in gc.get_referents(thing):  # its entries, by whatever they are kept in
            yield from _tensors(value, depth - 1)
    elif issubclass(kind, dict):
        for value in [*thing.keys(), *thing.values()]:
            yield from _tensors(value, depth - 1)
    elif issubclass(kind, (list, tuple, set, frozenset)):
        for value in list(thing):
            yield from _tensors(value, depth - 1)
    else:
        # An object's attributes; of an optimizer its state, where that of a parameter is one level deeper.
        with contextlib.suppress(Exception):
            yield from _tensors(object.__getattribute__(thing, "__dict__"), depth)
