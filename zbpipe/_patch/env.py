"""patch()'s variables in the environment."""

import os

RELEASE_OUTPUTS = "ZBPIPE_RELEASE_OUTPUTS"
ON = ("1", "true", "yes")
OFF = ("", "0", "false", "no")


def release_outputs() -> bool:
    """The default of patch()'s ``release_outputs``. Raises RuntimeError for a value that is neither on nor off."""
    said = os.environ.get(RELEASE_OUTPUTS, "").strip().lower()
    if said not in ON and said not in OFF:
        raise RuntimeError(f"{RELEASE_OUTPUTS} is {said!r}: set it to 1 to release outputs, or to 0 not to.")
    return said in ON
