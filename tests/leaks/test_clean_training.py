"""Training that keeps what training keeps: nothing of it grows, and nothing of it is said to."""

import pytest
from leaks import trainings, trainings_of_torch

from zbpipe.leaks import Growth

STEPS = 200
LOOKS = {10, 23, 41, 67, 130}  # as the command looks; what is not full yet may look as if it grew

KINDS = [
    kind
    for module in (trainings, trainings_of_torch)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, trainings.Run) and kind.__module__ == module.__name__
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning",
    "ignore:.torch.jit.* is deprecated:DeprecationWarning",  # forward mode's own
    "ignore:Anomaly Detection has been enabled",
    "ignore:Warning. Profiler clears events",
)
def test_nothing_grows(kind):
    run = kind()
    try:
        for _ in range(2):
            run.step()
        with Growth() as growth:
            for _ in range(STEPS):
                run.step()
                growth.step()
                if len(growth.counts) in LOOKS:
                    growth.grown()
            assert growth.grown() == [], growth.table()
    finally:
        run.close()


def test_the_same_with_a_leak_grows():
    run, kept = trainings.RandomLengths(), []
    with Growth() as growth:
        for _ in range(80):
            kept.append(run.step())
            growth.step()
        (group,) = growth.grown()
        assert "variable kept of " in "".join(group.held_by)
