import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_numbers_every_run():
    torch.manual_seed(0)
