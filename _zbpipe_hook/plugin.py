"""The part of zbpipe's pytest plugin that every run of pytest loads: options, marker, fixture.

It lies outside the package, since any import of zbpipe imports torch. zbpipe/leaks/pytest_plugin.py is the rest, which
is imported when a collected test asks for the check.
"""

import importlib

import pytest

CHECKS = "zbpipe.leaks.pytest_plugin"
MARKER = (
    "no_tensor_leaks(allow=(), trace=False, action='error'): fail the test if a tensor that it allocates outlives "
    "it and its fixtures; allow: tensors, modules, optimizers, predicates; trace: say where tensors were created; "
    "action: 'error', 'warn', or 'ignore' to leave a test out of --no-tensor-leaks"
)


def pytest_addoption(parser):
    group = parser.getgroup("zbpipe")
    group.addoption(
        "--no-tensor-leaks",
        action="store_true",
        help="check every test as if it had the marker no_tensor_leaks",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", MARKER)


def pytest_collection_finish(session):
    if session.items and (session.config.getoption("no_tensor_leaks") or any(asks(item) for item in session.items)):
        load(session.config)


def asks(item):
    return item.get_closest_marker("no_tensor_leaks") or "no_tensor_leaks" in getattr(item, "fixturenames", ())


def load(config):
    """Imports and registers the check, which imports torch."""
    try:
        checks = importlib.import_module(CHECKS)
    except ImportError as error:
        raise pytest.UsageError(f"no_tensor_leaks cannot import {CHECKS}: {error}") from error
    if not config.pluginmanager.is_registered(checks):
        config.pluginmanager.register(checks, CHECKS)
    return checks


@pytest.fixture
def no_tensor_leaks(request):
    """Checks the test as the marker no_tensor_leaks does. `no_tensor_leaks.allow(x)`: x is no leak."""
    return load(request.config).TensorLeaks(request.node)
