"""What the passes hold in memory, counted exactly.

:func:`held` says what parameter groups hold between I and W, by parameter, module and kind of tensor. :func:`record`
follows every block that an allocator hands out and takes back, on all threads, with the phases of a step in it.

Nothing is sampled, and nothing that is watched is kept alive.
"""

from __future__ import annotations

import torch

from zbpipe import _C
from zbpipe._formatting import argument
from zbpipe.memory._cuda import CudaLog
from zbpipe.memory._export import Path
from zbpipe.memory._held import Held, HeldStorage, ParameterRow, held
from zbpipe.memory._log import Allocation, AtPeak, Phase
from zbpipe.memory._recording import Recording

__all__ = ["Allocation", "AtPeak", "Held", "HeldStorage", "ParameterRow", "Phase", "Recording", "held", "record"]


def record(
    device: torch.device | str = "cpu",
    *,
    max_events: int = 4_000_000,
    on_out_of_memory: Path | None = None,
    trace: bool = False,
) -> Recording:
    """Records every block that an allocator hands out and takes back, on all threads, while its with block runs.

    Nothing is sampled, no tensor is kept. On the CPU an allocator of zbpipe's stands in front of torch's meanwhile;
    csrc/instruments/shim/zbp_tap.h says how, and what it does not see. Recordings of the CPU may nest and overlap on
    several threads; each sees all threads. A recording on CUDA uses torch's own allocator history, which serves one
    recording at a time. On entering, a recording looks once at all objects that Python's collector knows, to find
    storages that may grow. A forked child inherits the recording, and counts for itself alone.

    Args:
        device: "cpu", or a CUDA device, whose allocator is recorded.
        max_events: the most events that the log takes, at 48 bytes an event. With more events the log is lost, and
            on the CPU counters and phases stay exact. 0 means no log, which is cheap enough to leave on.
        on_out_of_memory: a folder, made when it is needed. If an allocation on the device fails for want of memory, a
            report is left there when the error leaves the with block: ``rank3.txt``, or ``process4711.txt`` without a
            rank. It says what was asked for, in which phase and on which line. It has all phases, and the ten largest
            tensors since the recording began, each with its holders. Beside it lie the trace and, if matplotlib is
            installed, the picture. One log line of "zbpipe" says where.
        trace: True remembers the line that made each block, at about 0.4 microseconds a block on the CPU, and more
            where the stack is deep. When the block ends, :attr:`Recording.at_peak` is made, which takes seconds: what
            lived at the peak, by phase and line, and who holds it.

    Returns:
        A recording, to be entered once; see :class:`Recording`.

    Raises:
        TypeError, ValueError: another device, or ``max_events`` is no number of events.
        RuntimeError: on entering: the allocator cannot be recorded.

    Example::

        with zbpipe.memory.record() as rec, rec.phase("forward"):
            stage(x)
        print(rec)

    Source:
        ``torch.cuda.memory``'s history and snapshots (pytorch.org/memory_viz), for the CPU, and with the phases in it.
    """
    place = torch.device(device)
    place = torch.device("cpu") if place.type == "cpu" else place  # a tensor's device is never cpu:0
    if not isinstance(max_events, int) or not 0 <= max_events < 2**63:
        refused = ValueError if isinstance(max_events, int) else TypeError
        raise refused(f"max_events is {argument(max_events)}; expected the number of events to keep, or 0 for no log")
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {place}; expected cpu or a CUDA device")
    if trace and max_events == 0:
        raise ValueError("trace is True and max_events is 0; what lived at the peak is read in the log, so keep one")
    log: CudaLog | _C.Recorder = _C.Recorder(max_events) if place.type == "cpu" else CudaLog(place, max_events, trace)
    return Recording(log, getattr(log, "device", place), max_events, on_out_of_memory, trace)
