"""What the passes hold in memory, counted exactly.

:func:`held` says what parameter groups hold between I and W, by parameter, module and kind of tensor::

    dinputs, groups = zbpipe.stage_backward_input(...)
    print(zbpipe.memory.held(groups, module))

:func:`record` follows every block that an allocator hands out and takes back, on all threads, with the
phases of a step (forward, I, W) marked in it::

    with zbpipe.memory.record() as rec:
        rec.watch(schedule)
        schedule.step(x)
    print(rec)
    rec.plot("step.png")
    rec.export("step.json.gz")   # for Perfetto, chrome://tracing

Nothing is sampled, and nothing that is watched is kept alive.
"""

from zbpipe.memory._held import Held, HeldStorage, ParameterRow, held
from zbpipe.memory._record import phase, record
from zbpipe.memory._recording import Recording
from zbpipe.memory._results import Allocation, HeldMicrobatch, Phase

__all__ = [
    "Allocation",
    "Held",
    "HeldMicrobatch",
    "HeldStorage",
    "ParameterRow",
    "Phase",
    "Recording",
    "held",
    "phase",
    "record",
]
