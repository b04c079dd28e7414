"""What the environment says to patch()."""

import os

RELEASE_OUTPUTS = "ZBPIPE_RELEASE_OUTPUTS"
FILL_WAITS = "ZBPIPE_FILL_WAITS"
ON = ("1", "true", "yes")
OFF = ("", "0", "false", "no")


def release_outputs() -> bool:
    """What holds when nobody said anything. Raises RuntimeError for a value that is neither on nor off."""
    return _is_on(RELEASE_OUTPUTS, "release outputs")


def fill_waits() -> bool:
    """As release_outputs()."""
    return _is_on(FILL_WAITS, "fill waits")


def _is_on(name: str, what: str) -> bool:
    said = os.environ.get(name, "").strip().lower()
    if said not in ON and said not in OFF:
        raise RuntimeError(f"{name} is {said!r}: set it to 1 to {what}, or to 0 not to.")
    return said in ON
