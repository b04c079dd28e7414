import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # the tensors are tiny; a pool of threads costs a hundred times what it saves


@pytest.fixture(autouse=True)
def _same_numbers_every_run():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """torch.compile stops compiling a function that other tests of the process have had compiled often enough."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
