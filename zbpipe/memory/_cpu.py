"""What feeds a recording of the CPU's memory."""

from __future__ import annotations

import gc

from zbpipe import _C


class CpuSource:
    """torch's CPU allocator, tapped natively: csrc/shim/memory/zbp_tap.h."""

    def __init__(self, max_events: int) -> None:
        self.log = _C.Recorder(max_events)
        self.stop, self.mark, self.counters = self.log.stop, self.log.mark, self.log.counters

    def start(self) -> None:
        self.log.start()
        try:
            self.log.adopt(gc.get_objects())
        except BaseException:
            self.log.stop()
            raise
