import pytest


@pytest.fixture(autouse=True)
def _nothing_kept(request):
    """What a test has put into its module's KEPT is let go of after it."""
    yield
    getattr(request.module, "KEPT", []).clear()
