import pytest
import torch


@pytest.fixture(autouse=True)
def _nothing_is_a_race(request):
    """Of the cases, which have a process of their own: nothing is left over from before, and what streams order is ordered."""
    if not request.path.name.endswith("_cases.py"):
        yield
        return
    from support import late

    late.begin()
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # of a weight on several streams
    yield
    late.finish()
    found = late.races()
    assert "plants" in request.fixturenames or not found, found


@pytest.fixture
def plants():
    """Of a test that plants faults and looks at the races itself."""
