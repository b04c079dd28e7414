import os
from pathlib import Path

import pytest
import torch

import zbpipe


def pytest_report_header():
    return f"zbpipe: {Path(zbpipe.__file__).parent}, torch: {torch.__version__}"


def pytest_sessionstart():
    """With ZBPIPE_UNDER set (make asan), refuse to test any other zbpipe than the one built there."""
    expected = os.environ.get("ZBPIPE_UNDER")
    if expected and not Path(zbpipe.__file__).is_relative_to(Path(expected).resolve()):
        raise pytest.UsageError(f"zbpipe comes from {zbpipe.__file__}, not from under {expected}")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
