from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    """The compiler warns of what it itself deprecates."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            for category in ("DeprecationWarning", "UserWarning", "FutureWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}:torch"))
