"""What the marker, the option and the fixture ask for."""

from typing import Any

import pytest

from zbpipe._formatting import argument
from zbpipe.leaks import _allow

ACTIONS = ("error", "warn", "ignore")
ARGUMENTS = ("allow", "trace", "device", "action")


def is_asked_for(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("no_tensor_leaks")
    if marker is not None and marker.kwargs.get("action") == "ignore":
        return "no_tensor_leaks" in getattr(item, "fixturenames", ())
    return bool(
        marker is not None
        or "no_tensor_leaks" in getattr(item, "fixturenames", ())
        or item.config.getoption("no_tensor_leaks")
    )


def arguments_of(item: pytest.Item) -> dict[str, Any]:
    """The closest marker's arguments. Raises UsageError."""
    marker = item.get_closest_marker("no_tensor_leaks")
    if marker is None:
        return {}
    unknown = [*map(argument, marker.args), *(name for name in marker.kwargs if name not in ARGUMENTS)]
    if unknown:
        raise pytest.UsageError(
            f"{item.nodeid}: the marker no_tensor_leaks was given {', '.join(unknown)}, but takes only the keywords "
            f"{', '.join(ARGUMENTS)}"
        )
    action = marker.kwargs.get("action", "error")
    if action not in ACTIONS:
        raise pytest.UsageError(
            f"{item.nodeid}: the marker no_tensor_leaks was given action={argument(action)}; give one of "
            f"{', '.join(ACTIONS)}"
        )
    arguments = dict(marker.kwargs)
    try:
        arguments["allow"] = _allow.checked("record", arguments.get("allow", ()), arguments.get("device"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise pytest.UsageError(
            f"{item.nodeid}: the marker no_tensor_leaks was given a wrong argument: {error}"
        ) from None
    marker.kwargs.update(arguments)  # type: ignore[attr-defined]  # an iterator for the next test too, which shares it
    return arguments
