import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "autograd")]
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """The compiler warns of what it itself deprecates."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            for category in ("DeprecationWarning", "UserWarning", "FutureWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}:torch"))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
