"""A plugin for pytest (-p support.late_default): what tests make, they make on the device that runs late.

Each weight pass is called on a stream of its own, and nobody waits for anybody: that is the weight pass's business.
"""

import functools

import pytest
import torch

import zbpipe
from support import late


@pytest.fixture(autouse=True)
def _on_the_late_device(monkeypatch):
    plain = zbpipe.stage_backward_weight

    @functools.wraps(plain)
    def on_a_stream_of_its_own(*args, **kwargs):
        with late.stream(torch.accelerator.current_device_index()):
            return plain(*args, **kwargs)

    monkeypatch.setattr(zbpipe, "stage_backward_weight", on_a_stream_of_its_own)
    late.begin("others_first")
    torch.set_default_device("late")
    yield
    torch.set_default_device(None)
    found = late.races()
    late.finish()
    assert not found, found
