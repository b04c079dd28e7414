"""Training that keeps what training keeps: nothing of it grows, and nothing of it is said to."""

import contextlib

import pytest
from leaks.trainings import TRAININGS, Run

from zbpipe.leaks import Growth

STEPS = 200
LOOKS = {10, 23, 41, 67, 130}  # as the command looks; what is not full yet may look as if it grew


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning",
    "ignore:.torch.jit.* is deprecated:DeprecationWarning",  # forward mode's own
    "ignore:Anomaly Detection has been enabled",
    "ignore:Warning. Profiler clears events",
)
def test_nothing_grows(name):
    with contextlib.closing(TRAININGS[name](Run())) as steps:
        for _ in range(2):
            next(steps)
        with Growth() as growth:
            for _ in range(STEPS):
                next(steps)
                growth.step()
                if len(growth.counts) in LOOKS:
                    growth.grown()
            assert growth.grown() == [], growth.table()


def test_the_same_with_a_leak_grows():
    steps, kept = TRAININGS["random lengths"](Run()), []
    with Growth() as growth:
        for _ in range(80):
            kept.append(next(steps))
            growth.step()
        (group,) = growth.grown()
        assert "variable kept of " in "".join(group.held_by)
