import sys
from pathlib import Path

import pytest
import torch

for folder in ("autograd", "schedules", "leaks"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
torch.set_num_threads(1)  # the tensors are tiny; a pool of threads costs a hundred times what it saves


@pytest.fixture(autouse=True)
def _same_numbers_every_run():
    torch.manual_seed(0)
